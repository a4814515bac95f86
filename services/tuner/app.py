"""Composition root of the tuner: the only place that builds its adapters."""

import asyncio
from concurrent.futures import Executor

from services.tuner.params import TunerParams
from services.tuner.processes import ReplayProcesses
from services.tuner.replay import ProcessReplay, Replay
from services.tuner.settings import TunerSettings
from services.tuner.tuner import Tuner
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
from shared.runtime.tuning_journal import Journal, unheard
from shared.scheduling.tuning import TuningRules


def params_of(settings: TunerSettings) -> TunerParams:
    """Return the tuner's parameters."""
    own = settings.model_dump()
    rules = TuningRules(
        margin=own.pop("margin"),
        reversal_margin=own.pop("reversal_margin"),
        max_calibration_error=own.pop("max_calibration_error"),
        min_queries=settings.min_queries,
    )
    return TunerParams(rules=rules, **own)


def replay_processes() -> Executor:
    """Return one process for replays; it is replaced when it dies, and ends with this process."""
    return ReplayProcesses()


def build_tuner(
    *,
    broker: Broker,
    replay: Replay,
    clock: Clock,
    topics: Topics,
    params: TunerParams,
    metrics: Metrics,
    health: Health,
    journal: Journal = unheard,
    traces: Traces = NO_TRACES,
) -> Tuner:
    """Return a tuner on the given adapters (used by processes and by the embedded mesh)."""
    return Tuner(
        broker=broker,
        replay=replay,
        clock=clock,
        topics=topics,
        params=params,
        metrics=metrics,
        health=health,
        journal=journal,
        traces=traces,
    )


async def run(mesh: MeshSettings, settings: TunerSettings, stop: asyncio.Event) -> None:
    """Run the tuner as a process of its own until `stop` is set."""
    clock = SystemClock(time_scale=mesh.time_scale)
    metrics, health = Metrics("tuner"), Health(clock)
    with replay_processes() as executor:
        async with (
            probes(health, metrics, host=mesh.probes.host, port=mesh.probes.port),
            open_traces(mesh.traces, "tuner", settings.tuner_id) as traces,
            KafkaBroker.open(kafka_params(mesh, settings.tuner_id)) as broker,
        ):
            topics = mesh.topics.topics()
            await Publisher(broker, topics, clock).learn_time(settings.tuner_id, stop.is_set)
            tuner = build_tuner(
                broker=broker,
                replay=ProcessReplay(executor),
                clock=clock,
                topics=topics,
                params=params_of(settings),
                metrics=metrics,
                health=health,
                traces=traces,
            )
            await tuner.serve(stop)
