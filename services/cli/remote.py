"""A mesh that runs elsewhere: how to reach it, and what it says about itself."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from services.cli.session import MeshAccess
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.contracts.codec import decode_any
from shared.contracts.messages import InstanceState, RecoveryProbe
from shared.contracts.topics import INSTANCE_STATES, Topics
from shared.domain.instance import InstanceSpec
from shared.errors import BrokerUnavailable, ConfigError, ContractError, UnknownTopic
from shared.ports import Broker, Record, TopicPartition
from shared.runtime.connections import kafka_params
from shared.runtime.settings import MeshSettings

STALE_AFTER_S = 30.0
NAMED_BY_OPTION = "name another with --kafka HOST:PORT"
NAMED_BY_OPTION_OR_VARIABLE = f"{NAMED_BY_OPTION} or HEXFLOW_KAFKA__BOOTSTRAP_SERVERS"
SCALE_TOLERANCE = 0.01


class LiveInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that announced itself lately.

    Attributes:
        spec: Its description.
        time_scale: Mesh seconds per wall second, as its own report implies.
    """

    spec: InstanceSpec
    time_scale: float


@dataclass(frozen=True, kw_only=True)
class RemoteMesh(MeshAccess):
    """A mesh that runs elsewhere."""

    fleet: tuple[InstanceSpec, ...]
    """The instances that serve."""


@asynccontextmanager
async def connect(
    settings: MeshSettings, client_id: str, *, remedy: str = ""
) -> AsyncIterator[Broker]:
    """Open the broker that the settings name.

    Args:
        settings: Where it is.
        client_id: Name under which its logs know the command.
        remedy: What to do when it does not answer; empty: the caller says so.

    Raises:
        BrokerUnavailable: It does not answer.
        ConfigError: It refuses the credentials.
    """
    async with AsyncExitStack() as stack:
        opening = KafkaBroker.open(kafka_params(settings, client_id))
        try:
            broker = await stack.enter_async_context(opening)
        except BrokerUnavailable as exc:
            raise BrokerUnavailable(f"{exc}; {remedy}" if remedy else str(exc)) from exc
        yield broker


async def live_instances(broker: Broker, topics: Topics, now_unix_s: float) -> list[LiveInstance]:
    """Return the instances that serve now, by id.

    Args:
        broker: The mesh's broker.
        topics: Names.
        now_unix_s: Wall clock, Unix seconds.

    Raises:
        UnknownTopic: The mesh's topics were never created.
    """
    name = topics.name(INSTANCE_STATES)
    count = await broker.partitions_of(name)
    partitions = [TopicPartition(name, index) for index in range(count)]
    last: dict[str, LiveInstance] = {}
    async with broker.partition_consumer(partitions, start="beginning") as consumer:
        ends = await consumer.end_offsets()
        while any([await consumer.position(tp) < end for tp, end in ends.items()]):
            for record in await consumer.fetch(timeout_s=1.0):
                _note(record, now_unix_s, last)
    return [last[instance_id] for instance_id in sorted(last)]


def _note(record: Record, now_unix_s: float, last: dict[str, LiveInstance]) -> None:
    key = (record.key or b"").decode(errors="replace")
    last.pop(key, None)
    try:
        state = decode_any(record.value or b"", InstanceState, RecoveryProbe)
    except ContractError:
        return
    is_fresh = now_unix_s - record.append_unix_s < STALE_AFTER_S
    if isinstance(state, InstanceState) and state.phase == "serving" and is_fresh:
        scale = state.at_s / record.append_unix_s
        last[key] = LiveInstance(spec=state.spec, time_scale=round(scale, 4))


def scale_of(instances: Sequence[LiveInstance], wanted: float | None) -> float:
    """Return the time scale that the mesh runs at.

    Args:
        instances: What serves, at least one.
        wanted: What the user said, or None.

    Raises:
        ConfigError: The instances disagree with each other or with the user.
    """
    scales = sorted(instance.time_scale for instance in instances)
    found = scales[0]
    if scales[-1] - found > SCALE_TOLERANCE * found:
        raise ConfigError(f"the workers run at different time scales ({found:g}, {scales[-1]:g})")
    if wanted is not None and abs(wanted - found) > SCALE_TOLERANCE * found:
        raise ConfigError(f"the mesh runs at time scale {found:g}, not {wanted:g}")
    return wanted if wanted is not None else found


@asynccontextmanager
async def open_remote(
    settings: MeshSettings, time_scale: float | None
) -> AsyncIterator[RemoteMesh]:
    """Open a mesh that runs elsewhere.

    Args:
        settings: Where.
        time_scale: What the user believes it runs at; None: what its workers say.

    Raises:
        BrokerUnavailable: The broker does not answer, or no instance serves there.
        UnknownTopic: The mesh's topics were never created.
        ConfigError: The time scale is another.
    """
    address = settings.kafka.bootstrap_servers
    topics = settings.topics.topics()
    async with connect(settings, "hexflow-producer", remedy=NAMED_BY_OPTION) as broker:
        try:
            instances = await live_instances(broker, topics, time.time())
        except UnknownTopic as exc:
            raise UnknownTopic(
                f"the Kafka at {address} lacks the mesh's topics (prefix {topics.prefix!r}): "
                f"run hexflow topics --kafka {address}"
            ) from exc
        if not instances:
            raise BrokerUnavailable(
                f"no instance serves on the Kafka at {address}: start a mesh there with hexflow "
                f"up --kafka {address} --redis URL, or workers with python -m services.worker"
            )
        yield RemoteMesh(
            broker=broker,
            clock=SystemClock(time_scale=scale_of(instances, time_scale)),
            topics=topics,
            fleet=tuple(instance.spec for instance in instances),
        )
