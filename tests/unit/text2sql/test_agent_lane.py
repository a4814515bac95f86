"""What a lane takes, and what it lets be committed."""

import asyncio
from typing import Any

from services.text2sql.lane import Lane
from shared.ports import Record, TopicPartition
from shared.runtime.metrics import Metrics
from shared.runtime.offsets import OffsetTracker

TP = TopicPartition("queries", 0)


def lane(position: int) -> Lane:
    """Return a lane that does not run, so it only takes."""
    nothing: Any = None
    return Lane(
        tp=TP,
        tracker=OffsetTracker(position),
        known_end=0,
        desk=nothing,
        open_producer=nothing,
        publisher=nothing,
        dead_letters=nothing,
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
