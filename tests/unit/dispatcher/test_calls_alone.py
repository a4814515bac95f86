"""A call that names no query is a query of one call."""

import msgspec

from services.dispatcher.control import Control
from services.dispatcher.gate import Gate
from services.dispatcher.intake import QueryMemory
from services.dispatcher.params import DispatcherParams
from services.dispatcher.preparation import Prepared, prepare
from shared.adapters.clock import ManualClock
from shared.contracts.messages import CallTimes, LatencyEvent, StageRequest
from tests.support.dispatching import make_request
from tests.support.scheduling import make_view

PARAMS = DispatcherParams(dispatcher_id="d")
VIEWS = (make_view("a"), make_view("b"))


def prepared(control: Control, request: StageRequest, now_s: float) -> Prepared:
    """Return a call that is ready now."""
    ready = msgspec.structs.replace(request, ready_at_s=now_s, arrival_s=now_s)
    return prepare(ready, VIEWS, control.predictor, PARAMS, QueryMemory(10))


def test_its_budget_is_its_whole_slo():
    """Nothing is kept for later stages, whatever its workflow usually does after such a stage."""
    control = Control("hexgen-flow", 0.01)
    alone = make_request("alone", query_id="", slo_s=100.0, workflow="text2sql", stage="revise")
    part = make_request("part", query_id="q", slo_s=100.0, workflow="text2sql", stage="revise")
    assert prepared(control, alone, 0.0).request.t_slo_s == 100.0
    budget_s = prepared(control, part, 0.0).request.t_slo_s
    assert budget_s is not None
    assert budget_s < 100.0


def test_an_slo_that_nobody_named_leaves_room_for_messages():
    """However short a call is, the SLO that the mesh chooses for it is not below the floor."""
    found = prepared(
        Control("hexgen-flow", 0.01), make_request("r", query_id="", slo_s=None, max_tokens=1), 0.0
    )
    assert found.request.slo_defaulted
    assert found.request.slo_s is not None
    assert found.request.slo_s >= PARAMS.default_slo_floor_s


async def test_calls_one_after_the_other_are_never_turned_away():
    """A call that has ended takes no room from the next: an idle mesh refuses nobody."""
    clock = ManualClock()
    control = Control("hexgen-flow", 0.01)
    gate = Gate(control, clock, PARAMS)
    for number in range(300):
        request_id = f"r{number}"
        call = prepared(control, make_request(request_id, query_id="", slo_s=None), clock.now_s())
        assert gate.judge(call, VIEWS) is None, number
        started_s, finished_s = clock.now_s(), clock.now_s() + 0.2
        await clock.advance(0.2)
        gate.see(
            LatencyEvent(
                request_id=request_id,
                query_id=request_id,
                workflow=call.request.workflow,
                stage=call.request.stage,
                model=call.request.model,
                instance_id="a",
                kind="completed",
                arrival_s=started_s,
                slo_s=call.request.slo_s or 0.0,
                times=CallTimes(
                    ready_at_s=started_s,
                    queued_at_s=started_s,
                    started_at_s=started_s,
                    finished_at_s=finished_s,
                ),
                t_comp_s=0.2,
            )
        )
