"""A call that its engine can never run."""

from collections.abc import AsyncGenerator

from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.messages import BoundCall
from shared.errors import CallRefused
from shared.ports import EngineEvent
from tests.support.worker_bench import SPEC, Bench, altered, bound_call


class Refusing(SimulatedEngine):
    """Refuses calls whose id begins with `odd`."""

    async def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Run one call, or refuse it."""
        if call.request.request_id.startswith("odd"):
            raise CallRefused("too long for the context")
        async for event in super().generate(call, engine_id):
            yield event


async def test_a_refused_call_fails_at_once(bench: Bench) -> None:
    """It is not tried again, and however many there are the engine is not slowed down for them."""
    params = altered(max_attempts=3, failure_threshold=1, failure_pause_s=1_000.0)
    async with Refusing.open(SPEC, bench.clock) as engine:
        bench.engine = engine
        async with bench.worker(params):
            await bench.send(*(bound_call(f"odd{n}") for n in range(4)), bound_call("even"))
            outcomes = await bench.outcomes_once(5)
    found = {o.request_id: (o.kind, o.reason, o.attempt) for o in outcomes}
    refused = {f"odd{n}": ("failed", "call_refused", 0) for n in range(4)}
    assert found == {"even": ("completed", "", 0), **refused}
    assert await bench.handed_back() == []
