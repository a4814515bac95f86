"""The simulated engine keeps the engine contract, and the simulator's times."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest

from shared.adapters.clock import ManualClock, SystemClock
from shared.adapters.simulated_engine import SimulatedEngine, true_lengths
from shared.errors import ConfigError, EngineDead, GenerationFailed
from shared.ports import Engine, Finished, FirstToken
from shared.scheduling.latency import service_s
from tests.contract.engine_contract import EngineContract, events_of
from tests.support.worker_bench import SPEC, bound_call


class TestSimulatedEngine(EngineContract):
    """The contract."""

    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        """Return an engine on a fast clock."""
        async with SimulatedEngine.open(SPEC, SystemClock(time_scale=200.0)) as engine:
            yield engine


async def test_lone_call_takes_exactly_the_modelled_time() -> None:
    """On an idle instance a call ends at the expected service time, neither earlier nor later."""
    clock = ManualClock()
    expected_s = service_s(SPEC, input_tokens=50, cached_tokens=0, output_tokens=5)
    async with SimulatedEngine.open(SPEC, clock) as engine, asyncio.TaskGroup() as group:
        task = group.create_task(events_of(engine, bound_call("a")), name="a")
        await clock.advance(expected_s - 0.001)
        assert not task.done()
        await clock.advance(0.002)
        assert task.done()


async def test_call_that_joins_is_batched() -> None:
    """Two calls together take less time than one after the other."""
    clock = ManualClock()
    alone_s = service_s(SPEC, input_tokens=50, cached_tokens=0, output_tokens=20)
    async with SimulatedEngine.open(SPEC, clock) as engine, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(events_of(engine, bound_call(name, output_tokens=20)), name=name)
            for name in ("a", "b")
        ]
        await clock.advance(1.5 * alone_s)
        assert all(task.done() for task in tasks)


async def test_same_call_gives_the_same_text() -> None:
    """Text and lengths follow from the call, so runs can be repeated and compared."""
    texts = []
    for _ in range(2):
        async with SimulatedEngine.open(SPEC, SystemClock(time_scale=500.0)) as engine:
            *_, last = await events_of(engine, bound_call("a", output_tokens=30))
            assert isinstance(last, Finished)
            texts.append(last.text)
    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 30


async def test_lengths_are_derived_where_none_are_given() -> None:
    """A call of an ordinary producer gets a length from its text and its id, within max_tokens."""
    call = bound_call("a", simulated=None, prompt="x" * 4_000, max_tokens=16)
    lengths = true_lengths(call)
    assert lengths.input_tokens == 1_000
    assert 1 <= lengths.output_tokens <= 16
    assert true_lengths(call) == lengths
    chat = bound_call(
        "b", simulated=None, prompt=None, messages=({"role": "user", "content": "y" * 80},)
    )
    assert true_lengths(chat).input_tokens == 20


async def test_output_at_its_limit_says_length() -> None:
    """A generation that used up max_tokens reports `length`, a shorter one `stop`."""
    async with SimulatedEngine.open(SPEC, SystemClock(time_scale=500.0)) as engine:
        *_, cut = await events_of(engine, bound_call("a", output_tokens=9, max_tokens=9))
        *_, whole = await events_of(engine, bound_call("b", output_tokens=8, max_tokens=9))
    assert isinstance(cut, Finished)
    assert isinstance(whole, Finished)
    assert (cut.finish_reason, whole.finish_reason) == ("length", "stop")


async def test_full_engine_has_no_room() -> None:
    """While one call fills the memory there is no room for another; afterwards there is."""
    spec = msgspec.structs.replace(SPEC, kv_tokens=1_600)
    clock = ManualClock()
    async with SimulatedEngine.open(spec, clock) as engine, asyncio.TaskGroup() as group:
        call = bound_call("a", input_tokens=1_500)
        task = group.create_task(events_of(engine, call), name="a")
        await clock.advance(0.5)
        assert not engine.has_room_for(bound_call("b", input_tokens=500))
        await clock.advance(60.0)
        assert task.done()
        assert engine.has_room_for(bound_call("b", input_tokens=500))


async def test_injected_failures_are_counted_down() -> None:
    """Exactly so many generations fail, at their start or after the first token."""
    async with SimulatedEngine.open(SPEC, SystemClock(time_scale=500.0)) as engine:
        engine.fail_next(1)
        with pytest.raises(GenerationFailed):
            await events_of(engine, bound_call("a"))
        engine.fail_next(1, after_first_token=True)
        async with aclosing(engine.generate(bound_call("b"), "b:0")) as events:
            assert isinstance(await anext(events), FirstToken)
            with pytest.raises(GenerationFailed):
                await anext(events)
        assert engine.kv_used_tokens() == 0
        *_, last = await events_of(engine, bound_call("c"))
        assert isinstance(last, Finished)


async def test_hanging_engine_goes_on_after_recovery() -> None:
    """A hang delays results and loses none."""
    clock = ManualClock()
    async with SimulatedEngine.open(SPEC, clock) as engine, asyncio.TaskGroup() as group:
        engine.hang()
        task = group.create_task(events_of(engine, bound_call("a")), name="a")
        await clock.advance(1_000.0)
        assert not task.done()
        engine.recover()
        await clock.advance(0.0)
        assert task.done()


async def test_dead_engine_fails_everything() -> None:
    """After its death running calls and new ones raise EngineDead, and it says so."""
    async with SimulatedEngine.open(SPEC, ManualClock()) as engine:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_death_of(engine, "a"), name="a")
            await asyncio.sleep(0)
            engine.die()
        assert running.result()
        await engine.wait_dead()
        assert await _death_of(engine, "b")
        assert not engine.has_room_for(bound_call("c"))


async def test_spec_without_speed_is_refused() -> None:
    """A description that no engine could run is a configuration error."""
    spec = msgspec.structs.replace(SPEC, kv_tokens=0)
    with pytest.raises(ConfigError):
        SimulatedEngine(spec, ManualClock())


async def _death_of(engine: Engine, name: str) -> bool:
    try:
        await events_of(engine, bound_call(name))
    except EngineDead:
        return True
    return False
