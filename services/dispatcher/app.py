"""Composition root of the dispatcher: the only place that builds its adapters."""

import asyncio

from services.dispatcher.dispatcher import Dispatcher
from services.dispatcher.params import DispatcherParams
from services.dispatcher.recovery import Recovery
from services.dispatcher.settings import DispatcherSettings
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.contracts.topics import Topics
from shared.ports import Broker, Clock
from shared.runtime.connections import kafka_params
from shared.runtime.health import Health, probes
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import Publisher
from shared.runtime.settings import MeshSettings
from shared.runtime.tracing import NO_TRACES, Traces, open_traces


def build_dispatcher(
    *,
    broker: Broker,
    clock: Clock,
    topics: Topics,
    params: DispatcherParams,
    metrics: Metrics,
    health: Health,
    traces: Traces = NO_TRACES,
) -> Dispatcher:
    """Return a dispatcher on the given adapters (used by processes and by the embedded mesh)."""
    recovery = Recovery(
        broker=broker,
        clock=clock,
        topics=topics,
        params=params,
        metrics=metrics,
        health=health,
    )
    return Dispatcher(
        broker=broker,
        clock=clock,
        topics=topics,
        params=params,
        metrics=metrics,
        health=health,
        recovery=recovery,
        traces=traces,
    )


async def run(mesh: MeshSettings, settings: DispatcherSettings, stop: asyncio.Event) -> None:
    """Run a dispatcher as a process of its own until `stop` is set."""
    clock = SystemClock(time_scale=mesh.time_scale, shift_s=mesh.clock_shift_s)
    metrics, health = Metrics("dispatcher"), Health(clock)
    async with (
        probes(health, metrics, host=mesh.probes.host, port=mesh.probes.port),
        open_traces(mesh.traces, "dispatcher", settings.dispatcher_id) as traces,
        KafkaBroker.open(kafka_params(mesh, settings.dispatcher_id)) as broker,
    ):
        topics = mesh.topics.topics()
        await Publisher(broker, topics, clock).learn_time(settings.dispatcher_id, stop.is_set)
        dispatcher = build_dispatcher(
            broker=broker,
            clock=clock,
            topics=topics,
            params=settings.params(mesh.max_attempts),
            metrics=metrics,
            health=health,
            traces=traces,
        )
        await dispatcher.serve(stop)
