"""One partition of the in-process broker: an append-only log that can forget its past."""

import asyncio
from bisect import bisect_left
from operator import attrgetter
from typing import Protocol

from shared.ports import Record, TopicPartition

RECORD_OVERHEAD_BYTES = 96
TOMBSTONE_KEEP_S = 3_600.0
COMPACT_AT_LEAST = 64


def size_bytes(
    key: bytes | None, value: bytes | None, headers: tuple[tuple[str, bytes], ...]
) -> int:
    """Return what a record counts for, bytes."""
    total = RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    for name, content in headers:
        total += len(name) + len(content) + 2
    return total


def record_bytes(record: Record) -> int:
    """Return what a stored record counts for, bytes."""
    return size_bytes(record.key, record.value, record.headers)


class PartitionLog:
    """Records of one partition in offset order.

    Offsets never change and are never given twice. A compacted log loses records that a later one
    with the same key supersedes, so its offsets have gaps; what is kept stays in order.

    Args:
        compacted: Keep the last record per key instead of forgetting by age.

    Attributes:
        end: The offset after the last record.
        bytes: What the records held count for, bytes.
        last_append_unix_s: Append time of the last record ever added, Unix seconds.
    """

    def __init__(self, *, compacted: bool) -> None:
        self._compacted = compacted
        self._records: list[Record] = []
        self._latest: dict[bytes, int] = {}
        self._superseded = 0
        self.end = 0
        self.bytes = 0
        self.last_append_unix_s = 0.0

    @property
    def begin(self) -> int:
        """The first offset still held, or `end` when nothing is."""
        return self._records[0].offset if self._records else self.end

    @property
    def first_append_unix_s(self) -> float:
        """Append time of the first record held, Unix seconds, or 0."""
        return self._records[0].append_unix_s if self._records else 0.0

    def append(self, record: Record) -> None:
        """Add a record at `end`."""
        self._records.append(record)
        self.end = record.offset + 1
        self.last_append_unix_s = record.append_unix_s
        self.bytes += record_bytes(record)
        if self._compacted and record.key is not None:
            if record.key in self._latest:
                self._superseded += 1
            self._latest[record.key] = record.offset
            if self._superseded > max(COMPACT_AT_LEAST, len(self._records) // 2):
                self._compact(record.append_unix_s)

    def read(self, offset: int, limit: int) -> list[Record]:
        """Return up to `limit` records from an offset on; empty at the end."""
        start = self._index(offset)
        return self._records[start : start + limit]

    def drop_below(self, offset: int, *, bytes_at_most: int) -> int:
        """Forget the oldest records below an offset until few enough bytes are left.

        Args:
            offset: Records at or above it stay.
            bytes_at_most: Stop as soon as the log is no larger than this.

        Returns:
            How many records were forgotten.
        """
        count = 0
        for record in self._records:
            if record.offset >= offset or self.bytes <= bytes_at_most:
                break
            self.bytes -= record_bytes(record)
            count += 1
        del self._records[:count]
        return count

    def drop_older(self, append_unix_s: float) -> int:
        """Forget records appended before an instant; returns how many."""
        count = bisect_left(self._records, append_unix_s, key=attrgetter("append_unix_s"))
        self.bytes -= sum(map(record_bytes, self._records[:count]))
        del self._records[:count]
        return count

    def _index(self, offset: int) -> int:
        if not self._records or offset <= self._records[0].offset:
            return 0
        if self._compacted:
            return bisect_left(self._records, offset, key=attrgetter("offset"))
        return min(offset - self._records[0].offset, len(self._records))

    def _compact(self, now_unix_s: float) -> None:
        oldest_tombstone_s = now_unix_s - TOMBSTONE_KEEP_S
        kept: list[Record] = []
        for record in self._records:
            if record.key is not None and self._latest[record.key] != record.offset:
                continue
            if record.value is None and record.append_unix_s < oldest_tombstone_s:
                self._latest.pop(record.key or b"", None)
                continue
            kept.append(record)
        self._records = kept
        self._superseded = 0
        self.bytes = sum(map(record_bytes, kept))


class Reader(Protocol):
    """Who reads a partition."""

    group: str | None

    def position_in(self, home: "Partition") -> int:
        """Return the offset from which the reader goes on."""
        ...

    def wake(self, tp: TopicPartition | None = None) -> None:
        """Let the reader look for new records."""
        ...


class Partition:
    """A partition: its log, who reads it, and who waits for room in it.

    Args:
        tp: Which one.
        log: Its records.
        bound_bytes: Most it holds, bytes, or None for no bound.

    Attributes:
        readers: Open readers.
        given_up: Readers without a group that lagged for so long that nobody waits for them until
            they have caught up.
        left: When the last reader of a group left, monotonic seconds, per group.
        lane: Publishers pass one by one, in order of arrival.
        progress: Set when a group committed, or a reader read or left.
    """

    def __init__(self, tp: TopicPartition, log: PartitionLog, bound_bytes: int | None) -> None:
        self.tp = tp
        self.log = log
        self.bound_bytes = bound_bytes
        self.readers: dict[Reader, None] = {}
        self.given_up: set[Reader] = set()
        self.left: dict[str, float] = {}
        self.lane = asyncio.Lock()
        self.progress = asyncio.Event()
