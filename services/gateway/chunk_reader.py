"""Reads the streamed tokens of all open calls with one command at a time.

A gateway may have a thousand streams open; one blocking read per call would need a thousand
connections. Here a single reader asks for all of them at once. A call that joins while the reader
waits rings a bell, which is a stream of its own among those that are read.

Bounds: a reader that is slow to take its text keeps at most `MAX_HELD_CHARS` of it; what is beyond
is dropped, and comes with the outcome, which has the whole text.
"""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import structlog

from shared.errors import StateUnavailable
from shared.ports import StateStore

WAIT_S = 1.0
RETRY_S = 0.5
MAX_HELD_CHARS = 1_000_000
FIRST = "0-0"
log = structlog.get_logger(__name__)


class Sink(Protocol):
    """Takes the chunks of one stream."""

    position: str
    """Where reading goes on."""

    def put(self, position: str, attempt: int, index: int, text: str) -> None:
        """Take a chunk; must not block."""
        ...


class Stream:
    """The text of one call as it comes; all of one attempt, in order, without gaps."""

    def __init__(self) -> None:
        self.position = FIRST
        self.attempt: int | None = None
        self.is_broken = False
        self._next_index = 0
        self._held: list[str] = []
        self._num_chars = 0
        self._waiters: list[asyncio.Future[None]] = []
        self.has_second_attempt = False
        self._has_forwarded = False

    def put(self, position: str, attempt: int, index: int, text: str) -> None:
        """Take a chunk that was read."""
        self.position = position
        if self.attempt != attempt:
            if self._has_forwarded:
                self.has_second_attempt = True
                self._wake()
                return
            self.attempt, self._next_index = attempt, 0
            self._held.clear()
            self._num_chars, self.is_broken = 0, False
        if index != self._next_index or self._num_chars + len(text) > MAX_HELD_CHARS:
            self.is_broken = True
        if self.is_broken:
            return
        self._next_index += 1
        self._num_chars += len(text)
        self._held.append(text)
        self._wake()

    def ready(self) -> "asyncio.Future[None]":
        """Return a future that is done when there is text to take, or a second attempt."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = [waiter]
        if self._held or self.has_second_attempt:
            self._wake()
        return waiter

    def take(self) -> str:
        """Return what came since the last time; from then on no other attempt is accepted."""
        text = "".join(self._held)
        self._held.clear()
        self._num_chars = 0
        if text:
            self._has_forwarded = True
        return text

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


class ChunkReader:
    """Feeds the streams of open calls.

    Args:
        store: Where chunks are read.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._streams: dict[str, Sink] = {}
        self._bell = f"bell-{secrets.token_hex(8)}"
        self._bell_at = FIRST
        self._num_rings = 0
        self._is_waiting = False
        self._joined = asyncio.Event()
        self._rung = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def reading(self, request_id: str) -> Iterator[Stream]:
        """Read a call's chunks while the block runs."""
        stream = Stream()
        with self.feeding(request_id, stream):
            yield stream

    @contextmanager
    def feeding(self, name: str, sink: Sink) -> Iterator[None]:
        """Give what comes in a chunk stream to `sink` while the block runs."""
        self._streams[name] = sink
        self._joined.set()
        if self._is_waiting:
            self._rung.set()
        try:
            yield
        finally:
            if self._streams.get(name) is sink:
                del self._streams[name]

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ring(), name="chunk-bell")
            while True:
                if not self._streams:
                    self._joined.clear()
                    await self._joined.wait()
                try:
                    await self._read()
                except StateUnavailable as exc:  # the outcomes bring the text all the same
                    log.warning("chunks_unavailable", error=str(exc))
                    await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        after = {request_id: stream.position for request_id, stream in self._streams.items()}
        after[self._bell] = self._bell_at
        self._is_waiting = True
        try:
            found = await self._store.read_chunks(after, wait_s=WAIT_S)
        finally:
            self._is_waiting = False
        for request_id, chunks in found.items():
            if request_id == self._bell:
                self._bell_at = chunks[-1][0]
                continue
            stream = self._streams.get(request_id)
            if stream is not None:
                for chunk in chunks:
                    stream.put(*chunk)

    async def _ring(self) -> None:
        """Wake the reader when somebody joined."""
        while True:
            await self._rung.wait()
            self._rung.clear()
            try:
                await self._store.append_chunk(self._bell, 0, self._num_rings, "")
            except StateUnavailable as exc:
                log.warning("chunk_bell_lost", error=str(exc))
            self._num_rings += 1
