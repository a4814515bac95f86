"""Which records of a partition are handed on, and what may therefore be committed.

Rule (ADR 0003): commit only below the lowest record not handed on. Finished records above that
position travel as ranges in the commit metadata, so a restart repeats only what was unfinished.
The metadata is at most 4,096 bytes (Kafka's default `offset.metadata.max.bytes`); a reader pauses
before it would overflow.
"""

from bisect import bisect_right

from shared.ports import Committed

MAX_METADATA_BYTES = 4_096
PAUSE_AT_BYTES = 3_500
_PREFIX = "r1:"


class OffsetTracker:
    """Tracks one partition.

    Invariant: `position` is the lowest offset that is neither finished nor known to be absent;
    `finished ranges` are disjoint, sorted, and lie above `position`.

    Args:
        position: First offset not handed on.
        ranges: Finished offsets above it as (first, last) pairs, sorted and disjoint.
    """

    def __init__(self, position: int, ranges: list[tuple[int, int]] | None = None) -> None:
        self._position = position
        self._starts: list[int] = [first for first, _ in ranges or []]
        self._ends: list[int] = [last for _, last in ranges or []]
        self._seen_end = position
        self._absorb()

    @classmethod
    def restore(cls, committed: Committed | None, beginning: int) -> "OffsetTracker":
        """Return the tracker of a partition as its last owner left it.

        Args:
            committed: The group's committed position, if any.
            beginning: First offset that still exists; a position below it is moved up.
        """
        if committed is None:
            return cls(beginning)
        ranges = [
            (first, last)
            for first, last in _decode(committed.metadata, committed.offset)
            if last >= beginning
        ]
        return cls(max(committed.offset, beginning), ranges)

    @property
    def position(self) -> int:
        """Lowest offset not handed on: the offset to commit."""
        return self._position

    @property
    def num_ranges(self) -> int:
        """How many finished ranges lie above the position."""
        return len(self._starts)

    def is_finished(self, offset: int) -> bool:
        """Return whether the record was handed on already (skip it)."""
        if offset < self._position:
            return True
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset <= self._ends[index]

    def seen(self, offset: int) -> None:
        """Note a fetched record.

        Offsets skipped since the last one do not exist (a compacted or aborted record) and count
        as finished, so that a gap never holds the position back.
        """
        if offset > self._seen_end:
            self._finish_range(self._seen_end, offset - 1)
        self._seen_end = max(self._seen_end, offset + 1)

    def finish(self, offset: int) -> None:
        """Note that a record is handed on; repeating it is harmless."""
        self._seen_end = max(self._seen_end, offset + 1)
        self._finish_range(offset, offset)

    def committable(self) -> Committed:
        """Return what to commit now."""
        return Committed(offset=self._position, metadata=self._encode())

    def should_pause(self) -> bool:
        """Return whether the reader must stop fetching until the position has moved."""
        return len(self._encode()) >= PAUSE_AT_BYTES

    def _finish_range(self, first: int, last: int) -> None:
        first = max(first, self._position)
        if last < first:
            return
        low = bisect_right(self._starts, first) - 1
        if low >= 0 and self._ends[low] >= first - 1:
            first = self._starts[low]
            last = max(last, self._ends[low])
        else:
            low += 1
        high = low
        while high < len(self._starts) and self._starts[high] <= last + 1:
            last = max(last, self._ends[high])
            high += 1
        self._starts[low:high] = [first]
        self._ends[low:high] = [last]
        self._absorb()

    def _absorb(self) -> None:
        while self._starts and self._starts[0] <= self._position:
            self._position = max(self._position, self._ends[0] + 1)
            del self._starts[0], self._ends[0]

    def _encode(self) -> str:
        if not self._starts:
            return ""
        parts: list[str] = []
        at = self._position
        for first, last in zip(self._starts, self._ends, strict=True):
            parts.append(f"{first - at:x}+{last - first:x}")
            at = last
        text = _PREFIX + ",".join(parts)
        while len(text) > MAX_METADATA_BYTES:  # only if a caller ignored should_pause: repeat work
            text = text.rpartition(",")[0]
        return text


def _decode(metadata: str, position: int) -> list[tuple[int, int]]:
    if not metadata.startswith(_PREFIX):
        return []
    ranges: list[tuple[int, int]] = []
    at = position
    for part in metadata.removeprefix(_PREFIX).split(","):
        gap, _, length = part.partition("+")
        try:
            first = at + int(gap, 16)
            last = first + int(length, 16)
        except ValueError:
            return ranges
        ranges.append((first, last))
        at = last
    return ranges
