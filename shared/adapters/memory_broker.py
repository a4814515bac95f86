"""The embedded broker: Kafka's semantics in one process, as far as the services rely on them.

What is the same is proven by the contract suite that also runs against Apache Kafka. What differs:

- Nothing survives the process, and only this process can reach it.
- A partition of a group has one owner, the member that subscribed first; a second concurrent
  member of the group gets no partitions until the first leaves, and then takes them over inside
  its next `fetch`. Members only ever lose partitions whose topic was deleted.
- Compacted topics keep the last record of every key, in order, and are not bounded in size.

Bound. Every partition of a topic that is not compacted holds at most its share of
`max_topic_bytes`. A publish into a full partition first drops the oldest records that every group
has committed and every reader without a group has read. If that is not enough it waits:

- for a reader without a group, `reader_patience_s`. Then the reader is given up until it has caught
  up: its records are dropped and it goes on at the new beginning, as under `retention.bytes`;
- for a group, until it commits, and fails with BrokerUnavailable after `publish_timeout_s`. A group
  whose last reader left more than `group_grace_s` ago is gone and nobody waits for it.

Why that cannot deadlock the mesh: calls flow in a cycle (requests, instance, results, requests),
and a wait all around it would be a deadlock. Results are read without a group and states are
compacted, so publishing them waits for no more than the patience; workers therefore always progress
and commit, which makes room for dispatchers, which commit and make room for producers. No wait
outlasts its time-out.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog

from shared.adapters.memory_consumer import MemoryConsumer
from shared.adapters.memory_log import Partition, PartitionLog, size_bytes
from shared.adapters.partitioner import partition_for
from shared.contracts.topics import TopicSpec
from shared.errors import BrokerUnavailable, TooLarge, UnknownTopic
from shared.ports import (
    Ack,
    AssignedHook,
    Clock,
    Committed,
    Consumer,
    Record,
    RevokedHook,
    StartAt,
    TopicPartition,
)

log = structlog.get_logger(__name__)

DEFAULT_TOPIC_BYTES = 256 * 1024 * 1024
YIELD_EVERY = 64
TRIM_TO = 0.875
RETENTION_SLACK = 1.01


class MemoryBroker:
    """An in-process Broker.

    Args:
        clock: Its wall clock gives append times; its monotonic clock ages groups.
        max_topic_bytes: Most that the partitions of one topic hold together, bytes; a partition
            may always hold two records of the largest size.
        publish_timeout_s: How long a publish waits for room, wall seconds.
        reader_patience_s: How long a publish waits for readers without a group, wall seconds.
        group_grace_s: How long a group without readers still holds records back, wall seconds.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_topic_bytes: int = DEFAULT_TOPIC_BYTES,
        publish_timeout_s: float = 10.0,
        reader_patience_s: float = 1.0,
        group_grace_s: float = 60.0,
    ) -> None:
        self._clock = clock
        self._max_topic_bytes = max_topic_bytes
        self._publish_timeout_s = publish_timeout_s
        self._reader_patience_s = reader_patience_s
        self._group_grace_s = group_grace_s
        self._specs: dict[str, TopicSpec] = {}
        self._partitions: dict[str, list[Partition]] = {}
        self._committed: dict[str, dict[TopicPartition, Committed]] = defaultdict(dict)
        self._members: dict[str, list[MemoryConsumer]] = defaultdict(list)
        self._published = 0

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
        home = self._choose(topic, key, partition)
        frozen = tuple(headers)
        size = self._check_size(topic, key, value, frozen)
        async with home.lane:
            if home.bound_bytes is not None and home.log.bytes + size > home.bound_bytes:
                await self._make_room(home, home.bound_bytes - size)
            record = self._append(home, key, value, frozen)
        self._published += 1
        if self._published % YIELD_EVERY == 0:
            # A publisher that never waits for anything must not starve the readers.
            await asyncio.sleep(0)
        return Ack(tp=record.tp, offset=record.offset, append_unix_s=record.append_unix_s)

    @asynccontextmanager
    async def group_consumer(
        self,
        topics: Sequence[str],
        group: str,
        *,
        on_assigned: AssignedHook | None = None,
        on_revoked: RevokedHook | None = None,
    ) -> AsyncIterator[Consumer]:
        """Read topics as a member of a group; see the port and this module."""
        member = MemoryConsumer(
            self,
            group=group,
            wanted=[home.tp for topic in dict.fromkeys(topics) for home in self._known(topic)],
            on_assigned=on_assigned,
            on_revoked=on_revoked,
        )
        self._members[group].append(member)
        try:
            await member.rebalance()
            yield member
        finally:
            self._members[group].remove(member)
            self._leave(member)
            for other in self._members[group]:
                other.request_rebalance()

    @asynccontextmanager
    async def partition_consumer(
        self,
        partitions: Sequence[TopicPartition],
        *,
        start: StartAt,
        group: str | None = None,
    ) -> AsyncIterator[Consumer]:
        """Read fixed partitions; see the port."""
        begins = {tp: self.start_of(tp, start, group) for tp in partitions}
        reader = MemoryConsumer(self, group=group)
        for tp, offset in begins.items():
            reader.assign(tp, offset)
        try:
            yield reader
        finally:
            self._leave(reader)

    async def dismiss(self, group: str, client_id: str) -> int:  # noqa: ARG002
        """Remove nobody: members in this process do not die unnoticed."""
        return 0

    async def partitions_of(self, topic: str) -> int:
        """Return the number of partitions of a topic."""
        return len(self._known(topic))

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create what is missing; returns the names created."""
        created = []
        for spec in specs:
            if spec.partitions < 1:
                raise ValueError(f"topic {spec.name} needs at least one partition")
            if spec.name not in self._specs:
                self._create(spec)
                created.append(spec.name)
        return created

    async def describe_topics(self) -> dict[str, TopicSpec]:
        """Return every topic."""
        return dict(self._specs)

    async def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics with their records and committed positions; missing ones are ignored."""
        for name in names:
            self._specs.pop(name, None)
            for gone in self._partitions.pop(name, ()):
                gone.progress.set()
                for positions in self._committed.values():
                    positions.pop(gone.tp, None)
                for reader in gone.readers:
                    reader.wake()
        for members in self._members.values():
            for member in members:
                member.request_rebalance()

    # What its consumers use.

    def partition(self, tp: TopicPartition) -> Partition:
        """Return a partition.

        Raises:
            UnknownTopic: It does not exist.
        """
        known = self._known(tp.topic)
        if not 0 <= tp.partition < len(known):
            raise UnknownTopic(f"topic {tp.topic} has no partition {tp.partition}")
        return known[tp.partition]

    def start_of(self, tp: TopicPartition, start: StartAt, group: str | None) -> int:
        """Return the offset at which a reader begins."""
        records = self.partition(tp).log
        if start == "end":
            return records.end
        known = self.committed(group, tp) if group is not None and start == "committed" else None
        return records.begin if known is None else known.offset

    def free_of(self, group: str, wanted: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return those of some partitions that exist and that no member of a group owns."""
        owned = {tp for member in self._members[group] for tp in member.assignment()}
        return [tp for tp in wanted if tp not in owned and self._is_there(tp)]

    def committed(self, group: str, tp: TopicPartition) -> Committed | None:
        """Return a group's committed position, or None."""
        return self._committed[group].get(tp)

    def commit(self, group: str, positions: Mapping[TopicPartition, Committed]) -> None:
        """Store a group's positions and let publishers that wait for room look again."""
        homes = [self.partition(tp) for tp in positions]
        self._committed[group].update(positions)
        for home in homes:
            home.progress.set()

    # Inside.

    def _is_there(self, tp: TopicPartition) -> bool:
        return tp.partition < len(self._partitions.get(tp.topic, ()))

    def _known(self, topic: str) -> list[Partition]:
        try:
            return self._partitions[topic]
        except KeyError:
            raise UnknownTopic(
                f"topic {topic} does not exist; hexflow topics creates the mesh's own"
            ) from None

    def _create(self, spec: TopicSpec) -> None:
        bound = max(self._max_topic_bytes // spec.partitions, 2 * spec.max_message_bytes)
        self._specs[spec.name] = spec
        self._partitions[spec.name] = [
            Partition(
                TopicPartition(spec.name, index),
                PartitionLog(compacted=spec.compacted),
                None if spec.compacted else bound,
            )
            for index in range(spec.partitions)
        ]

    def _choose(self, topic: str, key: bytes | None, partition: int | None) -> Partition:
        known = self._known(topic)
        if partition is not None:
            return self.partition(TopicPartition(topic, partition))
        if key is not None:
            return known[partition_for(key, len(known))]
        return known[self._published % len(known)]

    def _check_size(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: tuple[tuple[str, bytes], ...],
    ) -> int:
        spec = self._specs[topic]
        if key is None and (value is None or spec.compacted):
            raise ValueError(f"a tombstone or a record of compacted topic {topic} needs a key")
        size = size_bytes(key, value, headers)
        if size > spec.max_message_bytes:
            raise TooLarge(f"{size} bytes; topic {topic} takes at most {spec.max_message_bytes}")
        return size

    def _append(
        self,
        home: Partition,
        key: bytes | None,
        value: bytes | None,
        headers: tuple[tuple[str, bytes], ...],
    ) -> Record:
        if self.partition(home.tp) is not home:
            raise UnknownTopic(f"topic {home.tp.topic} was deleted and created anew")
        record = Record(
            tp=home.tp,
            offset=home.log.end,
            append_unix_s=max(self._clock.wall_unix_s(), home.log.last_append_unix_s),
            key=key,
            value=value,
            headers=headers,
        )
        self._forget_old(home, record.append_unix_s)
        home.log.append(record)
        for reader in home.readers:
            reader.wake(home.tp)
        return record

    def _forget_old(self, home: Partition, now_unix_s: float) -> None:
        """Drop what is beyond retention, a hundredth of it at a time."""
        if home.bound_bytes is None:
            return
        retention_s = self._specs[home.tp.topic].retention_s
        if now_unix_s - home.log.first_append_unix_s > RETENTION_SLACK * retention_s:
            home.log.drop_older(now_unix_s - retention_s)

    async def _make_room(self, home: Partition, room_bytes: int) -> None:
        """Drop or wait until no more than `room_bytes` are left; `home.lane` is held."""
        try:
            async with asyncio.timeout(self._reader_patience_s):
                await self._drop(home, room_bytes)
        except TimeoutError:
            lagging = {reader for reader in home.readers if reader.group is None}
            if lagging - home.given_up:
                log.warning("memory_reader_given_up", topic=home.tp.topic, readers=len(lagging))
            home.given_up |= lagging
        else:
            return
        try:
            async with asyncio.timeout(self._publish_timeout_s):
                await self._drop(home, room_bytes)
        except TimeoutError as exc:
            raise BrokerUnavailable(
                f"partition {home.tp.partition} of {home.tp.topic} is full ({home.bound_bytes} "
                "bytes) and its group does not commit: slow the producers down or give the "
                "embedded broker more room"
            ) from exc

    async def _drop(self, home: Partition, room_bytes: int) -> None:
        """Drop what nobody needs, again after every progress, until there is room."""
        while True:
            home.progress.clear()
            home.log.drop_below(self._needed_from(home), bytes_at_most=int(room_bytes * TRIM_TO))
            if home.log.bytes <= room_bytes:
                return
            await home.progress.wait()

    def _needed_from(self, home: Partition) -> int:
        """Return the first offset that somebody worth waiting for still needs, or the end."""
        left_after_s = self._clock.monotonic_s() - self._group_grace_s
        groups = {reader.group for reader in home.readers if reader.group is not None}
        groups |= {group for group, left_s in home.left.items() if left_s > left_after_s}
        needed = [self.start_of(home.tp, "committed", group) for group in groups]
        needed += [
            reader.position_in(home)
            for reader in home.readers
            if reader.group is None and reader not in home.given_up
        ]
        return min(needed, default=home.log.end)

    def _leave(self, reader: MemoryConsumer) -> None:
        for tp in reader.close():
            if self._is_there(tp):
                home = self.partition(tp)
                if reader.group is not None:
                    home.left[reader.group] = self._clock.monotonic_s()
                home.progress.set()
