"""What every Broker does when records are published and topics administered.

Subclasses bind an adapter by the fixture `broker`.
"""

import asyncio
import contextlib

import pytest

from shared.contracts.topics import TopicSpec
from shared.errors import TooLarge, UnknownTopic
from shared.ports import Broker, TopicPartition
from tests.support.broker import make_topic, numbers, publish_all, take, tps

# Partition of seven, by Kafka's own DefaultPartitioner.
PARTITION_OF_KEY = {
    b"": 2,
    b"a": 5,
    b"foobar": 0,
    b"a-little-bit-long-string": 1,
    b"query-0": 0,
    b"query-1": 3,
    b"query-2": 3,
    b"query-3": 4,
    "anfrage-ü".encode(): 0,
    bytes(range(256)): 3,
}


class PublishContract:
    """Publishing."""

    async def test_acknowledgement_says_where_the_record_is(
        self, broker: Broker, prefix: str
    ) -> None:
        """An acknowledgement names the partition, offset and append time that a reader sees."""
        topic = await make_topic(broker, prefix + "acks", 2)
        acks = [await broker.publish(topic, b"v", partition=1) for _ in range(3)]
        async with broker.partition_consumer(tps(topic, 2), start="beginning") as consumer:
            records = await take(consumer, 3)
        assert [(ack.tp, ack.offset, ack.append_unix_s) for ack in acks] == [
            (record.tp, record.offset, record.append_unix_s) for record in records
        ]
        assert [ack.offset for ack in acks] == [0, 1, 2]
        assert {ack.tp for ack in acks} == {TopicPartition(topic, 1)}

    async def test_append_times_never_decrease(self, broker: Broker, prefix: str) -> None:
        """Append times within a partition never decrease."""
        topic = await make_topic(broker, prefix + "times")
        acks = await asyncio.gather(*(broker.publish(topic, b"v") for _ in range(50)))
        times = [ack.append_unix_s for ack in acks]
        assert times == sorted(times)
        assert times[0] > 1_000_000_000

    async def test_concurrent_publishes_keep_their_order(self, broker: Broker, prefix: str) -> None:
        """Concurrent publishes are appended in the order of the calls, whatever their size."""
        topic = await make_topic(broker, prefix + "order", 2)

        def value(index: int) -> bytes:
            return str(index).encode().zfill(10 if index % 3 else 4_000)

        acks = await asyncio.gather(
            *(broker.publish(topic, value(index), partition=index % 2) for index in range(400))
        )
        async with broker.partition_consumer(tps(topic, 2), start="beginning") as consumer:
            records = await take(consumer, 400)
        for partition in (0, 1):
            mine = [record for record in records if record.tp.partition == partition]
            assert numbers(mine) == list(range(partition, 400, 2))
            assert [record.offset for record in mine] == list(range(200))
            assert [ack.offset for ack in acks[partition::2]] == list(range(200))

    async def test_first_publishes_to_a_new_topic_keep_their_order(
        self, broker: Broker, prefix: str
    ) -> None:
        """Order holds from the very first record, while the topic is still being looked up."""
        topic = await make_topic(broker, prefix + "fresh")
        early = [asyncio.ensure_future(broker.publish(topic, b"%d" % i)) for i in range(20)]
        await asyncio.sleep(0)
        late = [asyncio.ensure_future(broker.publish(topic, b"%d" % i)) for i in range(20, 40)]
        acks = await asyncio.gather(*early, *late)
        assert [ack.offset for ack in acks] == list(range(40))

    @pytest.mark.parametrize("key", PARTITION_OF_KEY)
    async def test_key_chooses_the_partition_as_in_kafka(
        self, broker: Broker, prefix: str, key: bytes
    ) -> None:
        """A key goes to the partition that Kafka's default partitioner gives it."""
        topic = await make_topic(broker, prefix + "keys", 7)
        ack = await broker.publish(topic, b"v", key=key)
        assert ack.tp == TopicPartition(topic, PARTITION_OF_KEY[key])

    async def test_given_partition_wins_over_the_key(self, broker: Broker, prefix: str) -> None:
        """A partition that is given is used, whatever the key."""
        topic = await make_topic(broker, prefix + "given", 7)
        acks = [await broker.publish(topic, b"v", key=b"a", partition=p) for p in range(7)]
        assert [ack.tp.partition for ack in acks] == list(range(7))

    async def test_key_value_and_headers_arrive_as_sent(self, broker: Broker, prefix: str) -> None:
        """Key, value and headers arrive byte for byte; header order and repeats are kept."""
        topic = await make_topic(broker, prefix + "headers")
        headers = [("type", b"call"), ("x", b""), ("type", b"\x00\xff"), ("größe", b"1")]
        await broker.publish(topic, b"\x00value\xff", key=b"\x00key", headers=headers)
        await broker.publish(topic, b"")
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            first, second = await take(consumer, 2)
        assert (first.key, first.value, first.headers) == (
            b"\x00key",
            b"\x00value\xff",
            tuple(headers),
        )
        assert (second.key, second.value, second.headers) == (None, b"", ())

    async def test_tombstone_is_a_record_without_value(self, broker: Broker, prefix: str) -> None:
        """A value of None arrives as None; it needs a key."""
        topic = await make_topic(broker, prefix + "tombs", compacted=True)
        await broker.publish(topic, b"v", key=b"k")
        await broker.publish(topic, None, key=b"k")
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            records = await take(consumer, 2)
        assert [(record.key, record.value) for record in records] == [(b"k", b"v"), (b"k", None)]
        with pytest.raises(ValueError, match="key"):
            await broker.publish(topic, None)

    async def test_compacted_topics_take_only_records_with_a_key(
        self, broker: Broker, prefix: str
    ) -> None:
        """A record without key on a compacted topic is refused before it is sent."""
        topic = await make_topic(broker, prefix + "keyless", compacted=True)
        with pytest.raises(ValueError, match="key"):
            await broker.publish(topic, b"v")
        assert (await broker.publish(topic, b"v", key=b"k")).offset == 0

    async def test_too_large_a_record_is_refused_and_does_no_harm(
        self, broker: Broker, prefix: str
    ) -> None:
        """Above the topic's limit a publish raises TooLarge; later ones are taken as before."""
        topic = await make_topic(broker, prefix + "small", max_message_bytes=100_000)
        await broker.publish(topic, b"before")
        with pytest.raises(TooLarge):
            await broker.publish(topic, bytes(100_001))
        acks = [await broker.publish(topic, bytes(99_000)) for _ in range(3)]
        assert [ack.offset for ack in acks] == [1, 2, 3]

    async def test_many_records_fit_a_topic_with_a_low_limit(
        self, broker: Broker, prefix: str
    ) -> None:
        """The limit is one record's: many that fit are taken together."""
        topic = await make_topic(broker, prefix + "tiny", max_message_bytes=2_000)
        acks = await asyncio.gather(*(broker.publish(topic, bytes(1_500)) for _ in range(20)))
        assert [ack.offset for ack in acks] == list(range(20))

    async def test_largest_record_makes_the_round_trip(self, broker: Broker, prefix: str) -> None:
        """A record just below 4 MiB is carried."""
        topic = await make_topic(broker, prefix + "large")
        value = bytes(range(256)) * (16 * 1024 - 4)
        await broker.publish(topic, value)
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            (record,) = await take(consumer, 1)
        assert record.value == value

    async def test_unknown_topics_and_partitions_are_refused(
        self, broker: Broker, prefix: str
    ) -> None:
        """Publishing to what does not exist raises UnknownTopic and creates nothing."""
        with pytest.raises(UnknownTopic):
            await broker.publish(prefix + "nowhere", b"v")
        topic = await make_topic(broker, prefix + "somewhere", 2)
        with pytest.raises(UnknownTopic):
            await broker.publish(topic, b"v", partition=2)
        with pytest.raises(UnknownTopic):
            await broker.publish(topic, b"v", partition=-1)
        assert prefix + "nowhere" not in await broker.describe_topics()

    async def test_cancelled_publish_leaves_the_broker_usable(
        self, broker: Broker, prefix: str
    ) -> None:
        """Cancelled publishes append each record at most once and disturb no other."""
        topic = await make_topic(broker, prefix + "cancel")
        await broker.publish(topic, b"-1")
        tasks = [asyncio.ensure_future(broker.publish(topic, b"%d" % i)) for i in range(60)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        for task in tasks[::2]:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*tasks[1::2])
        last = await broker.publish(topic, b"60")
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            found = numbers(await take(consumer, last.offset + 1))
        assert found == sorted(set(found))
        assert set(range(1, 60, 2)) <= set(found)
        assert found[-1] == 60


class TopicsContract:
    """Administration."""

    async def test_creating_topics_is_idempotent(self, broker: Broker, prefix: str) -> None:
        """Creating returns the names it created and leaves existing topics alone."""
        first = TopicSpec(name=prefix + "one", partitions=2)
        second = TopicSpec(name=prefix + "two", partitions=1)
        assert await broker.create_topics([first]) == [first.name]
        await broker.publish(first.name, b"v", partition=1)
        changed = TopicSpec(name=first.name, partitions=5)
        assert await broker.create_topics([changed, second]) == [second.name]
        assert await broker.create_topics([first, second]) == []
        assert await broker.partitions_of(first.name) == 2
        assert (await broker.publish(first.name, b"v", partition=1)).offset == 1

    async def test_new_topic_can_be_used_at_once(self, broker: Broker, prefix: str) -> None:
        """When `create_topics` returns, every partition takes records."""
        topic = await make_topic(broker, prefix + "ready", 5)
        acks = [await broker.publish(topic, b"v", partition=p) for p in range(5)]
        assert [ack.offset for ack in acks] == [0] * 5

    async def test_described_topics_have_their_real_settings(
        self, broker: Broker, prefix: str
    ) -> None:
        """Describing shows partitions, retention, size limit and whether a topic is compacted."""
        plain = TopicSpec(
            name=prefix + "plain", partitions=3, retention_s=7_200, max_message_bytes=200_000
        )
        compacted = TopicSpec(name=prefix + "compact", partitions=1, compacted=True)
        await broker.create_topics([plain, compacted])
        found = await broker.describe_topics()
        assert found[plain.name] == plain
        assert found[compacted.name].compacted
        assert found[compacted.name].partitions == 1

    async def test_partitions_of_an_unknown_topic(self, broker: Broker, prefix: str) -> None:
        """Asking for the partitions of a topic that does not exist raises UnknownTopic."""
        with pytest.raises(UnknownTopic):
            await broker.partitions_of(prefix + "nowhere")

    async def test_deleted_topic_is_gone(self, broker: Broker, prefix: str) -> None:
        """A deleted topic takes no records; deleting it again, or one never made, is no error."""
        topic = await make_topic(broker, prefix + "doomed")
        await broker.publish(topic, b"v")
        await broker.delete_topics([topic, prefix + "never"])
        await broker.delete_topics([topic])
        assert topic not in await broker.describe_topics()
        with pytest.raises(UnknownTopic):
            await broker.publish(topic, b"v")

    async def test_recreated_topic_is_empty(self, broker: Broker, prefix: str) -> None:
        """A topic that is created again starts empty, and publishing to it works at once."""
        topic = await make_topic(broker, prefix + "again")
        await publish_all(broker, topic, range(3))
        await broker.delete_topics([topic])
        await make_topic(broker, topic)
        assert (await broker.publish(topic, b"9")).offset == 0
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            assert numbers(await take(consumer, 1)) == [9]

    async def test_compacted_topic_keeps_the_last_record_of_every_key(
        self, broker: Broker, prefix: str
    ) -> None:
        """Read from the beginning, a compacted topic ends in the last value of every key."""
        topic = await make_topic(broker, prefix + "state", compacted=True)
        for index in range(300):
            last = await broker.publish(topic, b"%d" % index, key=b"k%d" % (index % 4))
        latest: dict[bytes | None, bytes | None] = {}
        offsets: list[int] = []
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            while last.offset not in offsets:
                for record in await take(consumer, 1):
                    latest[record.key] = record.value
                    offsets.append(record.offset)
        assert latest == {b"k%d" % (index % 4): b"%d" % index for index in range(296, 300)}
        assert offsets == sorted(offsets)
