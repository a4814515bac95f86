"""The gate: who is asked, what it learns from latency events, who is told."""

from typing import Any

import msgspec

from services.dispatcher.control import Control
from services.dispatcher.gate import Gate, is_new_query
from services.dispatcher.intake import QueryMemory
from services.dispatcher.params import DispatcherParams
from services.dispatcher.preparation import prepare
from shared.adapters.clock import ManualClock
from shared.contracts.messages import CallTimes, LatencyEvent, StageRequest
from shared.scheduling.admission import REST_S
from shared.scheduling.policy import InstanceView
from tests.support.dispatching import make_request
from tests.support.scheduling import make_spec

VIEWS = (InstanceView(spec=make_spec("a"), capacity=4),)


class Bench:
    """A gate with a clock, and calls that are ready now."""

    def __init__(self, **params: Any) -> None:
        self.clock = ManualClock()
        self.params = DispatcherParams(dispatcher_id="d", **params)
        self.control = Control("hexgen-flow", 0.1)
        self.gate = Gate(self.control, self.clock, self.params)

    def call(self, query_id: str, stage: str = "s", **fields: Any) -> StageRequest:
        """Return a call that became ready now, the first of its query unless told otherwise."""
        given = {"query_id": query_id, "ready_at_s": self.clock.now_s(), "stage": stage, **fields}
        given.setdefault("arrival_s", given["ready_at_s"])
        return make_request(f"{query_id}-{stage}-{fields.get('sibling', 0)}", **given)

    def judge(self, request: StageRequest, views: tuple[InstanceView, ...] = VIEWS) -> str | None:
        """Ask about a call."""
        memory = QueryMemory(10)
        prepared = prepare(request, views, self.control.predictor, self.params, memory)
        return self.gate.judge(prepared, views)

    def fill(self) -> int:
        """Let queries in until one is turned away; returns how many got in."""
        for index in range(10_000):
            if self.judge(self.call(f"q{index}")) is not None:
                return index
        raise AssertionError("nobody was turned away")

    def see(self, request: StageRequest, **fields: Any) -> None:
        """Let a call's latency event come."""
        now_s = self.clock.now_s()
        values: dict[str, Any] = {
            "request_id": request.request_id,
            "query_id": request.query_id,
            "workflow": request.workflow,
            "stage": request.stage,
            "model": request.model,
            "kind": "completed",
            "arrival_s": request.arrival_s,
            "slo_s": 60.0,
            "times": CallTimes(queued_at_s=now_s, started_at_s=now_s, finished_at_s=now_s),
            "t_comp_s": 1.0,
            **fields,
        }
        self.gate.see(LatencyEvent(**values))


def test_queries_beyond_what_can_be_done_are_turned_away():
    """The first ones are let in, then one is told that the mesh is overloaded."""
    bench = Bench()
    assert bench.fill() >= 1
    assert bench.judge(bench.call("next")) == "overloaded"


def test_siblings_share_their_querys_verdict():
    """A call of a first stage is turned away with its sibling, and let in with it."""
    bench = Bench()
    assert bench.judge(bench.call("early")) is None
    bench.fill()
    assert bench.judge(bench.call("late")) == "overloaded"
    assert bench.judge(bench.call("late", sibling=1, siblings=2)) == "overloaded"
    assert bench.judge(bench.call("early", sibling=1, siblings=2)) is None


def test_later_calls_are_never_turned_away():
    """Work that was begun is finished, whoever let it in."""
    bench = Bench()
    bench.fill()
    later = bench.call("q-of-another-dispatcher", "t", parents=("x",))
    assert bench.judge(later) is None
    assert bench.judge(bench.call("again", attempt=1)) is None


def test_a_query_that_comes_again_is_asked_again():
    """Whoever was turned away may ask later under the same id."""
    bench = Bench()
    count = bench.fill()
    for index in range(count):
        bench.see(bench.call(f"q{index}"), kind="failed", reason="generation_failed")
    assert bench.judge(bench.call(f"q{count}")) is None


def test_only_a_first_call_begins_a_query():
    """Parents, iterations, attempts and an older arrival tell that something came before."""
    bench = Bench()
    first = bench.call("q")
    assert is_new_query(first)
    for changes in ({"parents": ("x",)}, {"iteration": 1}, {"attempt": 1}, {"arrival_s": 0.0}):
        assert not is_new_query(msgspec.structs.replace(first, **changes))


def test_the_mesh_has_a_bound():
    """With too many calls waiting everywhere a new query is told that queues are full."""
    bench = Bench(mesh_bound=5)
    request = bench.call("q")
    prepared = prepare(request, VIEWS, bench.control.predictor, bench.params, QueryMemory(10))
    full = [msgspec.structs.replace(VIEWS[0], num_waiting=5)]
    assert bench.gate.judge(prepared, full) == "queue_full"


def test_events_of_other_dispatchers_queries_count():
    """A query seen only by its events takes its share too."""
    bench, other = Bench(), Bench()
    alone = other.fill()
    assert bench.judge(bench.call("own")) is None
    for index in range(alone):
        bench.see(bench.call(f"foreign-{index}"))
    assert bench.fill() < alone


def test_a_new_dispatcher_learns_the_rate_from_the_past():
    """Events read before the first query of their model count, in order of time."""
    fresh, taught = Bench(), Bench()
    now_s = taught.clock.now_s()
    for index in reversed(range(600)):  # partitions are not read in order of time
        at_s = now_s - 120.0 + index * 0.2
        times = CallTimes(queued_at_s=at_s - 9.0, started_at_s=at_s - 5.0, finished_at_s=at_s)
        taught.see(
            taught.call(f"old{index}", arrival_s=at_s - 9.0), times=times, slo_s=8.0, t_comp_s=5.0
        )
    assert taught.fill() > 2 * fresh.fill()


async def test_an_idle_mesh_turns_nobody_away_for_queries_that_rest():
    """What was let in and is not heard of owes an idle mesh nothing; a busy one still counts it."""
    bench = Bench()
    bench.fill()
    busy = (msgspec.structs.replace(VIEWS[0], num_running=1),)
    await bench.clock.advance(REST_S + 1.0)
    assert bench.judge(bench.call("while busy"), busy) == "overloaded"
    assert bench.judge(bench.call("while idle")) is None


def test_a_burst_on_an_idle_mesh_is_still_bounded():
    """Queries that come at one instant count although none of them runs yet."""
    bench = Bench()
    assert bench.fill() < 1_000
    assert bench.judge(bench.call("one more")) == "overloaded"


def test_a_refused_call_leaves_no_promise_behind():
    """A query one of whose calls was refused elsewhere gives its share back at once."""
    bench = Bench()
    first = bench.call("impossible", slo_s=1e6)
    assert bench.judge(first) is None
    bench.gate.turned_away(first)
    other = bench.call("other", slo_s=0.001)  # in time only where nobody else was let in
    assert bench.judge(other) is None


def test_a_short_limit_makes_a_call_short():
    """A call that may write two tokens is let in where one without a limit would not be."""
    bench = Bench()
    assert bench.judge(bench.call("first")) is None
    alone = {"slo_s": 5.0, "arrival_s": bench.clock.now_s(), "ready_at_s": bench.clock.now_s()}
    long = make_request("long", query_id=None, max_tokens=4_000, **alone)
    assert bench.judge(long) == "overloaded"
    short = make_request("short", query_id=None, max_tokens=2, **alone)
    assert bench.judge(short) is None
