"""The in-process broker's bound: what is dropped, who waits, and why nobody waits for ever."""

import asyncio
from collections.abc import Collection

import pytest

from shared.adapters.clock import ManualClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.topics import TopicSpec
from shared.errors import BrokerUnavailable, UnknownTopic
from shared.ports import Committed, TopicPartition
from tests.support.broker import numbers, publish_all, take, tps

LIMIT = 2_000
BOUND = 10_000
FULL = 9
TP = TopicPartition("t", 0)


def value(index: int) -> bytes:
    """Return about a kilobyte that reads as a number."""
    return str(index).encode().zfill(1_000)


async def small_broker(
    clock: ManualClock, *, publish_timeout_s: float = 30.0, partitions: int = 1
) -> MemoryBroker:
    """Return a broker whose topic `t` holds nine records of a kilobyte per partition."""
    broker = MemoryBroker(
        clock,
        max_topic_bytes=BOUND * partitions,
        publish_timeout_s=publish_timeout_s,
        reader_patience_s=0.02,
    )
    await broker.create_topics(
        [TopicSpec(name="t", partitions=partitions, max_message_bytes=LIMIT, retention_s=600)]
    )
    return broker


async def fill(broker: MemoryBroker, count: int, first: int = 0) -> None:
    """Publish kilobytes."""
    for index in range(first, first + count):
        await broker.publish("t", value(index), partition=0)


async def test_publish_waits_for_a_group_that_lags() -> None:
    """In a full partition a publish waits until the group commits, and loses nothing."""
    broker = await small_broker(ManualClock())
    async with broker.group_consumer(["t"], "g") as member:
        await fill(broker, FULL)
        waiting = [asyncio.ensure_future(broker.publish("t", value(FULL + i))) for i in range(3)]
        found = await take(member, FULL)
        assert await asyncio.wait(waiting, timeout=0.05) == (set(), set(waiting))
        await member.commit({TP: Committed(offset=5)})
        acks = await asyncio.gather(*waiting)
        assert [ack.offset for ack in acks] == [FULL, FULL + 1, FULL + 2]
        found += await take(member, 3)
    assert numbers(found) == list(range(FULL + 3))


async def test_publish_gives_up_when_the_group_never_commits() -> None:
    """After its time-out a publish into a full partition says which one, and appends nothing."""
    broker = await small_broker(ManualClock(), publish_timeout_s=0.05)
    async with broker.group_consumer(["t"], "g") as member:
        await fill(broker, FULL)
        with pytest.raises(BrokerUnavailable, match="partition 0 of t is full"):
            await broker.publish("t", value(99))
        assert numbers(await take(member, FULL)) == list(range(FULL))
        await member.commit({TP: Committed(offset=FULL)})
        assert (await broker.publish("t", value(FULL))).offset == FULL
        assert numbers(await take(member, 1)) == [FULL]


async def test_full_partition_holds_up_no_other() -> None:
    """Only publishers of the full partition wait."""
    broker = await small_broker(ManualClock(), partitions=2)
    async with broker.group_consumer(["t"], "g") as member:
        await fill(broker, FULL)
        waiting = asyncio.ensure_future(broker.publish("t", value(0), partition=0))
        await asyncio.sleep(0)
        assert (await broker.publish("t", value(0), partition=1)).offset == 0
        assert not waiting.done()
        await member.commit({TP: Committed(offset=FULL)})
        await waiting


async def test_cancelled_publisher_leaves_its_place() -> None:
    """A waiting publisher that is cancelled appends nothing; the next one goes on."""
    broker = await small_broker(ManualClock())
    async with broker.group_consumer(["t"], "g") as member:
        await fill(broker, FULL)
        first = asyncio.ensure_future(broker.publish("t", value(100)))
        second = asyncio.ensure_future(broker.publish("t", value(FULL)))
        await asyncio.sleep(0)
        first.cancel()
        await take(member, FULL)
        await member.commit({TP: Committed(offset=FULL)})
        assert (await second).offset == FULL
        assert first.cancelled()
        assert numbers(await take(member, 1)) == [FULL]


async def test_reader_without_a_group_is_given_up() -> None:
    """A reader that does not read is waited for once; then the oldest records go."""
    broker = await small_broker(ManualClock())
    async with broker.partition_consumer(tps("t"), start="beginning") as reader:
        await fill(broker, 30)
        begin = (await reader.beginning_offsets())[TP]
        assert begin >= 30 - FULL
        assert await reader.position(TP) == begin
        assert numbers(await take(reader, 30 - begin)) == list(range(begin, 30))


async def test_reader_without_a_group_that_reads_misses_nothing() -> None:
    """A publish into a full partition waits for a reader that goes on reading."""
    broker = MemoryBroker(ManualClock(), max_topic_bytes=BOUND, reader_patience_s=30.0)
    await broker.create_topics([TopicSpec(name="t", partitions=1, max_message_bytes=LIMIT)])
    async with broker.partition_consumer(tps("t"), start="beginning") as reader:
        publishing = asyncio.ensure_future(fill(broker, 60))
        assert numbers(await take(reader, 60, max_records=2)) == list(range(60))
        await publishing


async def test_nobody_reads_and_nobody_waits() -> None:
    """A topic without readers never holds up its publishers."""
    broker = await small_broker(ManualClock())
    async with asyncio.timeout(10):
        await fill(broker, 200)


async def test_committed_records_go_before_anyone_waits() -> None:
    """What every group has committed makes room at once, however much is published."""
    broker = await small_broker(ManualClock(), publish_timeout_s=0.05)
    async with (
        broker.group_consumer(["t"], "a") as first,
        broker.group_consumer(["t"], "b") as second,
    ):
        for start in range(0, 60, 6):
            await fill(broker, 6, start)
            for member in (first, second):
                assert numbers(await take(member, 6)) == list(range(start, start + 6))
                await member.commit({TP: Committed(offset=start + 6)})


async def test_group_that_restarts_finds_its_records() -> None:
    """Within its grace a group without readers still holds its records; then it is gone."""
    clock = ManualClock()
    broker = await small_broker(clock, publish_timeout_s=0.05)
    async with broker.group_consumer(["t"], "g") as member:
        await fill(broker, FULL)
        await member.commit({TP: Committed(offset=0)})
    await clock.advance(59.0)
    with pytest.raises(BrokerUnavailable):
        await broker.publish("t", value(FULL))
    async with broker.group_consumer(["t"], "g") as member:
        assert numbers(await take(member, FULL)) == list(range(FULL))
    await clock.advance(61.0)
    assert (await broker.publish("t", value(FULL))).offset == FULL


async def test_deleting_a_full_topic_frees_its_publishers() -> None:
    """Publishers that wait for room in a topic learn that it was deleted."""
    broker = await small_broker(ManualClock())
    async with broker.group_consumer(["t"], "g"):
        await fill(broker, FULL)
        waiting = [asyncio.ensure_future(broker.publish("t", value(0))) for _ in range(2)]
        await asyncio.sleep(0)
        await broker.delete_topics(["t"])
        for publish in waiting:
            with pytest.raises(UnknownTopic):
                await publish


async def test_records_beyond_retention_go() -> None:
    """Records older than the retention are dropped when others come, whoever needs them."""
    clock = ManualClock()
    broker = await small_broker(clock)
    async with broker.group_consumer(["t"], "g") as member:
        await publish_all(broker, "t", range(3))
        await clock.advance(500.0)
        await publish_all(broker, "t", range(3, 5))
        await clock.advance(150.0)
        await publish_all(broker, "t", range(5, 6))
        assert numbers(await take(member, 3)) == [3, 4, 5]


async def test_cycle_of_calls_never_locks_up() -> None:
    """Requests, instance and results, each full over and over, pass every call round the cycle."""
    broker = MemoryBroker(ManualClock(), max_topic_bytes=BOUND, reader_patience_s=30.0)
    specs = [
        TopicSpec(name=name, partitions=1, max_message_bytes=LIMIT)
        for name in ("requests", "instance", "results")
    ]
    await broker.create_topics(specs)
    rounds, calls = 12, 20

    async def forward(source: str, target: str, group: str) -> None:
        async with broker.group_consumer([source], group) as member:
            for done in range(rounds * calls):
                (record,) = await take(member, 1, max_records=1)
                await broker.publish(target, record.value)
                await member.commit({record.tp: Committed(offset=done + 1)})

    async def produce(group: asyncio.TaskGroup) -> None:
        async def publish(record_value: bytes | None) -> None:
            await broker.publish("requests", record_value)

        for index in range(calls):
            group.create_task(publish(value(index)))
        async with broker.partition_consumer(tps("results"), start="beginning") as reader:
            for done in range(rounds * calls):
                (record,) = await take(reader, 1, max_records=1)
                if done < (rounds - 1) * calls:
                    group.create_task(publish(record.value))

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(forward("requests", "instance", "dispatchers"))
        group.create_task(forward("instance", "results", "worker"))
        group.create_task(produce(group))


async def test_busy_publisher_lets_others_run() -> None:
    """A task that publishes without pause does not keep readers from reading meanwhile."""
    broker = MemoryBroker(ManualClock())
    await broker.create_topics([TopicSpec(name="t", partitions=1)])
    read_while_publishing = 0

    async def publish() -> None:
        for _ in range(1_000):
            await broker.publish("t", b"1")

    async with broker.partition_consumer(tps("t"), start="beginning") as reader:
        publishing = asyncio.ensure_future(publish())
        while not publishing.done():
            read_while_publishing += len(await reader.fetch(timeout_s=1.0))
    assert read_while_publishing > 500


async def test_members_learn_that_a_topic_was_deleted() -> None:
    """A member loses the partitions of a deleted topic, after its hook, and keeps the others."""
    broker = MemoryBroker(ManualClock())
    await broker.create_topics(
        [TopicSpec(name="a", partitions=1), TopicSpec(name="b", partitions=2)]
    )
    revoked: list[TopicPartition] = []

    async def on_revoked(gone: Collection[TopicPartition]) -> None:
        revoked.extend(gone)

    async with broker.group_consumer(["a", "b"], "g", on_revoked=on_revoked) as member:
        await broker.delete_topics(["b"])
        assert await member.fetch(timeout_s=0.01) == []
        assert member.assignment() == {TopicPartition("a", 0)}
        assert sorted(revoked) == tps("b", 2)
        await publish_all(broker, "a", range(1))
        assert numbers(await take(member, 1)) == [0]


async def test_topic_without_partitions_is_refused() -> None:
    """A topic needs at least one partition."""
    broker = MemoryBroker(ManualClock())
    with pytest.raises(ValueError, match="partition"):
        await broker.create_topics([TopicSpec(name="t", partitions=0)])
