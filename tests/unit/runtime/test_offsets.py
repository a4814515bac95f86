"""Offset tracking: what may be committed, and what a restart repeats."""

from hypothesis import given
from hypothesis import strategies as st

from shared.ports import Committed
from shared.runtime.offsets import MAX_METADATA_BYTES, OffsetTracker


def test_position_stays_below_the_lowest_unfinished_record():
    """Later finished records never carry the position past an unfinished one."""
    tracker = OffsetTracker(10)
    for offset in range(10, 15):
        tracker.seen(offset)
    for offset in (11, 12, 14):
        tracker.finish(offset)
    assert tracker.position == 10
    tracker.finish(10)
    assert tracker.position == 13
    assert tracker.committable() == Committed(offset=13, metadata="r1:1+0")


def test_a_restart_skips_exactly_what_was_finished():
    """Finished ranges above the position survive in the commit metadata."""
    tracker = OffsetTracker(0)
    for offset in (1, 2, 3, 7, 9, 10):
        tracker.finish(offset)
    again = OffsetTracker.restore(tracker.committable(), beginning=0)
    assert [o for o in range(12) if again.is_finished(o)] == [1, 2, 3, 7, 9, 10]


def test_offsets_that_do_not_exist_never_hold_the_position_back():
    """A gap between fetched records counts as finished."""
    tracker = OffsetTracker(5)
    tracker.seen(8)
    assert tracker.position == 8
    tracker.finish(8)
    tracker.seen(20)
    assert tracker.position == 20


def test_a_position_below_the_beginning_moves_up():
    """Records that retention has deleted are not waited for."""
    tracker = OffsetTracker.restore(Committed(offset=3, metadata="r1:2+5"), beginning=8)
    assert tracker.position == 11


def test_without_a_commit_reading_starts_at_the_beginning():
    """No committed position means everything is still to be handed on."""
    assert OffsetTracker.restore(None, beginning=4).position == 4


def test_foreign_or_broken_metadata_only_repeats_work():
    """Metadata this release cannot read is treated as no finished ranges."""
    for metadata in ("", "other", "r1:zz+1", "r1:1+", "r1:,,"):
        assert OffsetTracker.restore(Committed(offset=3, metadata=metadata), 0).position == 3


def test_a_reader_is_told_to_pause_before_the_metadata_overflows():
    """5,000 alternating finished records behind one unfinished one: pause, never overflow."""
    tracker = OffsetTracker(0)
    paused_at = None
    for offset in range(1, 10_000, 2):
        tracker.finish(offset)
        if paused_at is None and tracker.should_pause():
            paused_at = offset
    assert paused_at is not None
    assert len(tracker.committable().metadata) <= MAX_METADATA_BYTES
    tracker.finish(0)
    for offset in range(2, 10_000, 2):
        tracker.finish(offset)
    assert not tracker.should_pause()
    assert tracker.position == 10_000


def test_five_thousand_finished_calls_behind_one_retry_fit_in_the_metadata():
    """A run of finished records is one range, however long."""
    tracker = OffsetTracker(0)
    for offset in range(1, 5_001):
        tracker.finish(offset)
    assert not tracker.should_pause()
    again = OffsetTracker.restore(tracker.committable(), 0)
    assert again.position == 0
    assert all(again.is_finished(offset) for offset in range(1, 5_001))


@given(st.lists(st.integers(0, 60), max_size=80), st.integers(0, 5))
def test_tracker_agrees_with_a_set(finished: list[int], start: int):
    """For any order of finishing, position and ranges equal those of a plain set."""
    tracker = OffsetTracker(start)
    for offset in range(start, 61):
        tracker.seen(offset)
    done: set[int] = set()
    for offset in finished:
        tracker.finish(offset)
        done.add(offset)
        lowest = next(o for o in range(start, 100) if o not in done)
        assert tracker.position == lowest
        again = OffsetTracker.restore(tracker.committable(), 0)
        for probe in range(start, 62):
            assert again.is_finished(probe) == tracker.is_finished(probe) == (probe in done)
