"""Who is started first when the engine lacks room, and when a query can no longer be in time."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from services.worker.params import MAX_PASSES
from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.messages import BoundCall, Usage
from shared.ports import EngineEvent, Finished
from tests.support.worker_bench import Bench, altered, bound_call

ONE_AT_A_TIME = altered(capacity=1)


class NarrowEngine:
    """Has room for small calls only, and finishes nothing until it is told to."""

    def __init__(self, inner: SimulatedEngine) -> None:
        self._inner = inner
        self.spec = inner.spec
        self.go_on = asyncio.Event()

    def has_room_for(self, call: BoundCall) -> bool:
        """Return whether the call is small."""
        return call.predicted_input_tokens < 1_000

    async def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Finish when told to."""
        await self.go_on.wait()
        yield Finished(text=engine_id, usage=Usage(output_tokens=call.request.sibling + 1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize(("look_past", "num_started"), [(4, MAX_PASSES), (0, 0)])
async def test_small_calls_pass_a_large_one_so_often_and_no_more(
    bench: Bench, look_past: int, num_started: int
) -> None:
    """Twenty small calls behind one without room: sixteen pass it, or none if none may."""
    engine = NarrowEngine(bench.engine)
    bench.engine = engine  # type: ignore[assignment]
    async with bench.worker(altered(capacity=64, look_past=look_past)):
        await bench.send(bound_call("running"))
        await bench.running(1)
        await bench.send(
            bound_call("large", score=-1.0, input_tokens=6_000),
            *(bound_call(f"small-{index}") for index in range(20)),
        )
        await bench.running(1 + num_started)
        await bench.waiting(21 - num_started)
        engine.go_on.set()
        outcomes = await bench.outcomes_once(22)
    assert {outcome.kind for outcome in outcomes} == {"completed"}


@pytest.mark.parametrize(
    ("remaining_s", "order"), [(0.0, ["fine", "late"]), (None, ["late", "fine"])]
)
async def test_a_call_that_got_too_late_while_waiting_goes_behind_the_others(
    bench: Bench, remaining_s: float | None, order: list[str]
) -> None:
    """It runs after those that can still be in time, unless its dispatcher demotes nobody."""
    bench.engine.hang()
    async with bench.worker(ONE_AT_A_TIME):
        await bench.send(bound_call("running", score=0.0))
        await bench.running(1)
        late = bound_call("late", score=1.0, deadline_s=bench.clock.now_s() - 1.0)
        await bench.send(
            msgspec.structs.replace(late, remaining_s=remaining_s),
            msgspec.structs.replace(bound_call("fine", score=2.0), remaining_s=remaining_s),
        )
        await bench.waiting(2)
        bench.engine.recover()
        outcomes = await bench.outcomes_once(3)
    assert [outcome.request_id for outcome in outcomes] == ["running", *order]
    demoted = bench.metrics.totals().get("hexflow_calls_demoted_total{}", 0)
    assert demoted == (remaining_s is not None)


async def test_late_calls_alone_keep_their_order(bench: Bench) -> None:
    """Demotion changes nothing among those that are all too late."""
    bench.engine.hang()
    async with bench.worker(ONE_AT_A_TIME):
        await bench.send(bound_call("running", score=0.0))
        await bench.running(1)
        past_s = bench.clock.now_s() - 1.0
        for name, score in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
            call = bound_call(name, score=score, deadline_s=past_s)
            await bench.send(msgspec.structs.replace(call, remaining_s=5.0))
        await bench.waiting(3)
        bench.engine.recover()
        outcomes = await bench.outcomes_once(4)
    assert [outcome.request_id for outcome in outcomes] == ["running", "a", "b", "c"]
