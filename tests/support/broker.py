"""Helpers of the broker's contract suite."""

import asyncio
from collections.abc import Awaitable, Callable

from shared.contracts.topics import TopicSpec
from shared.ports import Broker, Consumer, Record, TopicPartition

PATIENCE_S = 40.0
LONG_S = 60.0


async def make_topic(broker: Broker, name: str, partitions: int = 1, **settings: object) -> str:
    """Create a topic and return its name."""
    await broker.create_topics([TopicSpec(name=name, partitions=partitions, **settings)])  # type: ignore[arg-type]
    return name


async def take(consumer: Consumer, count: int, *, max_records: int = 500) -> list[Record]:
    """Fetch until `count` records have come; time-outs only bound a failing test."""
    records: list[Record] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(records) < count:
            records += await consumer.fetch(max_records=max_records, timeout_s=0.2)
    return records


async def until(holds: Callable[[], bool], step: Callable[[], Awaitable[object]]) -> None:
    """Repeat a step until something holds; time-outs only bound a failing test."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await step()


async def publish_all(broker: Broker, topic: str, values: range, partition: int = 0) -> None:
    """Publish numbers as values, one after the other."""
    for value in values:
        await broker.publish(topic, str(value).encode(), partition=partition)


def numbers(records: list[Record]) -> list[int]:
    """Return the numbers that `publish_all` published."""
    return [int(record.value or b"-1") for record in records]


def tps(topic: str, count: int = 1) -> list[TopicPartition]:
    """Return the first partitions of a topic."""
    return [TopicPartition(topic, index) for index in range(count)]
