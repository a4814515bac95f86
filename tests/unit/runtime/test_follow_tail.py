"""Following a topic from its beginning, or from so many records before its end."""

import asyncio

import pytest

from shared.adapters.clock import ManualClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.topics import TopicSpec
from shared.ports import Record
from shared.runtime.tables import follow_topic

NAME = "events"


@pytest.mark.parametrize(("tail", "expected"), [(None, 20), (3, 6), (0, 0), (100, 20)])
async def test_the_tail_of_every_partition_is_read(tail: int | None, expected: int):
    """Ten records in each of two partitions: all, three of each, none; then what comes later."""
    broker = MemoryBroker(ManualClock())
    await broker.create_topics([TopicSpec(name=NAME, partitions=2)])
    for index in range(20):
        await broker.publish(NAME, b"%d" % index, partition=index % 2)
    seen: list[Record] = []
    stop = asyncio.Event()
    async with (
        follow_topic(broker, NAME, seen.append, tail=tail) as follower,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(follower.follow(stop), name="follow")
        await follower.caught_up()
        assert len(seen) == expected
        await broker.publish(NAME, b"news", partition=1)
        async with asyncio.timeout(30):
            while len(seen) == expected:
                await asyncio.sleep(0.005)
        stop.set()
    assert seen[-1].value == b"news"
