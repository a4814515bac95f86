"""What every Consumer does: fetching, positions, commits. Subclasses bind the fixture `broker`."""

import asyncio
import contextlib
from collections import Counter

import pytest

from shared.errors import StaleAssignment, UnknownTopic
from shared.ports import Broker, Committed, Record, TopicPartition
from tests.support.broker import (
    LONG_S,
    PATIENCE_S,
    make_topic,
    numbers,
    publish_all,
    take,
    tps,
)


class FetchContract:
    """Fetching from fixed partitions."""

    async def test_fetch_returns_at_most_what_was_asked_for(
        self, broker: Broker, prefix: str
    ) -> None:
        """Each fetch returns at most `max_records`, and together they return every record once."""
        topic = await make_topic(broker, prefix + "pages", 2)
        await publish_all(broker, topic, range(5), partition=0)
        await publish_all(broker, topic, range(10, 15), partition=1)
        found: list[Record] = []
        async with broker.partition_consumer(tps(topic, 2), start="beginning") as consumer:
            while len(found) < 10:
                page = await consumer.fetch(max_records=3, timeout_s=5.0)
                assert len(page) <= 3
                found += page
        for partition, first in ((0, 0), (1, 10)):
            mine = [record for record in found if record.tp.partition == partition]
            assert numbers(mine) == list(range(first, first + 5))

    async def test_fetch_that_finds_nothing_returns_nothing(
        self, broker: Broker, prefix: str
    ) -> None:
        """When no record comes in time the list is empty, and the next fetch works."""
        topic = await make_topic(broker, prefix + "empty")
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            assert await consumer.fetch(timeout_s=0.05) == []
            assert await consumer.fetch(timeout_s=0.0) == []
            await publish_all(broker, topic, range(1))
            assert numbers(await take(consumer, 1)) == [0]

    async def test_waiting_fetch_ends_when_a_record_comes(
        self, broker: Broker, prefix: str
    ) -> None:
        """A fetch that waits returns when a record is published, long before its time-out."""
        topic = await make_topic(broker, prefix + "poll", 2)
        async with broker.partition_consumer(tps(topic, 2), start="beginning") as consumer:
            for partition in (0, 1, 0):
                waiting = asyncio.ensure_future(consumer.fetch(timeout_s=LONG_S))
                assert await asyncio.wait({waiting}, timeout=0.3) == (set(), {waiting})
                await publish_all(broker, topic, range(1), partition)
                async with asyncio.timeout(PATIENCE_S):
                    (record,) = await waiting
                assert record.tp.partition == partition

    async def test_cancelled_fetch_loses_nothing(self, broker: Broker, prefix: str) -> None:
        """However often fetches are cancelled, every record is returned exactly once, in order."""
        topic = await make_topic(broker, prefix + "cancelled")
        found: list[Record] = []
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            for index in range(30):
                fetching = asyncio.ensure_future(consumer.fetch(max_records=2, timeout_s=LONG_S))
                await asyncio.sleep(0)
                await publish_all(broker, topic, range(index, index + 1))
                for _ in range(index % 6):
                    await asyncio.sleep(0)
                fetching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    found += await fetching
            found += await take(consumer, 30 - len(found))
        assert numbers(found) == list(range(30))

    async def test_busy_partition_does_not_starve_another(
        self, broker: Broker, prefix: str
    ) -> None:
        """With more to read than one fetch returns, every partition gets its turn."""
        topic = await make_topic(broker, prefix + "fair", 2)
        await publish_all(broker, topic, range(200), partition=0)
        await publish_all(broker, topic, range(1), partition=1)
        seen: Counter[int] = Counter()
        async with broker.partition_consumer(tps(topic, 2), start="beginning") as consumer:
            while not seen[1] and seen[0] < 200:
                records = await take(consumer, 1, max_records=5)
                seen.update(record.tp.partition for record in records)
        assert seen[1] == 1

    async def test_unknown_partition_cannot_be_read(self, broker: Broker, prefix: str) -> None:
        """Opening a reader of a topic or partition that does not exist raises UnknownTopic."""
        topic = await make_topic(broker, prefix + "known")
        for tp in (TopicPartition(prefix + "nowhere", 0), TopicPartition(topic, 1)):
            with pytest.raises(UnknownTopic):
                async with broker.partition_consumer([tp], start="beginning"):
                    pass

    async def test_reader_of_a_deleted_topic_is_told(self, broker: Broker, prefix: str) -> None:
        """When the topic of a fixed partition is deleted, fetching raises UnknownTopic."""
        topic = await make_topic(broker, prefix + "doomed")
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            assert await consumer.fetch(timeout_s=0.05) == []
            await broker.delete_topics([topic])
            with pytest.raises(UnknownTopic):
                await take(consumer, 1)


class PositionsContract:
    """Where reading begins, is, and goes on."""

    async def test_start_at_the_beginning(self, broker: Broker, prefix: str) -> None:
        """`beginning` reads from the first record, whatever is committed."""
        topic = await make_topic(broker, prefix + "begin")
        await publish_all(broker, topic, range(3))
        group = prefix + "g"
        async with broker.partition_consumer(tps(topic), start="beginning", group=group) as one:
            await one.commit({TopicPartition(topic, 0): Committed(offset=2)})
        async with broker.partition_consumer(tps(topic), start="beginning", group=group) as two:
            assert numbers(await take(two, 3)) == [0, 1, 2]

    async def test_start_at_the_end(self, broker: Broker, prefix: str) -> None:
        """`end` reads what is published after opening, even before the first fetch."""
        topic = await make_topic(broker, prefix + "end")
        await publish_all(broker, topic, range(3))
        async with broker.partition_consumer(tps(topic), start="end") as consumer:
            await publish_all(broker, topic, range(3, 5))
            assert numbers(await take(consumer, 2)) == [3, 4]

    async def test_start_at_the_committed_position(self, broker: Broker, prefix: str) -> None:
        """`committed` goes on where the group was, and begins at the beginning where it was not."""
        topic = await make_topic(broker, prefix + "resume", 2)
        first, second = tps(topic, 2)
        await publish_all(broker, topic, range(4), partition=0)
        await publish_all(broker, topic, range(10, 12), partition=1)
        group = prefix + "g"
        async with broker.partition_consumer(
            [first, second], start="committed", group=group
        ) as one:
            assert len(await take(one, 6)) == 6
            await one.commit({first: Committed(offset=3)})
        async with broker.partition_consumer(
            [first, second], start="committed", group=group
        ) as two:
            found = await take(two, 3)
            assert await two.fetch(timeout_s=0.3) == []
        assert sorted(numbers(found)) == [3, 10, 11]

    async def test_group_consumer_goes_on_where_it_committed(
        self, broker: Broker, prefix: str
    ) -> None:
        """A member begins at the group's position, which fixed readers of the group share."""
        topic = await make_topic(broker, prefix + "shared")
        await publish_all(broker, topic, range(4))
        group = prefix + "g"
        async with broker.partition_consumer(tps(topic), start="committed", group=group) as one:
            await one.commit({TopicPartition(topic, 0): Committed(offset=1, metadata="m")})
        async with broker.group_consumer([topic], group) as two:
            assert numbers(await take(two, 3)) == [1, 2, 3]
            assert await two.committed(TopicPartition(topic, 0)) == Committed(
                offset=1, metadata="m"
            )

    async def test_seek_back_and_forward(self, broker: Broker, prefix: str) -> None:
        """After `seek` the next record is the one sought; buffered ones are dropped."""
        topic = await make_topic(broker, prefix + "seek")
        (tp,) = tps(topic)
        await publish_all(broker, topic, range(10))
        async with broker.partition_consumer([tp], start="beginning") as consumer:
            assert numbers(await take(consumer, 2, max_records=2)) == [0, 1]
            consumer.seek(tp, 7)
            assert numbers(await take(consumer, 3)) == [7, 8, 9]
            consumer.seek(tp, 1)
            assert await consumer.position(tp) == 1
            assert numbers(await take(consumer, 9)) == list(range(1, 10))
            with pytest.raises(ValueError, match="negative"):
                consumer.seek(tp, -1)

    async def test_position_is_the_next_offset(self, broker: Broker, prefix: str) -> None:
        """The position is the offset after the last record returned."""
        topic = await make_topic(broker, prefix + "position")
        (tp,) = tps(topic)
        await publish_all(broker, topic, range(5))
        async with broker.partition_consumer([tp], start="beginning") as consumer:
            assert await consumer.position(tp) == 0
            await take(consumer, 2, max_records=2)
            assert await consumer.position(tp) == 2
            await take(consumer, 3)
            assert await consumer.position(tp) == 5

    async def test_first_and_last_offsets(self, broker: Broker, prefix: str) -> None:
        """Beginning and end offsets cover every assigned partition, and move as records come."""
        topic = await make_topic(broker, prefix + "ends", 2)
        first, second = tps(topic, 2)
        await publish_all(broker, topic, range(3), partition=0)
        async with broker.partition_consumer([first, second], start="end") as consumer:
            assert await consumer.end_offsets() == {first: 3, second: 0}
            await publish_all(broker, topic, range(1), partition=1)
            assert await consumer.end_offsets() == {first: 3, second: 1}
            assert await consumer.beginning_offsets() == {first: 0, second: 0}
            assert consumer.assignment() == {first, second}

    async def test_paused_partition_waits(self, broker: Broker, prefix: str) -> None:
        """A paused partition returns nothing until it is resumed, then everything."""
        topic = await make_topic(broker, prefix + "pause", 2)
        first, second = tps(topic, 2)
        async with broker.partition_consumer([first, second], start="beginning") as consumer:
            consumer.pause(first)
            await publish_all(broker, topic, range(3), partition=0)
            await publish_all(broker, topic, range(10, 13), partition=1)
            assert numbers(await take(consumer, 3)) == [10, 11, 12]
            assert await consumer.fetch(timeout_s=0.3) == []
            consumer.resume(first)
            assert numbers(await take(consumer, 3)) == [0, 1, 2]

    async def test_pause_holds_back_what_is_buffered(self, broker: Broker, prefix: str) -> None:
        """Pausing after the first of several records holds back the rest, and loses none."""
        topic = await make_topic(broker, prefix + "buffered")
        (tp,) = tps(topic)
        await publish_all(broker, topic, range(5))
        async with broker.partition_consumer([tp], start="beginning") as consumer:
            assert numbers(await take(consumer, 1, max_records=1)) == [0]
            consumer.pause(tp)
            assert await consumer.fetch(timeout_s=0.1) == []
            consumer.resume(tp)
            assert numbers(await take(consumer, 4)) == [1, 2, 3, 4]

    async def test_resume_ends_a_waiting_fetch(self, broker: Broker, prefix: str) -> None:
        """A fetch that waits returns records of a partition that is resumed meanwhile."""
        topic = await make_topic(broker, prefix + "resumed")
        (tp,) = tps(topic)
        await publish_all(broker, topic, range(2))
        async with broker.partition_consumer([tp], start="beginning") as consumer:
            consumer.pause(tp)
            waiting = asyncio.ensure_future(consumer.fetch(timeout_s=LONG_S))
            assert await asyncio.wait({waiting}, timeout=0.3) == (set(), {waiting})
            consumer.resume(tp)
            async with asyncio.timeout(PATIENCE_S):
                assert numbers(await waiting) == [0, 1]

    async def test_position_beyond_the_end_leads_to_the_beginning(
        self, broker: Broker, prefix: str
    ) -> None:
        """An offset that the partition never had makes reading begin anew, never hang."""
        topic = await make_topic(broker, prefix + "beyond")
        (tp,) = tps(topic)
        await publish_all(broker, topic, range(3))
        async with broker.partition_consumer([tp], start="beginning") as consumer:
            consumer.seek(tp, 1_000)
            assert numbers(await take(consumer, 3)) == [0, 1, 2]


class CommitContract:
    """Committed positions."""

    async def test_metadata_survives_to_its_last_byte(self, broker: Broker, prefix: str) -> None:
        """4,096 bytes of metadata come back; one more is a ValueError and commits nothing."""
        topic = await make_topic(broker, prefix + "meta")
        (tp,) = tps(topic)
        group = prefix + "g"
        longest = Committed(offset=7, metadata="0123456789abcdef" * 256)
        async with broker.partition_consumer([tp], start="committed", group=group) as one:
            await one.commit({tp: longest})
            with pytest.raises(ValueError, match="metadata"):
                await one.commit({tp: Committed(offset=8, metadata=longest.metadata + "x")})
        async with broker.partition_consumer([tp], start="beginning", group=group) as two:
            assert await two.committed(tp) == longest

    async def test_nothing_committed(self, broker: Broker, prefix: str) -> None:
        """Without a commit, or without a group, the committed position is None."""
        topic = await make_topic(broker, prefix + "none")
        (tp,) = tps(topic)
        async with broker.partition_consumer([tp], start="committed", group=prefix + "g") as one:
            assert await one.committed(tp) is None
        async with broker.partition_consumer([tp], start="beginning") as two:
            assert await two.committed(tp) is None
            with pytest.raises(ValueError, match="group"):
                await two.commit({tp: Committed(offset=1)})

    async def test_last_commit_counts(self, broker: Broker, prefix: str) -> None:
        """A commit replaces the one before, also with a lower offset; groups are independent."""
        topic = await make_topic(broker, prefix + "last")
        (tp,) = tps(topic)
        async with broker.partition_consumer([tp], start="committed", group=prefix + "a") as one:
            await one.commit({tp: Committed(offset=5, metadata="five")})
            await one.commit({tp: Committed(offset=3)})
            assert await one.committed(tp) == Committed(offset=3)
        async with broker.partition_consumer([tp], start="committed", group=prefix + "b") as two:
            assert await two.committed(tp) is None

    async def test_foreign_partition_cannot_be_committed(self, broker: Broker, prefix: str) -> None:
        """Committing or seeking a partition that is not read is stale; pausing it does nothing."""
        topic = await make_topic(broker, prefix + "foreign", 2)
        mine, foreign = tps(topic, 2)
        async with broker.partition_consumer([mine], start="committed", group=prefix + "g") as one:
            with pytest.raises(StaleAssignment):
                await one.commit({mine: Committed(offset=1), foreign: Committed(offset=1)})
            with pytest.raises(StaleAssignment):
                one.seek(foreign, 0)
            one.pause(foreign)
            one.resume(foreign)
            with pytest.raises(StaleAssignment):
                await one.position(foreign)
            assert await one.committed(mine) is None

    async def test_closed_consumer_owns_nothing(self, broker: Broker, prefix: str) -> None:
        """After leaving its context a consumer has no partitions, fetches and commits nothing."""
        topic = await make_topic(broker, prefix + "closed")
        (tp,) = tps(topic)
        async with broker.partition_consumer([tp], start="committed", group=prefix + "g") as one:
            pass
        assert one.assignment() == frozenset()
        with pytest.raises(StaleAssignment):
            await one.fetch()
        with pytest.raises(StaleAssignment):
            await one.commit({tp: Committed(offset=1)})
