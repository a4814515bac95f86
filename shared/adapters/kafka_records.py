"""Records as foreign producers write them: header names that are no UTF-8, headers without a value.

The protocol and the broker allow both, other clients write them, and neither may hurt a reader:
aiokafka's own parser raises on such a name, again on every attempt to read the partition. Importing
this module makes aiokafka's fetcher parse with `LenientRecords`, which gives up nothing of its
speed: only a batch that the fast parser refuses is parsed anew, in Python.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, SupportsIndex

from aiokafka.consumer import fetcher
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import _MemoryRecordsPy

MAGIC_WITH_HEADERS = 2


class _LenientBytes(bytearray):
    """Bytes whose slices decode to text whatever they hold."""

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        return _LenientBytes(found) if isinstance(found, bytearray) else found

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, errors)


class _LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc] # called final there
    """aiokafka's parser in Python; bytes of a header's name that are no UTF-8 become U+FFFD."""

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _LenientBytes(self._buffer)


class _Batch:
    """A batch that falls back to the lenient parser where the fast one fails."""

    def __init__(self, batch: Any, raw: memoryview) -> None:
        self._batch = batch
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        try:
            for record in self._batch:
                count += 1
                yield record
        except UnicodeDecodeError:
            yield from islice(_LenientBatch(self._raw), count, None)


class LenientRecords(_MemoryRecordsPy):  # type: ignore[misc] # called final there
    """The batches of one fetched partition."""

    def next_batch(self, *offsets: int) -> Any:
        """Return the next batch, or None."""
        raw = self._next_slice
        batch = super().next_batch(*offsets)
        if raw is None or batch is None or raw[self.MAGIC_OFFSET] < MAGIC_WITH_HEADERS:
            return batch
        return _Batch(batch, raw)


def readable_headers(
    headers: Iterable[tuple[str, bytes | None]],
) -> tuple[tuple[str, bytes], ...]:
    """Return a record's headers; one without a value has an empty one."""
    return tuple((name, value or b"") for name, value in headers)


# The class is looked up in this module when a fetch is answered; there is no other way to choose.
fetcher.MemoryRecords = LenientRecords  # type: ignore[attr-defined]
