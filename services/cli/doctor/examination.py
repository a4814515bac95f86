"""Looks at a mesh, twice, some seconds apart. Reads only: nothing is written or committed."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from services.cli.doctor.snapshot import (
    DeadLetterView,
    InstanceView,
    PartitionView,
    RedisView,
    Snapshot,
)
from services.cli.remote import connect
from services.cli.topics import Finding as TopicFinding
from services.cli.topics import examine as examine_topics
from shared.adapters.redis_client import RedisClient
from shared.contracts.codec import decode, decode_any
from shared.contracts.epochs import epoch_of
from shared.contracts.messages import DeadLetter, InstanceState, RecoveryProbe
from shared.contracts.topics import (
    DEAD_LETTERS,
    INSTANCE_PREFIX,
    INSTANCE_STATES,
    STAGE_REQUESTS,
    Topics,
)
from shared.errors import BrokerUnavailable, ContractError, MeshError, UnknownTopic
from shared.ports import Broker, Committed, Consumer, Record, TopicPartition
from shared.runtime.connections import redis_params
from shared.runtime.offsets import OffsetTracker
from shared.runtime.publishing import CLOCK_KEY
from shared.runtime.settings import MeshSettings

RECENT_S = 600.0
PEEK_RECORDS = 200
LIVE_S = 2.0
SCAN_KEYS = 1_000
SCANS = 50


async def examine(settings: MeshSettings, watch_s: float) -> Snapshot:
    """Return what can be seen of a mesh.

    Args:
        settings: Where it is and what it should be like.
        watch_s: Time between the two looks, wall seconds.
    """
    redis = await look_at_redis(settings)
    topics = settings.topics.topics()
    empty = Snapshot(
        address=settings.kafka.bootstrap_servers,
        prefix=topics.prefix,
        time_scale=settings.time_scale,
        watched_s=watch_s,
        redis=redis,
    )
    try:
        async with connect(settings, "hexflow-doctor") as broker:
            return await _look(broker, topics, empty)
    except MeshError as exc:
        return msgspec.structs.replace(empty, kafka_error=str(exc))


async def look_at_redis(settings: MeshSettings) -> RedisView:
    """Return what Redis says of itself; an error where it does not answer."""
    try:
        params = redis_params(settings)
        async with RedisClient.open(params) as client:
            return RedisView(
                prefix=params.prefix,
                eviction=await _redis_setting(client, "maxmemory-policy"),
                append_only=await _redis_setting(client, "appendonly"),
                has_keys=await _has_keys(client, params.prefix),
            )
    except MeshError as exc:
        return RedisView(error=str(exc))


async def _redis_setting(client: RedisClient, name: str) -> str:
    """Return a setting; empty where this user may not ask, as with most services for rent."""
    try:
        found = await client.command("CONFIG", "GET", name)
    except MeshError:
        return ""
    return found[1].decode() if isinstance(found, list) and len(found) == 2 else ""


async def _has_keys(client: RedisClient, prefix: str) -> bool:
    cursor = 0
    for _ in range(SCANS):
        cursor, keys = await client.command(
            "SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", SCAN_KEYS
        )
        if keys:
            return True
        if int(cursor) == 0:
            return False
    return True  # too many other keys to be sure


async def _look(broker: Broker, topics: Topics, empty: Snapshot) -> Snapshot:
    found = tuple(await examine_topics(broker, topics, create=False))
    seen = msgspec.structs.replace(
        empty, topics=found, other_prefixes=await _other_prefixes(broker, topics)
    )
    if any(one.state == "missing" for one in found):
        return seen
    async with asyncio.TaskGroup() as group:
        states = group.create_task(
            _look_at_states(broker, topics, empty.time_scale, empty.watched_s), name="states"
        )
        letters = group.create_task(
            _look_at_letters(broker, topics, empty.watched_s), name="dead-letters"
        )
        readers = group.create_task(
            _look_at_readers(broker, topics, found, empty.watched_s), name="readers"
        )
    book = states.result()
    return msgspec.structs.replace(
        seen,
        instances=book.views(),
        dispatcher_age_s=book.dispatcher_age_s(),
        host_clock_s=book.host_clock_s,
        partitions=tuple(readers.result()),
        dead_letters=letters.result(),
    )


async def _other_prefixes(broker: Broker, topics: Topics) -> tuple[str, ...]:
    names = await broker.describe_topics()
    prefixes = {
        name.removesuffix(STAGE_REQUESTS) for name in names if name.endswith(STAGE_REQUESTS)
    }
    return tuple(sorted(prefixes - {topics.prefix}))


def _all_partitions(topic: str, count: int) -> list[TopicPartition]:
    return [TopicPartition(topic, index) for index in range(count)]


async def _read_to_end(consumer: Consumer) -> list[Record]:
    ends = await consumer.end_offsets()
    found: list[Record] = []
    while any([await consumer.position(tp) < end for tp, end in ends.items()]):
        found += await consumer.fetch(timeout_s=1.0)
    return found


# Instances and dispatchers.


class StateBook:
    """What `instance-states` tells.

    Args:
        time_scale: Mesh seconds per wall second, by the settings.
    """

    def __init__(self, time_scale: float) -> None:
        self.host_clock_s: float | None = None
        self._scale = time_scale
        self._last: dict[str, tuple[int, InstanceState, float]] = {}
        self._first: dict[str, InstanceState] = {}
        self._phase_since_s: dict[str, float] = {}
        self._clock_s: dict[str, float] = {}
        self._probe_s: float | None = None
        self._now_s = time.time()

    def take(self, record: Record) -> None:
        """Take one record."""
        key = (record.key or b"").decode(errors="replace")
        if record.value is None:
            self._last.pop(key, None)
            return
        try:
            message = decode_any(record.value, InstanceState, RecoveryProbe)
        except ContractError:
            return
        if key.startswith(CLOCK_KEY):
            return
        if isinstance(message, RecoveryProbe):
            self._probe_s = max(self._probe_s or 0.0, record.append_unix_s)
        elif isinstance(message, InstanceState):
            self._note(record, message)

    def _note(self, record: Record, state: InstanceState) -> None:
        epoch = epoch_of(record.offset, state)
        before = self._last.get(state.instance_id)
        if before is not None and epoch < before[0]:
            return
        if before is None or before[1].phase != state.phase:
            self._phase_since_s[state.instance_id] = record.append_unix_s
        self._last[state.instance_id] = (epoch, state, record.append_unix_s)
        # A record that took long on its way makes a clock seem late, never early.
        shown_s = state.at_s / self._scale - record.append_unix_s
        before_s = self._clock_s.get(state.instance_id, shown_s)
        self._clock_s[state.instance_id] = max(before_s, shown_s)

    def take_live(self, record: Record, now_unix_s: float) -> None:
        """Take a record that has just been written: its append time tells the broker's clock."""
        self.take(record)
        skew_s = now_unix_s - record.append_unix_s
        if self.host_clock_s is None or skew_s < self.host_clock_s:
            self.host_clock_s = skew_s  # the quickest way here is the nearest to the truth

    def begin(self) -> None:
        """Fix what was known at the first look."""
        self._first = {instance_id: state for instance_id, (_, state, _) in self._last.items()}
        self._clock_s.clear()  # it is the clock of now that matters

    def end(self) -> None:
        """Fix the moment of the second look, on the broker's clock."""
        self._now_s = time.time() - (self.host_clock_s or 0.0)

    def dispatcher_age_s(self) -> float | None:
        """Return the time since a dispatcher's last probe, wall seconds."""
        return None if self._probe_s is None else self._now_s - self._probe_s

    def views(self) -> dict[str, InstanceView]:
        """Return what every instance says of itself."""
        return {
            instance_id: InstanceView(
                first=self._first.get(instance_id, state),
                last=state,
                age_s=self._now_s - at_s,
                phase_age_s=self._now_s - self._phase_since_s[instance_id],
                clock_s=self._clock_s.get(instance_id, state.at_s / self._scale - at_s),
            )
            for instance_id, (_, state, at_s) in self._last.items()
        }


async def _look_at_states(
    broker: Broker, topics: Topics, time_scale: float, watch_s: float
) -> StateBook:
    name, book = topics.name(INSTANCE_STATES), StateBook(time_scale)
    partitions = _all_partitions(name, await broker.partitions_of(name))
    async with broker.partition_consumer(partitions, start="beginning") as consumer:
        for record in await _read_to_end(consumer):
            book.take(record)
        book.begin()
        until_s = time.monotonic() + watch_s
        while time.monotonic() < until_s:
            for record in await consumer.fetch(timeout_s=0.2):
                book.take_live(record, time.time())
    book.end()
    return book


# Dead letters.


async def _look_at_letters(broker: Broker, topics: Topics, watch_s: float) -> DeadLetterView:
    name = topics.name(DEAD_LETTERS)
    partitions = _all_partitions(name, await broker.partitions_of(name))
    async with broker.partition_consumer(partitions, start="end") as consumer:
        first = await consumer.end_offsets()
        for tp, begin in (await consumer.beginning_offsets()).items():
            consumer.seek(tp, max(begin, first[tp] - PEEK_RECORDS))
        await asyncio.sleep(watch_s)
        last = await consumer.end_offsets()
        now_s = time.time()
        recent = [r for r in await _read_to_end(consumer) if now_s - r.append_unix_s < RECENT_S]
    return DeadLetterView(
        first_end=sum(first.values()),
        last_end=sum(last.values()),
        recent=len(recent),
        last=_letter(recent[-1]) if recent else None,
    )


def _letter(record: Record) -> DeadLetter | None:
    try:
        return decode(record.value or b"", DeadLetter)
    except ContractError:
        return None


# Readers.


async def _look_at_readers(
    broker: Broker, topics: Topics, found: Sequence[TopicFinding], watch_s: float
) -> list[PartitionView]:
    wanted = [("", topics.name(STAGE_REQUESTS), topics.group("dispatcher"))]
    prefix = topics.name(INSTANCE_PREFIX)
    for one in found:
        if one.name.startswith(prefix):
            instance_id = one.name.removeprefix(prefix)
            group = topics.worker_group(instance_id)
            wanted.append((instance_id, one.name, group))
    async with asyncio.TaskGroup() as tasks:
        looks = [
            tasks.create_task(_look_at_reader(broker, *each, watch_s), name=f"reader-{each[1]}")
            for each in wanted
        ]
    return [view for look in looks for view in look.result()]


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    committed: Committed | None
    end: int
    lag: int
    oldest: int | None
    num_forgotten: int


async def _look_at_reader(
    broker: Broker, instance_id: str, topic: str, group: str, watch_s: float
) -> list[PartitionView]:
    try:
        partitions = _all_partitions(topic, await broker.partitions_of(topic))
    except UnknownTopic:
        return []
    # Assigned by hand and never committing: the group's members notice nothing.
    async with broker.partition_consumer(partitions, start="end", group=group) as consumer:
        first = await _places(consumer, partitions)
        await asyncio.sleep(watch_s)
        last = await _places(consumer, partitions)
        return [
            PartitionView(
                service=f"the worker of {instance_id}" if instance_id else "the dispatchers",
                instance_id=instance_id,
                first_end=first[tp].end,
                topic=topic,
                partition=tp.partition,
                first_lag=first[tp].lag,
                last_lag=last[tp].lag,
                moved=first[tp].committed != last[tp].committed,
                num_forgotten=last[tp].num_forgotten,
                oldest_s=await _age_s(consumer, tp, last[tp].oldest),
            )
            for tp in partitions
        ]


async def _places(
    consumer: Consumer, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, _Place]:
    begins, ends = await consumer.beginning_offsets(), await consumer.end_offsets()
    return {tp: _place(await consumer.committed(tp), begins[tp], ends[tp]) for tp in partitions}


def _place(committed: Committed | None, begin: int, end: int) -> _Place:
    """Return how much is unfinished: finished records above the position do not count."""
    tracker = OffsetTracker.restore(committed, begin)
    open_offsets = [n for n in range(tracker.position, end) if not tracker.is_finished(n)]
    forgotten = OffsetTracker.restore(committed, committed.offset if committed else begin)
    lost = [n for n in range(forgotten.position, min(begin, end)) if not forgotten.is_finished(n)]
    return _Place(
        committed=committed,
        end=end,
        lag=len(open_offsets),
        oldest=open_offsets[0] if open_offsets else None,
        num_forgotten=len(lost) if committed else 0,
    )


async def _age_s(consumer: Consumer, tp: TopicPartition, offset: int | None) -> float:
    """Return the age of a record, wall seconds; 0 where there is none to read."""
    if offset is None:
        return 0.0
    consumer.seek(tp, offset)
    until_s = time.monotonic() + LIVE_S
    while time.monotonic() < until_s:
        try:
            records = await consumer.fetch(max_records=PEEK_RECORDS, timeout_s=0.2)
        except BrokerUnavailable:
            break
        for record in records:
            if record.tp == tp and record.offset >= offset:
                return time.time() - record.append_unix_s
    return 0.0
