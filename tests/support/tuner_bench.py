"""A tuner on the in-process broker, fed by a test."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from services.tuner.app import build_tuner
from services.tuner.params import TunerParams
from services.tuner.replay import Replay
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.codec import decode_any, encode
from shared.contracts.messages import (
    AlphaUpdate,
    InstanceState,
    LatencyEvent,
    SpeedUpdate,
    WorkflowProfile,
)
from shared.contracts.topics import CONTROL, INSTANCE_STATES, LATENCY_EVENTS, Topics
from shared.domain.instance import InstanceSpec
from shared.ports import TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.tracing import NO_TRACES, Traces
from shared.runtime.tuning_journal import Decided
from shared.scheduling.tuning import TuningRules
from tests.support.scheduling import make_spec
from tests.support.tuning import query_events

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
        self.decided: list[Decided] = []

    async def tell(self, events: Iterable[LatencyEvent]) -> None:
        """Publish events, in order."""
        for event in events:
            await self.broker.publish(TOPICS.name(LATENCY_EVENTS), encode(event))

    async def feed(self, latency_s: float, *, count: int = 25, start_s: float = 0.0) -> None:
        """Publish the events of ended queries."""
        for index in range(count):
            arrival_s = start_s + index
            await self.tell(
                query_events(f"q{start_s}-{index}", arrival_s=arrival_s, latency_s=latency_s)
            )

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
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    replay: Replay,
    params: TunerParams = PARAMS,
    broker: MemoryBroker | None = None,
    fleet: Sequence[InstanceSpec] = (make_spec("a100-0"),),
    traces: Traces = NO_TRACES,
) -> AsyncIterator[Bench]:
    """Run a tuner, with one instance in the fleet by default; a clock far after every event."""
    clock = SystemClock()
    broker = broker or MemoryBroker(clock)
    await broker.create_topics(TOPICS.specs())
    for spec in fleet:
        name = spec.instance_id
        state = InstanceState(instance_id=name, phase="serving", epoch=0, spec=spec)
        await broker.publish(TOPICS.name(INSTANCE_STATES), encode(state), key=name.encode())
    bench = Bench(broker)
    tuner = build_tuner(
        broker=broker,
        replay=replay,
        clock=clock,
        topics=TOPICS,
        params=params,
        metrics=bench.metrics,
        health=Health(clock),
        journal=bench.decided.append,
        traces=traces,
    )
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(tuner.serve(stop), name="tuner")
        try:
            yield bench
        finally:
            stop.set()
