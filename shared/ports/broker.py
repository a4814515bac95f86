"""Kafka, as far as the services rely on it: records, consumers, the broker."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import msgspec

from shared.contracts.topics import TopicSpec


class TopicPartition(msgspec.Struct, frozen=True, order=True):
    """One partition of a topic (full name)."""

    topic: str
    partition: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One record as read from the broker.

    Attributes:
        tp: Where it is.
        offset: Its offset.
        append_unix_s: Broker's append time, Unix seconds.
        key: Record key.
        value: Record value; None is a tombstone on compacted topics.
        headers: Record headers.
    """

    tp: TopicPartition
    offset: int
    append_unix_s: float
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """Where a published record ended up.

    Attributes:
        tp: Its partition.
        offset: Its offset.
        append_unix_s: Broker's append time, Unix seconds.
    """

    tp: TopicPartition
    offset: int
    append_unix_s: float


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A committed position: the next offset to read and up to 4,096 bytes of metadata."""

    offset: int
    metadata: str = ""


StartAt = Literal["committed", "beginning", "end"]
RevokedHook = Callable[[Collection[TopicPartition]], Awaitable[None]]
AssignedHook = Callable[[Collection[TopicPartition]], Awaitable[None]]


class Consumer(Protocol):
    """Reads records; single reader, never blocks its group while the caller works elsewhere.

    A cancelled or failed call leaves the consumer usable and loses no record. An outage of the
    broker does not end it: it goes on where it was when the broker is back. After its context is
    left it owns no partition.
    """

    async def fetch(self, *, max_records: int = 500, timeout_s: float = 0.2) -> list[Record]:
        """Return records in offset order per partition, at most `max_records`.

        Waits up to `timeout_s` wall seconds for the first; an empty list means none came. No
        partition starves another. An offset that the partition does not have (forgotten, or beyond
        the end) leads to its beginning. What a hook raised in the background is raised here.

        Raises:
            BrokerUnavailable: The broker does not answer; call again later.
            UnknownTopic: A topic was deleted; a group may lose its partitions instead.
            StaleAssignment: The consumer's context was left.
            ConfigError: The broker refuses this client.
        """
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions read at present."""
        ...

    async def position(self, tp: TopicPartition) -> int:
        """Return the offset of the next record that `fetch` will return for a partition.

        Raises:
            BrokerUnavailable: The broker does not answer.
            StaleAssignment: The partition is not read here.
        """
        ...

    async def end_offsets(self) -> dict[TopicPartition, int]:
        """Return, for every assigned partition, the offset after its last record.

        Raises:
            BrokerUnavailable: The broker does not answer.
        """
        ...

    async def beginning_offsets(self) -> dict[TopicPartition, int]:
        """Return the first available offset of every assigned partition.

        Raises:
            BrokerUnavailable: The broker does not answer.
        """
        ...

    async def committed(self, tp: TopicPartition) -> Committed | None:
        """Return the group's committed position, or None when there is none.

        Raises:
            BrokerUnavailable: The broker does not answer.
        """
        ...

    async def commit(self, positions: Mapping[TopicPartition, Committed]) -> None:
        """Commit positions for the group; each replaces the partition's former one.

        Raises:
            BrokerUnavailable: Not committed; safe to repeat.
            StaleAssignment: A partition is no longer ours; drop its work. Nothing was committed.
            ValueError: There is no group, or metadata has more than 4,096 bytes.
        """
        ...

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Make `offset` the next one read; records already buffered are dropped.

        Raises:
            StaleAssignment: The partition is not read here.
            ValueError: The offset is negative.
        """
        ...

    def pause(self, *tps: TopicPartition) -> None:
        """Stop returning records of these partitions; the group membership stays.

        Partitions that are not read here (any more) are passed over, here and in `resume`. A
        partition that moves away and comes back is not paused.
        """
        ...

    def resume(self, *tps: TopicPartition) -> None:
        """Return records of these partitions again."""
        ...


class Broker(Protocol):
    """Kafka, as far as the services rely on it."""

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Ack:
        """Append one record; returns when it is acknowledged by all in-sync replicas.

        Concurrent calls from one task order are appended in that order per partition. Without
        `partition` the key chooses it as Kafka's default partitioner does (murmur2).

        The call is bounded in time and outlasts a short outage of the broker. A record may be
        appended twice, never in part. A cancelled call may or may not have appended its record.

        Raises:
            TooLarge: Above the largest record size (of the topic, or of this client).
            UnknownTopic: The topic or partition does not exist; nothing was created.
            BrokerUnavailable: Not acknowledged in time. It may still be appended.
            ConfigError: The broker refuses this client.
            ValueError: No key, where a tombstone or a compacted topic needs one.
        """
        ...

    def group_consumer(
        self,
        topics: Sequence[str],
        group: str,
        *,
        on_assigned: AssignedHook | None = None,
        on_revoked: RevokedHook | None = None,
    ) -> AbstractAsyncContextManager[Consumer]:
        """Read topics as a member of a group; partitions move between members.

        Starts at the committed position, else at the beginning. `on_revoked` is awaited before a
        partition moves on, and may still commit it; `on_assigned` after it has arrived and before
        its first record is returned, for the first time while the context is entered. Both may run
        in another task than the reader's, must end well within the session time-out, and must not
        call `fetch`. Leaving the context calls neither.

        Raises:
            UnknownTopic: A topic does not exist.
            BrokerUnavailable: The broker does not answer.
        """
        ...

    def partition_consumer(
        self,
        partitions: Sequence[TopicPartition],
        *,
        start: StartAt,
        group: str | None = None,
    ) -> AbstractAsyncContextManager[Consumer]:
        """Read fixed partitions; with `group`, positions can be committed under that id.

        `start="committed"` begins at the group's position, else at the beginning; `start="end"` at
        the end as it is while the context is entered.

        Raises:
            UnknownTopic: A topic or partition does not exist.
            BrokerUnavailable: The broker does not answer.
        """
        ...

    async def dismiss(self, group: str, client_id: str) -> int:
        """Remove a dead member from a group, so that others get its partitions now.

        It may be there more than once: after an outage a client joins anew, and what it was before
        is known to the group until its session ends. Returns how many were removed.

        Raises:
            BrokerUnavailable: The broker does not answer.
            ConfigError: The broker refuses this client.
        """
        ...

    async def partitions_of(self, topic: str) -> int:
        """Return the number of partitions of a topic.

        Raises:
            UnknownTopic: It does not exist.
        """
        ...

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create what is missing; returns the names created. Existing topics are left alone.

        When it returns, every partition can be used.

        Raises:
            BrokerUnavailable: The broker does not answer; safe to repeat.
            ConfigError: The broker refuses this client, or a setting.
        """
        ...

    async def describe_topics(self) -> dict[str, TopicSpec]:
        """Return every topic with its real partitions, retention and size limit.

        Whether a topic holds text is not known to every broker; it may be reported as False.
        """
        ...

    async def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics; missing ones are ignored."""
        ...
