"""A file tells a simulated engine to be ill."""

import asyncio
from pathlib import Path

import pytest

from shared.adapters.clock import SystemClock
from shared.adapters.engine_faults import faults_from
from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.messages import BoundCall, ScoreTerms, SimulatedLengths, StageRequest
from shared.errors import GenerationFailed
from shared.simulation.fleets import builtin_fleet

SPEC = builtin_fleet("hetero-1")[0]


def call(name: str) -> BoundCall:
    """Return a short call."""
    lengths = SimulatedLengths(input_tokens=8, output_tokens=2)
    return BoundCall(
        request=StageRequest(request_id=name, model=SPEC.model, simulated=lengths),
        queue_score=0.0,
        t_comp_s=0.1,
        deadline_s=100.0,
        predicted_input_tokens=8,
        predicted_output_tokens=2.0,
        terms=ScoreTerms(policy="p", score=0.0, t_queue_s=0.0, t_comp_s=0.1),
        dispatched_at_s=0.0,
        dispatcher_id="d",
    )


async def finish(engine: SimulatedEngine, name: str) -> None:
    """Run a call to its end."""
    async for _ in engine.generate(call(name), name):
        pass


async def until_failing(engine: SimulatedEngine) -> None:
    """Return when the engine fails calls."""
    for number in range(1_000):
        try:
            await finish(engine, f"try-{number}")
        except GenerationFailed:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the engine never failed")


async def test_the_engine_obeys_and_recovers(tmp_path: Path):
    """`fail` fails every call, `hang` finishes none, no file heals; what hung then finishes."""
    order, clock = tmp_path / "a.fault", SystemClock(time_scale=100.0)
    async with SimulatedEngine.open(SPEC, clock) as engine, faults_from(order, engine, clock):
        await finish(engine, "well")
        order.write_text("fail")
        await until_failing(engine)
        with pytest.raises(GenerationFailed):
            await finish(engine, "ill")
        order.write_text("hang\n")
        async with asyncio.timeout(30):
            while not engine._is_hanging:
                await asyncio.sleep(0.01)
        hung = asyncio.ensure_future(finish(engine, "hung"))
        await asyncio.sleep(0.05)
        assert not hung.done()
        order.unlink()
        async with asyncio.timeout(30):
            await hung


async def test_without_a_file_nothing_is_done():
    """Production engines are never told anything."""
    clock = SystemClock(time_scale=100.0)
    async with SimulatedEngine.open(SPEC, clock) as engine, faults_from(None, engine, clock):
        await finish(engine, "well")
