"""Composition root of the worker: the only place that builds its adapters."""

import asyncio

from services.worker.engines import open_engine
from services.worker.params import WorkerParams
from services.worker.settings import WorkerSettings
from services.worker.worker import Worker
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.adapters.redis_store import RedisStore
from shared.contracts.topics import Topics
from shared.ports import Broker, Clock, Engine, StateStore
from shared.runtime.connections import kafka_params, redis_params
from shared.runtime.health import Health, probes
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import Publisher
from shared.runtime.settings import MeshSettings
from shared.runtime.tracing import NO_TRACES, Traces, open_traces


def build_worker(
    *,
    broker: Broker,
    store: StateStore,
    engine: Engine,
    clock: Clock,
    topics: Topics,
    params: WorkerParams,
    metrics: Metrics,
    health: Health,
    traces: Traces = NO_TRACES,
) -> Worker:
    """Return a worker on the given adapters (used by processes and by the embedded mesh)."""
    return Worker(
        broker=broker,
        store=store,
        engine=engine,
        clock=clock,
        topics=topics,
        params=params,
        metrics=metrics,
        health=health,
        traces=traces,
    )


async def run(mesh: MeshSettings, settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Run one worker as a process of its own until `stop` is set.

    Raises:
        ConfigError: A setting, or the fleet, is wrong.
        EngineDead: The engine died; its calls are handed back.
    """
    spec, topics, name = settings.spec(), mesh.topics.topics(), f"worker-{settings.instance_id}"
    clock = SystemClock(time_scale=mesh.time_scale, shift_s=mesh.clock_shift_s)
    metrics, health = Metrics("worker", spec.instance_id), Health(clock)
    async with (
        probes(health, metrics, host=mesh.probes.host, port=mesh.probes.port),
        open_traces(mesh.traces, "worker", spec.instance_id) as traces,
        RedisStore.open(redis_params(mesh)) as store,
        KafkaBroker.open(kafka_params(mesh, name)) as broker,
    ):
        await store.check_rights()
        await Publisher(broker, topics, clock).learn_time(name, stop.is_set)
        async with open_engine(  # reads the clock at once
            settings.engine,
            spec,
            clock,
            openai=settings.openai,
            vllm=settings.vllm,
            fault_file=settings.fault_file,
        ) as engine:
            worker = build_worker(
                broker=broker,
                store=store,
                engine=engine,
                clock=clock,
                topics=topics,
                params=settings.params(engine.spec, mesh.drain_s, mesh.max_attempts),
                metrics=metrics,
                health=health,
                traces=traces,
            )
            await worker.serve(stop)
