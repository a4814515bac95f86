"""Composition root of the agent: the only place that builds its adapters."""

import asyncio

from services.text2sql.agent import Agent
from services.text2sql.params import AgentParams
from services.text2sql.settings import AgentSettings
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.adapters.redis_store import RedisStore
from shared.contracts.topics import Topics
from shared.ports import Broker, Clock, StateStore
from shared.runtime.connections import kafka_params, redis_params
from shared.runtime.health import Health, probes
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import Publisher
from shared.runtime.settings import MeshSettings
from shared.runtime.tracing import NO_TRACES, Traces, open_traces


def build_agent(
    *,
    broker: Broker,
    store: StateStore | None,
    clock: Clock,
    topics: Topics,
    params: AgentParams,
    metrics: Metrics,
    health: Health,
    traces: Traces = NO_TRACES,
) -> Agent:
    """Return an agent on the given adapters (used by processes and by the embedded mesh)."""
    return Agent(
        broker=broker,
        clock=clock,
        topics=topics,
        store=store,
        params=params,
        metrics=metrics,
        health=health,
        traces=traces,
    )


async def run(mesh: MeshSettings, settings: AgentSettings, stop: asyncio.Event) -> None:
    """Run an agent as a process of its own until `stop` is set.

    Raises:
        ConfigError: A setting, a database or a workflow is wrong.
    """
    clock = SystemClock(time_scale=mesh.time_scale)
    metrics, health = Metrics("text2sql"), Health(clock)
    async with (
        probes(health, metrics, host=mesh.probes.host, port=mesh.probes.port),
        open_traces(mesh.traces, "text2sql", settings.agent_id) as traces,
        RedisStore.open(redis_params(mesh)) as store,
        KafkaBroker.open(kafka_params(mesh, settings.agent_id)) as broker,
    ):
        topics = mesh.topics.topics()
        await Publisher(broker, topics, clock).learn_time(settings.agent_id, stop.is_set)
        agent = build_agent(
            broker=broker,
            store=store,
            clock=clock,
            topics=topics,
            params=settings.params(mesh.drain_s),
            metrics=metrics,
            health=health,
            traces=traces,
        )
        await agent.serve(stop)
