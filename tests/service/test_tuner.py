"""The tuner on the in-process broker: what it publishes, and when it keeps still."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.tuner.app import build_tuner, replay_processes
from services.tuner.params import TunerParams
from services.tuner.replay import ProcessReplay
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.codec import decode_any, encode
from shared.contracts.messages import AlphaUpdate, InstanceState, SpeedUpdate, WorkflowProfile
from shared.contracts.topics import CONTROL, INSTANCE_STATES, LATENCY_EVENTS, Topics
from shared.ports import TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.scheduling.tuning import TuningRules
from tests.support.scheduling import make_spec
from tests.support.tuning import ChosenReplay, query_events

TOPICS = Topics(prefix="t.", state_partitions=1)
PARAMS = TunerParams(
    initial_alpha=0.7,
    min_queries=20,
    window_queries=100,
    quiet_s=30.0,
    period_s=1e6,
    rules=TuningRules(min_queries=20),
)


class Bench:
    """A running tuner, fed by the test."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self.metrics = Metrics("tuner")

    async def feed(self, latency_s: float, *, count: int = 25, start_s: float = 0.0) -> None:
        """Publish the events of ended queries."""
        topic = TOPICS.name(LATENCY_EVENTS)
        for index in range(count):
            for event in query_events(
                f"q{start_s}-{index}", arrival_s=start_s + index, latency_s=latency_s
            ):
                await self.broker.publish(topic, encode(event))

    async def control(self) -> list[AlphaUpdate | WorkflowProfile | SpeedUpdate]:
        """Return what is on `control`."""
        tp = TopicPartition(TOPICS.name(CONTROL), 0)
        async with self.broker.partition_consumer([tp], start="beginning") as consumer:
            records = await consumer.fetch(timeout_s=0.05)
        return [
            decode_any(r.value or b"", AlphaUpdate, WorkflowProfile, SpeedUpdate) for r in records
        ]

    async def alphas(self) -> list[AlphaUpdate]:
        """Return the α updates published."""
        return [update for update in await self.control() if isinstance(update, AlphaUpdate)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(replay, params: TunerParams = PARAMS) -> AsyncIterator[Bench]:
    """Run a tuner with one instance in the fleet; a clock far after every event."""
    clock = SystemClock()
    broker = MemoryBroker(clock)
    await broker.create_topics(TOPICS.specs())
    state = InstanceState(instance_id="a100-0", phase="serving", epoch=0, spec=make_spec("a100-0"))
    await broker.publish(TOPICS.name(INSTANCE_STATES), encode(state), key=b"a100-0")
    bench = Bench(broker)
    tuner = build_tuner(
        broker=broker,
        replay=replay,
        clock=clock,
        topics=TOPICS,
        params=params,
        metrics=bench.metrics,
        health=Health(clock),
    )
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(tuner.serve(stop), name="tuner")
        try:
            yield bench
        finally:
            stop.set()


async def test_a_better_alpha_is_published_with_its_reason():
    """A clear, trusted gain is published on `control` with a revision and a reason."""
    replay = ChosenReplay({0.7: 40.0, 0.01: 20.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        updates = await bench.alphas()
        while not updates:
            await asyncio.sleep(0.01)
            updates = await bench.alphas()
    (update,) = updates
    assert (update.pool, update.alpha, update.previous_alpha) == ("default", 0.01, 0.7)
    assert update.revision == 1
    assert update.predicted_p95_s == 20.0
    assert "20" in update.reason


async def test_a_replay_that_does_not_reproduce_reality_moves_nothing():
    """The simulator is off by far more than the bound: no α is published."""
    replay = ChosenReplay({0.7: 400.0, 0.01: 20.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        await asyncio.sleep(0.1)
        assert await bench.alphas() == []


async def test_a_gain_within_the_margin_moves_nothing():
    """One percent is not worth a change."""
    replay = ChosenReplay({0.7: 40.0, 0.01: 39.6}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        await asyncio.sleep(0.1)
        assert await bench.alphas() == []


async def test_too_few_queries_move_nothing():
    """A handful of queries is no evidence."""
    replay = ChosenReplay({0.7: 40.0, 0.01: 20.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0, count=5)
        await asyncio.sleep(1.2)
        assert replay.requests == []


async def test_shapes_learned_from_the_window_are_published():
    """An undeclared workflow is learned: stages, lengths, what follows what."""
    replay = ChosenReplay({0.7: 40.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        profiles = [u for u in await bench.control() if isinstance(u, WorkflowProfile)]
    shape = profiles[0].shape
    assert shape.workflow == "demo"
    assert shape.stages["judge"].siblings == pytest.approx(2.0, rel=0.2)
    assert shape.remaining["draft/0"]["judge"] == pytest.approx(1.0, rel=0.2)


async def test_garbage_is_buried_and_does_not_stop_the_tuner():
    """A poison event goes to dead-letters once."""
    replay = ChosenReplay({0.7: 40.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.broker.publish(TOPICS.name(LATENCY_EVENTS), b"\xc1")
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
    assert bench.metrics.totals()["hexflow_dead_letters_total{reason=undecodable}"] == 1.0


async def test_the_real_simulator_answers_in_a_process_of_its_own():
    """The whole chain, with the compiled simulator behind the port."""
    with replay_processes() as executor:
        async with running(ProcessReplay(executor)) as bench:
            await bench.feed(latency_s=40.0)
            async with asyncio.timeout(100):
                while not await bench.control():
                    await asyncio.sleep(0.05)
