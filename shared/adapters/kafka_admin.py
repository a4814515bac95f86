"""Topics, their settings and committed positions of a Kafka cluster.

aiokafka's own requests create topics that are asked about where the broker allows it, and overlook
the group error of a position request; the requests here do neither.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from aiokafka import errors as kafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.protocol.metadata import MetadataRequest

from shared.adapters.kafka_errors import translate, translated
from shared.adapters.kafka_params import KafkaParams
from shared.contracts.topics import TopicSpec
from shared.errors import BrokerUnavailable, UnknownTopic
from shared.ports import Committed, TopicPartition

T = TypeVar("T")

RETRY_S = 0.1
FOREVER_S = 100 * 365 * 86_400
SETTINGS = ("cleanup.policy", "retention.ms", "max.message.bytes", "message.timestamp.type")
COMPACTED_SETTINGS = {
    "cleanup.policy": "compact",
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "3600000",
    "delete.retention.ms": "3600000",
}


class _Client(AIOKafkaAdminClient):
    """aiokafka's admin client with requests that it does not offer."""

    async def metadata(self, topics: list[str] | None) -> dict[str, tuple[int, list[int]]]:
        """Return per topic its error code and its partitions' leaders; None asks for all."""
        response = await self._send_request(
            MetadataRequest(topics, allow_auto_topic_creation=False)
        )
        described = response.to_object()["topics"]
        return {
            topic["topic"]: (
                topic["error_code"],
                [partition["leader"] for partition in topic["partitions"]],
            )
            for topic in described
            if not topic.get("is_internal")
        }

    async def broker_count(self) -> int:
        """Return how many brokers the cluster has."""
        return len((await self.describe_cluster())["brokers"])

    async def positions(
        self, group: str, tps: Sequence[TopicPartition]
    ) -> dict[TopicPartition, Committed]:
        """Return a group's committed positions."""
        by_topic: dict[str, list[int]] = {}
        for tp in tps:
            by_topic.setdefault(tp.topic, []).append(tp.partition)
        node = await self.find_coordinator(group)
        response: Any = await self._send_request(
            OffsetFetchRequest(group, list(by_topic.items())), node
        )
        _raise_for(getattr(response, "error_code", 0))
        found = {}
        for topic, partitions in response.topics:
            for partition, offset, metadata, error_code in partitions:
                _raise_for(error_code)
                if offset >= 0:
                    found[TopicPartition(topic, partition)] = Committed(
                        offset=offset, metadata=metadata or ""
                    )
        return found

    async def members(self, group: str) -> list[tuple[str, str]]:
        """Return (member id, client id) of a group's members."""
        found = []
        response: Any = (await self.describe_consumer_groups([group]))[0]
        for described in response.groups:
            _raise_for(described[0])
            found += [(member[0], member[1]) for member in described[5]]
        return found

    async def remove(self, group: str, member_id: str) -> None:
        """Let a member leave its group, as it would itself."""
        node = await self.find_coordinator(group)
        response: Any = await self._send_request(LeaveGroupRequest(group, member_id), node)
        _raise_for(response.error_code)


def _raise_for(code: int) -> None:
    if code:
        raise kafka.for_code(code)


class KafkaAdmin:
    """Administration of a cluster; every call is bounded in time and retries what may pass.

    Args:
        params: How to reach the cluster.
    """

    def __init__(self, params: KafkaParams) -> None:
        self._params = params
        self._client = _Client(**params.connection())

    async def start(self) -> None:
        """Connect.

        Raises:
            BrokerUnavailable: No broker answers.
            ConfigError: The broker refuses the credentials.
        """
        address = self._params.bootstrap_servers
        with translated("connecting", address):
            async with asyncio.timeout(self._params.connect_timeout_s):
                try:
                    await self._client.start()
                except kafka.KafkaConnectionError as exc:
                    cause = await self._connection_error() or exc
                    raise translate(cause, "connecting", address) from cause

    async def stop(self) -> None:
        """Disconnect."""
        await self._client.close()

    async def ping(self) -> None:
        """Return when the cluster has answered a request."""
        await self._ask("asking for brokers", self._client.broker_count)

    async def dismiss(self, group: str, client_id: str) -> int:
        """Remove the members of a group that have a client id; see the port."""
        removed: set[str] = set()

        async def attempt() -> None:
            for member_id, client in await self._client.members(group):
                if client == client_id and member_id not in removed:
                    with suppress(kafka.UnknownMemberIdError):  # it has left meanwhile
                        await self._client.remove(group, member_id)
                        removed.add(member_id)

        await self._ask(f"removing a member of group {group}", attempt)
        return len(removed)

    async def partitions_of(self, topic: str) -> int:
        """Return the number of partitions of a topic, or raise UnknownTopic."""

        async def attempt() -> int:
            code, leaders = (await self._client.metadata([topic]))[topic]
            _raise_for(0 if leaders else code)
            return len(leaders)

        return await self._ask(f"looking for topic {topic}", attempt)

    async def settings_of(self, topics: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the settings that matter here, per topic that exists."""
        resources = [
            ConfigResource(ConfigResourceType.TOPIC, topic, configs=dict.fromkeys(SETTINGS, ""))
            for topic in topics
        ]

        async def attempt() -> dict[str, dict[str, str]]:
            settings = {}
            responses: list[Any] = await self._client.describe_configs(resources)
            for response in responses:
                for code, _, _, topic, entries in response.resources:
                    if code == kafka.UnknownTopicOrPartitionError.errno:
                        continue
                    _raise_for(code)
                    settings[topic] = {entry[0]: entry[1] for entry in entries}
            return settings

        return await self._ask("reading topic settings", attempt) if topics else {}

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create what is missing and wait until it can be used; returns the names created."""
        replicas = self._params.replication_factor or min(
            3, await self._ask("counting brokers", self._client.broker_count)
        )
        known = await self._ask("listing topics", lambda: self._client.metadata(None))
        missing = [spec for spec in specs if spec.name not in known]
        if not missing:
            return []
        new = [_new_topic(spec, replicas) for spec in missing]

        async def attempt() -> list[str]:
            response: Any = await self._client.create_topics(new)
            return _created(response.topic_errors)

        created = await self._ask("creating topics", attempt)
        await self._until_visible([spec.name for spec in missing])
        return [spec.name for spec in missing if spec.name in created]

    async def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics and wait until they are gone; missing ones are ignored."""

        async def attempt() -> None:
            response: Any = await self._client.delete_topics(list(names))
            for _, code in response.topic_error_codes:
                if code != kafka.UnknownTopicOrPartitionError.errno:
                    _raise_for(code)
            if set(names) & set(await self._client.metadata(None)):
                raise kafka.StaleMetadata

        if names:
            await self._ask("deleting topics", attempt)

    async def describe_topics(self) -> dict[str, TopicSpec]:
        """Return every topic that is not Kafka's own; whether it holds text is not known."""
        known = await self._ask("listing topics", lambda: self._client.metadata(None))
        settings = await self.settings_of(known)
        return {
            name: _spec(name, len(leaders), settings[name])
            for name, (_, leaders) in known.items()
            if name in settings
        }

    async def committed(
        self, group: str, tps: Sequence[TopicPartition]
    ) -> dict[TopicPartition, Committed]:
        """Return a group's committed positions; partitions without one are left out."""
        if not tps:
            return {}
        return await self._ask(
            f"reading positions of group {group}", lambda: self._client.positions(group, tps)
        )

    async def _connection_error(self) -> Exception | None:
        """Connect once more by hand to learn the reason, which aiokafka only logs."""
        arguments = self._params.connection()
        servers = arguments.pop("bootstrap_servers")
        del arguments["metadata_max_age_ms"]
        for host, port, _ in collect_hosts(servers):
            try:
                connection = await create_conn(host, port, **arguments)
            except (OSError, kafka.KafkaError) as exc:
                return exc
            connection.close()
        return None

    async def _until_visible(self, names: Sequence[str]) -> None:
        async def attempt() -> None:
            known = await self._client.metadata(None)
            if any(min(known.get(name, (0, [-1]))[1], default=-1) < 0 for name in names):
                raise kafka.LeaderNotAvailableError

        await self._ask("waiting for new topics", attempt)

    async def _ask(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run one request until it passes, fails for good, or time is up."""
        address = self._params.bootstrap_servers
        last: Exception | None = None
        try:
            async with asyncio.timeout(self._params.request_timeout_s):
                while True:
                    try:
                        return await attempt()
                    except kafka.KafkaError as exc:
                        if isinstance(exc, kafka.UnknownTopicOrPartitionError):
                            raise UnknownTopic(
                                f"{what} at {address}: it does not exist; hexflow topics creates "
                                "the mesh's own"
                            ) from exc
                        if not exc.retriable:
                            raise translate(exc, what, address) from exc
                        last = exc
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as exc:
            raise BrokerUnavailable(
                f"{what}: no answer from the Kafka broker at {address}; check that it runs"
            ) from (last or exc)


def _created(topic_errors: Sequence[Sequence[Any]]) -> list[str]:
    """Return which topics were created; those that existed are no error."""
    created = []
    for topic, code, *message in topic_errors:
        error = kafka.for_code(code)
        if error is kafka.NoError:
            created.append(topic)
        elif error is not kafka.TopicAlreadyExistsError:
            raise error(f"topic {topic}: {message[0] if message else ''}")
    return created


def _new_topic(spec: TopicSpec, replicas: int) -> NewTopic:
    settings = {
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(spec.max_message_bytes),
    }
    if spec.compacted:
        settings |= COMPACTED_SETTINGS
    else:
        settings["cleanup.policy"] = "delete"
        settings["retention.ms"] = str(spec.retention_s * 1000)
    if replicas >= 3:
        settings["min.insync.replicas"] = "2"
    return NewTopic(spec.name, spec.partitions, replicas, topic_configs=settings)


def _spec(name: str, partitions: int, settings: dict[str, str]) -> TopicSpec:
    retention_ms = int(settings["retention.ms"])
    return TopicSpec(
        name=name,
        partitions=partitions,
        compacted="compact" in settings["cleanup.policy"],
        retention_s=retention_ms // 1000 if retention_ms >= 0 else FOREVER_S,
        max_message_bytes=int(settings["max.message.bytes"]),
    )
