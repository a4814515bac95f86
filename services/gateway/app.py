"""Composition root of the gateway: the only place that builds its adapters."""

import asyncio
import ipaddress
import re
import zlib

from services.gateway.gateway import Gateway
from services.gateway.metrics import GatewayMetrics
from services.gateway.params import GatewayParams
from services.gateway.server import listener
from services.gateway.settings import GatewaySettings
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.adapters.redis_store import RedisStore
from shared.contracts.topics import STAGE_RESULTS, Topics
from shared.errors import ConfigError
from shared.ports import Broker, Clock, StateStore
from shared.runtime.connections import kafka_params, redis_params
from shared.runtime.health import Health, probes
from shared.runtime.publishing import Publisher
from shared.runtime.settings import MeshSettings
from shared.runtime.tracing import NO_TRACES, Traces, open_traces

DRAIN_SHARE = 0.8
"""Of the time until the process is cut off, for open requests; the rest is for telling them so."""


def params_of(settings: GatewaySettings, num_partitions: int) -> GatewayParams:
    """Return the gateway's parameters.

    Args:
        settings: Its settings.
        num_partitions: Partitions of the results.
    """
    own = settings.model_dump(exclude={"host", "port", "allow_anonymous", "linger_s"})
    if settings.reply_partition is None:
        own["reply_partition"] = partition_of(settings.gateway_id, num_partitions)
    return GatewayParams(**own)


def partition_of(gateway_id: str, num_partitions: int) -> int:
    """Return the reply partition of a replica: its ordinal (`gateway-3`), else by its name."""
    ordinal = re.search(r"-(\d{1,6})$", gateway_id)
    number = int(ordinal[1]) if ordinal else zlib.crc32(gateway_id.encode())
    return number % num_partitions


def check_exposure(settings: GatewaySettings) -> None:
    """Refuse to serve the network without keys, unless that is what the user wants.

    Raises:
        ConfigError: It would.
    """
    if settings.keys_file is not None or settings.allow_anonymous or is_loopback(settings.host):
        return
    raise ConfigError(
        f"GATEWAY_HOST {settings.host} is reachable from other machines and there are no API "
        "keys: set GATEWAY_KEYS_FILE (docs/gateway.md), or GATEWAY_ALLOW_ANONYMOUS=true"
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def build_gateway(
    *,
    broker: Broker,
    store: StateStore,
    clock: Clock,
    topics: Topics,
    params: GatewayParams,
    metrics: GatewayMetrics,
    health: Health,
    drain_s: float,
    linger_s: float = 0.0,
    traces: Traces = NO_TRACES,
) -> Gateway:
    """Return a gateway on the given adapters (used by processes and by the embedded mesh)."""
    return Gateway(
        broker=broker,
        store=store,
        clock=clock,
        topics=topics,
        params=params,
        metrics=metrics,
        health=health,
        drain_s=drain_s,
        linger_s=linger_s,
        traces=traces,
    )


async def run(mesh: MeshSettings, settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Run the gateway as a process of its own until `stop` is set."""
    check_exposure(settings)
    clock = SystemClock(time_scale=mesh.time_scale)
    metrics, health = GatewayMetrics(), Health(clock)
    with listener(settings.host, settings.port) as sock:
        async with (
            probes(health, metrics, host=mesh.probes.host, port=mesh.probes.port),
            open_traces(mesh.traces, "gateway", settings.gateway_id) as traces,
            KafkaBroker.open(kafka_params(mesh, settings.gateway_id)) as broker,
            RedisStore.open(redis_params(mesh)) as store,
        ):
            topics = mesh.topics.topics()
            await Publisher(broker, topics, clock).learn_time(settings.gateway_id, stop.is_set)
            count = await broker.partitions_of(topics.name(STAGE_RESULTS))
            gateway = build_gateway(
                broker=broker,
                store=store,
                clock=clock,
                topics=topics,
                params=params_of(settings, count),
                metrics=metrics,
                health=health,
                drain_s=mesh.drain_s * DRAIN_SHARE,
                linger_s=settings.linger_s,
                traces=traces,
            )
            await gateway.serve(sock, stop)
