"""Follow a topic as a table or a log from its beginning: states, control values, tombstones."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.errors import BrokerUnavailable
from shared.ports import Broker, Consumer, Record, StartAt, TopicPartition
from shared.runtime.metrics import Metrics

OnRecord = Callable[[Record], None]


def counting(metrics: Metrics, topic: str, on_record: OnRecord) -> OnRecord:
    """Return what counts a record before it hands it over.

    Args:
        metrics: Where.
        topic: Name without prefix.
        on_record: Takes the record.
    """

    def count(record: Record) -> None:
        metrics.messages.add(topic=topic)
        on_record(record)

    return count


class Follower:
    """Reads every partition of a topic from the beginning and keeps reading.

    `caught_up()` returns once everything that was there at the start has been handed over, so a
    service can know all states before it makes its first decision.

    Args:
        consumer: Reads the partitions.
        on_record: Called for every record in order; must not block.
        beat: Called on every turn of the loop.
    """

    def __init__(
        self, consumer: Consumer, on_record: OnRecord, beat: Callable[[], None] = lambda: None
    ) -> None:
        self._consumer = consumer
        self._on_record = on_record
        self._beat = beat
        self._caught_up = asyncio.Event()

    async def caught_up(self) -> None:
        """Return when the records present at the start have been handed over."""
        await self._caught_up.wait()

    async def follow(self, stop: asyncio.Event) -> None:
        """Read until `stop` is set."""
        targets = await self._targets()
        while not stop.is_set():
            self._beat()
            try:
                if not self._caught_up.is_set() and await self._reached(targets):
                    self._caught_up.set()
                records = await self._consumer.fetch(timeout_s=0.2)
            except BrokerUnavailable:
                await asyncio.sleep(0.2)
                continue
            for record in records:
                self._on_record(record)

    async def _targets(self) -> dict[TopicPartition, int]:
        while True:
            try:
                return await self._consumer.end_offsets()
            except BrokerUnavailable:
                await asyncio.sleep(0.2)

    async def _reached(self, targets: dict[TopicPartition, int]) -> bool:
        for tp, end in targets.items():
            if await self._consumer.position(tp) < end:
                return False
        return True


@asynccontextmanager
async def follow_topic(
    broker: Broker,
    topic: str,
    on_record: OnRecord,
    beat: Callable[[], None] = lambda: None,
    *,
    tail: int | None = None,
) -> AsyncIterator[Follower]:
    """Open a follower of all partitions of a topic.

    Args:
        broker: Where it is.
        topic: Full name.
        on_record: Called for every record in order; must not block.
        beat: Called on every turn of the loop.
        tail: Begin with so many records of each partition's past; None: with all.
    """
    count = await broker.partitions_of(topic)
    partitions = [TopicPartition(topic, index) for index in range(count)]
    start: StartAt = "beginning" if tail is None else "end"
    async with broker.partition_consumer(partitions, start=start) as consumer:
        if tail is not None:
            begins = await consumer.beginning_offsets()
            for tp, end in (await consumer.end_offsets()).items():
                consumer.seek(tp, max(begins[tp], end - tail))
        yield Follower(consumer, on_record, beat)
