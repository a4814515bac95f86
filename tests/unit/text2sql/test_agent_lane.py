"""What a lane takes, and what it lets be committed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.text2sql.lane import Lane
from shared.ports import Record, TopicPartition
from shared.runtime.metrics import Metrics
from shared.runtime.offsets import OffsetTracker

TP = TopicPartition("queries", 0)


class Undertaker:
    """Buries dead letters when it may."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.may_end = asyncio.Event()

    async def bury(self, record: Record, error: Exception) -> None:
        """Wait, and have buried it."""
        del record, error
        self.num_begun += 1
        await self.may_end.wait()


class Outcomes:
    """A producer that has read nothing."""

    first_offset = next_offset = 0


@asynccontextmanager
async def outcomes(_: TopicPartition) -> AsyncIterator[Any]:
    """Open a producer."""
    yield Outcomes()


def lane(position: int, dead_letters: Any = None) -> Lane:
    """Return a lane that does not run, so it only takes."""
    nothing: Any = None
    return Lane(
        tp=TP,
        tracker=OffsetTracker(position),
        known_end=0,
        desk=nothing,
        open_producer=outcomes,
        publisher=nothing,
        dead_letters=dead_letters,
        metrics=Metrics("text2sql"),
        slots=asyncio.Semaphore(1),
        tombstone=lambda _: None,
    )


def record(offset: int) -> Record:
    """Return a record of the partition."""
    return Record(tp=TP, offset=offset, append_unix_s=0.0, key=b"q", value=b"")


def test_a_record_that_is_delivered_twice_is_taken_once():
    """Else its second copy would be dropped as a duplicate, and committed while it still runs."""
    taking = lane(3)
    for offset in (3, 4, 3, 4):
        taking.put(record(offset))
    assert taking.num_open == 2
    assert taking.tracker.position == 3


def test_what_is_done_is_not_taken_again():
    """Offsets below the committed position, and those finished above it."""
    taking = lane(5)
    taking.tracker.finish(6)
    for offset in (4, 5, 6):
        taking.put(record(offset))
    assert taking.num_open == 1


async def test_what_is_being_told_when_a_lane_is_left_is_done_and_nothing_more():
    """Else the next owner would tell it once more; what has not begun is left to that one."""
    undertaker = Undertaker()
    leaving = lane(3, undertaker)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(leaving.run())
        leaving.put(record(3))  # nobody can read it
        async with asyncio.timeout(60):
            while not undertaker.num_begun:
                await asyncio.sleep(0)
            leaving.put(record(4))  # waits for the only slot
            ending = leaving.leave()
            undertaker.may_end.set()
            await asyncio.wait(ending)
        for _ in range(10):  # the slot is free now
            await asyncio.sleep(0)
        running.cancel()
    assert leaving.tracker.position == 4
    assert undertaker.num_begun == 1
