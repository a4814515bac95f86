"""Reading from Kafka: fixed partitions or a group's, through restarts of the broker.

Invariants:

- Records are returned once per position; a cancelled `fetch` loses none, since records leave
  aiokafka's buffer only in the step that returns them.
- No record of a partition is returned before its `on_assigned` hook is done, none after its
  `on_revoked` hook began. No lock is held across a fetch, so hooks cannot deadlock with it.
- A reader that finds nothing for a while asks where the partitions end. When records are there
  that it does not get, aiokafka's consumer is replaced at the same positions; when the broker does
  not answer, `fetch` says so.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaTopicPartition
from aiokafka import errors as kafka
from aiokafka.structs import ConsumerRecord

from shared.adapters.commit_metadata import check_metadata
from shared.adapters.kafka_admin import KafkaAdmin
from shared.adapters.kafka_ending import cancel_all, ends_well
from shared.adapters.kafka_errors import translate, translated
from shared.adapters.kafka_params import KafkaParams
from shared.adapters.kafka_records import readable_headers
from shared.errors import BrokerUnavailable, ConfigError, StaleAssignment
from shared.ports import Committed, Record, TopicPartition

log = structlog.get_logger(__name__)

PROBE_S = 3.0
SUSPECT_S = 1.0
CLOSE_S = 5.0
STUCK_REBALANCES = 3
COORDINATOR_TASKS = (
    "_coordination_task",
    "_heartbeat_task",
    "_commit_refresh_task",
    "_reset_committed_task",
)

ForeignRecord = ConsumerRecord[bytes, bytes]
Batches = dict[KafkaTopicPartition, list[ForeignRecord]]


def foreign(tp: TopicPartition) -> KafkaTopicPartition:
    """Return aiokafka's form of a partition."""
    return KafkaTopicPartition(tp.topic, tp.partition)


def _record(tp: TopicPartition, record: ForeignRecord) -> Record:
    return Record(
        tp=tp,
        offset=record.offset,
        append_unix_s=record.timestamp / 1000,
        key=record.key,
        value=record.value,
        headers=readable_headers(record.headers),
    )


class Client(AIOKafkaConsumer):
    """aiokafka's consumer with an end that is bounded."""

    async def discard(self) -> None:
        """Leave the group and close within `CLOSE_S`, then close whatever is left."""
        if await ends_well(self.stop(), name="kafka-consumer-stop", timeout_s=CLOSE_S):
            return
        tasks = [getattr(self._coordinator, name, None) for name in COORDINATOR_TASKS]
        tasks += [getattr(self._fetcher, "_fetch_task", None)]
        tasks += getattr(self._fetcher, "_pending_tasks", ())
        await cancel_all(tasks, timeout_s=1.0)
        await ends_well(self._client.close(), name="kafka-consumer-close", timeout_s=1.0)


class KafkaConsumer:
    """What readers of fixed partitions and members of groups have in common.

    Args:
        params: How to reach the cluster.
        admin: Tells positions and which topics exist.
        group: Group under whose id positions are committed, or None.
    """

    def __init__(self, params: KafkaParams, admin: KafkaAdmin, group: str | None) -> None:
        self._params = params
        self._admin = admin
        self._group = group
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._owned: frozenset[TopicPartition] = frozenset()
        self._paused: set[TopicPartition] = set()
        self._settled = asyncio.Event()
        self._settled.set()
        self._failure: Exception | None = None
        self._is_closed = False
        self._unsettled_s = 0.0
        self._look_at_s = time.monotonic() + params.stall_s
        self._suspects: dict[TopicPartition, int] = {}
        # Partitions that filled the last fetch; aiokafka alone would go on with them.
        self._crowding: set[TopicPartition] = set()

    async def fetch(self, *, max_records: int = 500, timeout_s: float = 0.2) -> list[Record]:
        """Return records in offset order per partition; see the port."""
        self._raise_failure()
        # A reader that always finds records, or never waits, must not starve the other tasks.
        await asyncio.sleep(0)
        began_s = time.monotonic()
        try:
            client = await self.opened()
            batches = await self._poll(client, max_records, timeout_s)
            if not batches:
                await self._look_after(client)
        except BrokerUnavailable:
            # The caller will call again at once; an unreachable broker must not make it spin.
            await asyncio.sleep(max(0.0, timeout_s - (time.monotonic() - began_s)))
            raise
        self._raise_failure()
        return self._taken(batches, max_records)

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions read at present."""
        return self._owned

    async def position(self, tp: TopicPartition) -> int:
        """Return the offset of the next record that `fetch` will return for a partition."""
        self._check_owned(tp)
        client = await self.opened()
        with translated(f"asking for the position in {tp.topic}", self._params.bootstrap_servers):
            async with asyncio.timeout(self._params.request_timeout_s):
                return int(await client.position(foreign(tp)))

    async def end_offsets(self) -> dict[TopicPartition, int]:
        """Return the offset after the last record of every assigned partition."""
        return await self._offsets("end_offsets")

    async def beginning_offsets(self) -> dict[TopicPartition, int]:
        """Return the first available offset of every assigned partition."""
        return await self._offsets("beginning_offsets")

    async def committed(self, tp: TopicPartition) -> Committed | None:
        """Return the group's committed position, or None when there is none."""
        if self._group is None:
            return None
        return (await self._admin.committed(self._group, [tp])).get(tp)

    async def commit(self, positions: Mapping[TopicPartition, Committed]) -> None:
        """Commit positions for the group; see the port."""
        if self._group is None:
            raise ValueError("a consumer without a group cannot commit")
        check_metadata(positions)
        self._check_owned(*positions)
        if not positions:
            return
        client = await self.opened()
        offsets = {foreign(tp): (at.offset, at.metadata) for tp, at in positions.items()}
        what = f"committing positions of group {self._group}"
        with translated(what, self._params.bootstrap_servers):
            async with asyncio.timeout(self._params.request_timeout_s):
                await client.commit(offsets)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Make `offset` the next one read."""
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        self._check_owned(tp)
        self._suspects.pop(tp, None)
        self._note(tp, offset)
        if self._client is not None:
            with translated(f"seeking in {tp.topic}", self._params.bootstrap_servers):
                self._client.seek(foreign(tp), offset)

    def pause(self, *tps: TopicPartition) -> None:
        """Stop returning records of these partitions."""
        owned = self._owned.intersection(tps)
        self._paused |= owned
        if self._client is not None:
            self._client.pause(*map(foreign, owned))

    def resume(self, *tps: TopicPartition) -> None:
        """Return records of these partitions again."""
        owned = self._owned.intersection(tps)
        self._paused -= owned
        if self._client is not None:
            self._client.resume(*map(foreign, owned))

    async def opened(self) -> Client:
        """Return aiokafka's consumer, opening one if need be."""
        if self._client is not None:
            return self._client
        async with self._opening:
            if self._is_closed:
                raise StaleAssignment("this consumer's context was left")
            if self._client is None:
                with translated("opening a consumer", self._params.bootstrap_servers):
                    self._client = await self._open()
                self._look_at_s = time.monotonic() + self._params.stall_s
            return self._client

    async def close(self) -> None:
        """Leave the group, if any, and disconnect; no hook is called."""
        client, self._client = self._client, None
        self._is_closed = True
        self._owned = frozenset()
        if client is not None:
            await client.discard()

    # What the two kinds do differently.

    async def _open(self) -> Client:
        raise NotImplementedError

    async def _reopen(self) -> None:
        """Give up aiokafka's consumer; the next `opened` makes another one."""
        client, self._client = self._client, None
        if client is not None:
            await client.discard()

    def _note(self, tp: TopicPartition, next_offset: int) -> None:
        """Remember how far a partition was read."""

    # Inside.

    async def _start(self, client: Client) -> None:
        """Start aiokafka's consumer, or leave nothing of it behind."""
        started = False
        limit_s = self._params.connect_timeout_s + self._params.rebalance_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await client.start()
            started = True
        finally:
            if not started:
                await client.discard()

    async def _poll(self, client: Client, max_records: int, timeout_s: float) -> Batches:
        """Return what came in time; a broken consumer is replaced by the next call."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
                waiting = self._owned - self._crowding if self._crowding else ()
                batches = waiting and await client.getmany(
                    *map(foreign, waiting), max_records=max_records
                )
                return batches or await client.getmany(
                    timeout_ms=int(timeout_s * 1000), max_records=max_records
                )
        except TimeoutError:
            return {}
        except kafka.KafkaError as exc:
            error = translate(exc, "fetching", self._params.bootstrap_servers)
            if isinstance(error, ConfigError):
                raise error from exc
            await self._replace(type(exc).__name__)
            return {}

    def _taken(self, batches: Batches, max_records: int) -> list[Record]:
        records: list[Record] = []
        for batch in batches.values():
            first = batch[0]
            tp = TopicPartition(first.topic, first.partition)
            records += [_record(tp, record) for record in batch]
            self._note(tp, records[-1].offset + 1)
        if records:
            self._look_at_s = time.monotonic() + self._params.stall_s
            self._suspects.clear()
        self._crowding = {r.tp for r in records} if len(records) >= max_records else set()
        return records

    async def _look_after(self, client: Client) -> None:
        """After a silence, find out whether there is nothing to read or something is wrong."""
        now_s = time.monotonic()
        if now_s < self._look_at_s or client is not self._client:
            return
        tps = [tp for tp in self._owned if tp not in self._paused]
        if not self._settled.is_set() or not tps:
            await self._blame(())
            self._look_at_s = now_s + self._params.stall_s
            stuck_s = (
                now_s - self._unsettled_s - STUCK_REBALANCES * self._params.rebalance_timeout_s
            )
            if not self._settled.is_set() and stuck_s > 0:
                await self._replace("rebalance_stuck")
            return
        try:
            lagging = await self._lagging(client, tps)
        except (TimeoutError, kafka.KafkaError):
            await self._blame(tps)
            await self._replace("no_answer")
            return
        stalled = any(self._suspects.get(tp) == at for tp, at in lagging.items())
        self._suspects = lagging
        self._look_at_s = now_s + (SUSPECT_S if lagging else self._params.stall_s)
        if stalled:
            await self._replace("stalled")

    async def _lagging(
        self, client: Client, tps: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the positions of partitions that have records still to be read."""
        async with asyncio.timeout(PROBE_S):
            ends = await client.end_offsets(list(map(foreign, tps)))
            positions = {tp: await client.position(foreign(tp)) for tp in tps}
        return {tp: at for tp, at in positions.items() if at < ends[foreign(tp)]}

    async def _blame(self, tps: Sequence[TopicPartition]) -> None:
        """Raise for what is wrong outside this consumer; return when it is the consumer itself.

        Raises:
            BrokerUnavailable: The broker does not answer anyone.
            UnknownTopic: A topic was deleted.
        """
        with translated("fetching", self._params.bootstrap_servers):
            async with asyncio.timeout(PROBE_S):
                await self._admin.ping()
                for topic in {tp.topic for tp in tps}:
                    await self._admin.partitions_of(topic)

    async def _replace(self, why: str) -> None:
        log.warning("kafka_consumer_replaced", why=why, group=self._group)
        self._suspects = {}
        await self._reopen()

    async def _offsets(self, which: str) -> dict[TopicPartition, int]:
        client = await self.opened()
        tps = [foreign(tp) for tp in self._owned]
        with translated("asking for offsets", self._params.bootstrap_servers):
            async with asyncio.timeout(self._params.request_timeout_s):
                found = await getattr(client, which)(tps)
        return {TopicPartition(tp.topic, tp.partition): offset for tp, offset in found.items()}

    def _check_owned(self, *tps: TopicPartition) -> None:
        for tp in tps:
            if tp not in self._owned:
                raise StaleAssignment(f"partition {tp.partition} of {tp.topic} is not read here")

    def _raise_failure(self) -> None:
        """Raise what a hook raised in the background."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
