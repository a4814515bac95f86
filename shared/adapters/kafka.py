"""Broker on Apache Kafka, through aiokafka.

The parts: `kafka_params` (settings), `kafka_errors` (translation), `kafka_admin` (topics and
positions), `kafka_producer`, `kafka_consumer` and `kafka_readers`. Requirements on the cluster:
Kafka 2.1 or newer, best with `auto.create.topics.enable=false`: aiokafka's clients ask for their
topics in a way that would otherwise bring a deleted topic back.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from shared.adapters.kafka_admin import KafkaAdmin
from shared.adapters.kafka_consumer import KafkaConsumer
from shared.adapters.kafka_params import KafkaParams
from shared.adapters.kafka_producer import KafkaPublisher
from shared.adapters.kafka_readers import GroupMember, PartitionReader
from shared.contracts.topics import TopicSpec
from shared.ports import (
    Ack,
    AssignedHook,
    Clock,
    Consumer,
    RevokedHook,
    StartAt,
    TopicPartition,
)


class KafkaBroker:
    """A Broker on a Kafka cluster; use `open`.

    Args:
        params: How to reach and use the cluster.
        admin: Its administration, connected.
        publisher: Its producer.
    """

    def __init__(self, params: KafkaParams, admin: KafkaAdmin, publisher: KafkaPublisher) -> None:
        self._params = params
        self._admin = admin
        self._publisher = publisher

    @classmethod
    @asynccontextmanager
    async def open(cls, params: KafkaParams, clock: Clock | None = None) -> AsyncIterator[Self]:
        """Connect to a cluster, and settle and disconnect in the end.

        Args:
            params: How to reach and use the cluster.
            clock: Learns the broker's time from every acknowledgement, if given.

        Raises:
            BrokerUnavailable: No broker answers within `connect_timeout_s`.
            ConfigError: The broker refuses the credentials, or a certificate is unusable.
        """
        admin = KafkaAdmin(params)
        publisher = KafkaPublisher(params, admin, clock)
        try:
            await admin.start()
            yield cls(params, admin, publisher)
        finally:
            await publisher.stop()
            await admin.stop()

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Ack:
        """Append one record; see the port."""
        return await self._publisher.publish(topic, value, key, partition, headers)

    @asynccontextmanager
    async def group_consumer(
        self,
        topics: Sequence[str],
        group: str,
        *,
        on_assigned: AssignedHook | None = None,
        on_revoked: RevokedHook | None = None,
    ) -> AsyncIterator[Consumer]:
        """Read topics as a member of a group; see the port."""
        member = GroupMember(
            self._params,
            self._admin,
            group,
            topics=tuple(dict.fromkeys(topics)),
            on_assigned=on_assigned,
            on_revoked=on_revoked,
        )
        async with _opened(member):
            yield member

    @asynccontextmanager
    async def partition_consumer(
        self,
        partitions: Sequence[TopicPartition],
        *,
        start: StartAt,
        group: str | None = None,
    ) -> AsyncIterator[Consumer]:
        """Read fixed partitions; see the port."""
        reader = PartitionReader(
            self._params, self._admin, group, partitions=partitions, start=start
        )
        async with _opened(reader):
            yield reader

    async def dismiss(self, group: str, client_id: str) -> int:
        """Remove a dead member from a group; see the port."""
        return await self._admin.dismiss(group, client_id)

    async def partitions_of(self, topic: str) -> int:
        """Return the number of partitions of a topic."""
        return await self._admin.partitions_of(topic)

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create what is missing and wait until it can be used; returns the names created."""
        return await self._admin.create_topics(specs)

    async def describe_topics(self) -> dict[str, TopicSpec]:
        """Return every topic; whether it holds text is not known to Kafka."""
        return await self._admin.describe_topics()

    async def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics and wait until they are gone; missing ones are ignored."""
        self._publisher.forget(names)
        await self._admin.delete_topics(names)


@asynccontextmanager
async def _opened(consumer: KafkaConsumer) -> AsyncIterator[None]:
    try:
        await consumer.opened()
        yield
    finally:
        await consumer.close()
