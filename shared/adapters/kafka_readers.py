"""The two kinds of Kafka consumers: of fixed partitions, and members of a group."""

import asyncio
import time
from collections.abc import Collection, Sequence

import structlog
from aiokafka import ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaTopicPartition

from shared.adapters.kafka_admin import KafkaAdmin
from shared.adapters.kafka_consumer import Client, KafkaConsumer, foreign
from shared.adapters.kafka_params import KafkaParams
from shared.errors import BrokerUnavailable, UnknownTopic
from shared.ports import AssignedHook, RevokedHook, StartAt, TopicPartition

log = structlog.get_logger(__name__)


class PartitionReader(KafkaConsumer):
    """Reads fixed partitions; it belongs to no rebalance and resumes at once.

    Args:
        params: How to reach the cluster.
        admin: Tells positions and which topics exist.
        group: Group under whose id positions are committed, or None.
        partitions: What to read.
        start: Where to begin.
    """

    def __init__(
        self,
        params: KafkaParams,
        admin: KafkaAdmin,
        group: str | None,
        *,
        partitions: Sequence[TopicPartition],
        start: StartAt,
    ) -> None:
        super().__init__(params, admin, group)
        self._owned = frozenset(partitions)
        self._start_at = start
        self._next: dict[TopicPartition, int] = {}

    async def _open(self) -> Client:
        await self._check_existence()
        client = Client(group_id=self._group, **self._params.consumer())
        tps = list(map(foreign, self._owned))
        client.assign(tps)
        await self._start(client)
        ready = False
        try:
            client.pause(*tps)
            if not self._next:
                self._next = await self._beginning(client)
            for tp, offset in self._next.items():
                client.seek(foreign(tp), offset)
            client.resume(*(foreign(tp) for tp in self._owned if tp not in self._paused))
            ready = True
        finally:
            if not ready:
                await client.discard()
        return client

    def _note(self, tp: TopicPartition, next_offset: int) -> None:
        self._next[tp] = next_offset

    async def _check_existence(self) -> None:
        for topic in {tp.topic for tp in self._owned}:
            count = await self._admin.partitions_of(topic)
            for tp in self._owned:
                if tp.topic == topic and not 0 <= tp.partition < count:
                    raise UnknownTopic(f"topic {topic} has no partition {tp.partition}")

    async def _beginning(self, client: Client) -> dict[TopicPartition, int]:
        """Return where to begin, as offsets, so that nothing appended later is skipped."""
        tps = list(map(foreign, self._owned))
        async with asyncio.timeout(self._params.request_timeout_s):
            if self._start_at == "end":
                found = await client.end_offsets(tps)
            else:
                found = await client.beginning_offsets(tps)
        begins = {TopicPartition(tp.topic, tp.partition): offset for tp, offset in found.items()}
        if self._start_at == "committed" and self._group is not None:
            committed = await self._admin.committed(self._group, list(self._owned))
            begins |= {tp: position.offset for tp, position in committed.items()}
        return begins


class GroupMember(KafkaConsumer):
    """Reads topics as a member of a group (eager rebalancing: every partition is revoked first).

    Args:
        params: How to reach the cluster.
        admin: Tells positions and which topics exist.
        group: The group.
        topics: What to read.
        on_assigned: Awaited after partitions have arrived.
        on_revoked: Awaited before partitions move on.
    """

    def __init__(
        self,
        params: KafkaParams,
        admin: KafkaAdmin,
        group: str,
        *,
        topics: Sequence[str],
        on_assigned: AssignedHook | None,
        on_revoked: RevokedHook | None,
    ) -> None:
        super().__init__(params, admin, group)
        self._member_of = group
        self._topics = topics
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked

    async def _open(self) -> Client:
        for topic in self._topics:
            await self._admin.partitions_of(topic)
        client = Client(group_id=self._group, **self._params.consumer())
        self._settled.clear()
        self._unsettled_s = time.monotonic()
        client.subscribe(topics=list(self._topics), listener=_Listener(self, client))
        await self._start(client)
        settled = False
        try:
            async with asyncio.timeout(self._params.rebalance_timeout_s):
                await self._settled.wait()
            self._raise_failure()
            settled = True
        finally:
            if not settled:
                await client.discard()
        return client

    async def _reopen(self) -> None:
        await self.revoked(self._owned)
        await super()._reopen()

    async def revoked(self, tps: Collection[TopicPartition]) -> None:
        """Let the hook know, then stop owning partitions."""
        self._settled.clear()
        self._unsettled_s = time.monotonic()
        if tps and self._on_revoked is not None:
            await self._on_revoked(tps)
        self._owned = frozenset()
        self._paused.clear()

    async def assigned(self, client: Client, tps: Collection[TopicPartition]) -> None:
        """Begin to own partitions; their records come only after the hook."""
        client.pause(*map(foreign, tps))
        self._owned = frozenset(tps)
        await self._seek_committed(client, tps)
        if tps and self._on_assigned is not None:
            await self._on_assigned(tps)
        client.resume(*(foreign(tp) for tp in tps if tp not in self._paused))
        self._settled.set()

    def fail(self, error: Exception) -> None:
        """Keep what a hook raised for the next `fetch`."""
        self._failure = error
        self._settled.set()

    async def _seek_committed(self, client: Client, tps: Collection[TopicPartition]) -> None:
        """Begin at the committed positions, which aiokafka misses while the group is loading."""
        try:
            committed = await self._admin.committed(self._member_of, list(tps))
        except BrokerUnavailable:
            log.warning("kafka_positions_unknown", group=self._group)
            return
        for tp, position in committed.items():
            client.seek(foreign(tp), position.offset)


class _Listener(ConsumerRebalanceListener):
    """Passes aiokafka's callbacks on; what a hook raises must not vanish in aiokafka's log."""

    def __init__(self, member: GroupMember, client: Client) -> None:
        self._member = member
        self._client = client

    async def on_partitions_revoked(self, revoked: Collection[KafkaTopicPartition]) -> None:
        try:
            await self._member.revoked(_own(revoked))
        except Exception as exc:  # noqa: BLE001 - raised again by the next fetch
            self._member.fail(exc)

    async def on_partitions_assigned(self, assigned: Collection[KafkaTopicPartition]) -> None:
        try:
            await self._member.assigned(self._client, _own(assigned))
        except Exception as exc:  # noqa: BLE001 - raised again by the next fetch
            self._member.fail(exc)


def _own(tps: Collection[KafkaTopicPartition]) -> list[TopicPartition]:
    return sorted(TopicPartition(tp.topic, tp.partition) for tp in tps)
