"""The state store as plain Python, in this process: for meshes that run in virtual time.

Nothing is waited for, so what such a mesh does depends on no other process. It keeps the contract
of the Redis scripts (tests/contract); the embedded mesh runs the scripts themselves.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec

from shared.adapters.urgency_set import entry_fields
from shared.errors import Fenced
from shared.ports import QueueEntry, Token

WAITING, PARKED, CLAIMED = range(3)
CHUNK_ENTRIES = 4_096
MAX_STREAMS = 1_000
NO_EPOCH = -1

Chunk = tuple[str, int, int, str]


class _Kept:
    """One entry, its state, and the instant until which it is parked or leased."""

    __slots__ = ("entry", "state", "until_s")

    def __init__(self, entry: QueueEntry) -> None:
        self.entry = entry
        self.state = WAITING
        self.until_s = 0.0


def _order(kept: _Kept) -> tuple[float, int, str]:
    return kept.entry.score, kept.entry.arrival, kept.entry.request_id


def _until_s(kept: _Kept) -> float:
    return kept.until_s


class MemoryUrgencySet:
    """Implements `SharedUrgencySet`."""

    def __init__(self) -> None:
        self._epoch = NO_EPOCH
        self._kept: dict[str, _Kept] = {}

    async def begin(self, epoch: int) -> None:
        """See `UrgencySet.begin`."""
        if epoch < self._epoch:
            raise Fenced(f"epoch {epoch} is over, epoch {self._epoch} has begun")
        if epoch > self._epoch:
            self._epoch = epoch
            self._kept.clear()

    async def add(self, entries: Sequence[QueueEntry]) -> list[bool]:
        """See `UrgencySet.add`."""
        if len({entry.token.epoch for entry in entries}) > 1:
            raise ValueError("one addition holds entries of one epoch")
        for entry in entries:
            entry_fields(entry)  # refuses what the scripts refuse
        if entries:
            await self.begin(entries[0].token.epoch)
        added = []
        for entry in entries:
            old = self._kept.get(entry.request_id)
            is_newer = old is None or old.entry.token < entry.token
            if is_newer:
                self._kept[entry.request_id] = _Kept(entry)
            added.append(is_newer)
        return added

    async def claim(self, epoch: int, *, limit: int, now_s: float) -> list[QueueEntry]:
        """See `UrgencySet.claim`."""
        return await self.claim_leased(epoch, limit=limit, now_s=now_s, lease_s=float("inf"))

    async def claim_leased(
        self, epoch: int, *, limit: int, now_s: float, lease_s: float
    ) -> list[QueueEntry]:
        """See `SharedUrgencySet.claim_leased`."""
        await self.begin(epoch)
        for kept in self._in(PARKED):
            if kept.until_s <= now_s:
                kept.state = WAITING
        taken = self._in(WAITING)[: max(0, limit)]
        for kept in taken:
            kept.state, kept.until_s = CLAIMED, now_s + lease_s
        return [kept.entry for kept in taken]

    async def ack(self, request_id: str, token: Token) -> bool:
        """See `UrgencySet.ack`."""
        old = self._kept.get(request_id)
        if old is None or old.entry.token > token:
            return False
        del self._kept[request_id]
        return True

    async def park(self, request_id: str, token: Token, *, due_s: float) -> bool:
        """See `UrgencySet.park`."""
        old = self._exactly(request_id, token)
        if old is None or old.state == WAITING:
            return False
        old.state, old.until_s = PARKED, due_s
        return True

    async def release(self, request_id: str, token: Token) -> bool:
        """See `UrgencySet.release`."""
        old = self._exactly(request_id, token)
        if old is None or old.state == PARKED:
            return False
        old.state = WAITING
        return True

    async def remove(self, request_ids: Sequence[str]) -> list[str]:
        """See `UrgencySet.remove`."""
        removed = []
        for request_id in request_ids:
            old = self._kept.get(request_id)
            if old is not None and old.state != CLAIMED:
                del self._kept[request_id]
                removed.append(request_id)
        return removed

    async def members(self) -> dict[str, Token]:
        """See `UrgencySet.members`."""
        return {key: kept.entry.token for key, kept in self._kept.items()}

    async def claimed(self) -> dict[str, Token]:
        """See `UrgencySet.claimed`."""
        return {kept.entry.request_id: kept.entry.token for kept in self._in(CLAIMED)}

    async def waiting(self, *, limit: int) -> list[QueueEntry]:
        """See `UrgencySet.waiting`."""
        return [kept.entry for kept in self._in(WAITING)[: max(0, limit)]]

    async def sizes(self) -> tuple[int, int, int]:
        """See `UrgencySet.sizes`."""
        return len(self._in(WAITING)), len(self._in(PARKED)), len(self._in(CLAIMED))

    async def drop(self) -> None:
        """See `UrgencySet.drop`."""
        self._epoch = NO_EPOCH
        self._kept.clear()

    async def renew(
        self, held: Sequence[tuple[str, Token]], *, now_s: float, lease_s: float
    ) -> list[bool]:
        """See `SharedUrgencySet.renew`."""
        renewed = []
        for request_id, token in held:
            old = self._exactly(request_id, token)
            is_held = old is not None and old.state == CLAIMED
            if old is not None and is_held:
                old.until_s = now_s + lease_s
            renewed.append(is_held)
        return renewed

    async def reclaim(self, *, now_s: float, limit: int = 500) -> list[QueueEntry]:
        """See `SharedUrgencySet.reclaim`."""
        ended = [kept for kept in self._in(CLAIMED) if kept.until_s <= now_s]
        expired = sorted(ended, key=_until_s)[: max(0, limit)]
        for kept in expired:
            token = msgspec.structs.replace(kept.entry.token, attempt=kept.entry.token.attempt + 1)
            kept.entry = msgspec.structs.replace(kept.entry, token=token)
            kept.state = WAITING
        return [kept.entry for kept in expired]

    def _in(self, state: int) -> list[_Kept]:
        return sorted((kept for kept in self._kept.values() if kept.state == state), key=_order)

    def _exactly(self, request_id: str, token: Token) -> _Kept | None:
        old = self._kept.get(request_id)
        return old if old is not None and old.entry.token == token else None


class MemoryStore:
    """Implements `StateStore`; streams do not wait for chunks that have not come.

    Args:
        monotonic: Clock of the leases, wall seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._sets: dict[str, MemoryUrgencySet] = {}
        self._streams: dict[str, list[Chunk]] = {}
        self._announced: dict[str, dict[str, tuple[float, str]]] = {}

    def urgency_set(self, name: str) -> MemoryUrgencySet:
        """See `StateStore.urgency_set`."""
        return self._sets.setdefault(name, MemoryUrgencySet())

    async def append_chunk(self, request_id: str, attempt: int, index: int, text: str) -> None:
        """See `StateStore.append_chunk`."""
        stream = self._streams.setdefault(request_id, [])
        if not stream or (attempt, index) > stream[-1][1:3]:
            stream.append((f"{attempt + 1}-{index + 1}", attempt, index, text))
        del stream[:-CHUNK_ENTRIES]
        if len(self._streams) > MAX_STREAMS:
            del self._streams[next(iter(self._streams))]

    async def chunks(
        self,
        request_id: str,
        *,
        after: str = "0-0",
        timeout_s: float = 1.0,  # noqa: ARG002 - nothing is waited for
    ) -> AsyncIterator[Chunk]:
        """See `StateStore.chunks`."""
        for chunk in self._later(request_id, after):
            yield chunk

    async def read_chunks(
        self,
        after: Mapping[str, str],
        *,
        wait_s: float,  # noqa: ARG002 - nothing is waited for
    ) -> dict[str, list[Chunk]]:
        """See `StateStore.read_chunks`."""
        found = {key: self._later(key, position) for key, position in after.items()}
        return {key: chunks for key, chunks in found.items() if chunks}

    async def announce(self, kind: str, name: str, text: str, *, lease_s: float) -> None:
        """See `StateStore.announce`."""
        self._announced.setdefault(kind, {})[name] = (self._monotonic() + lease_s, text)

    async def announced(self, kind: str) -> dict[str, str]:
        """See `StateStore.announced`."""
        now_s, members = self._monotonic(), self._announced.get(kind, {})
        for name in [name for name, (end_s, _) in members.items() if end_s <= now_s]:
            del members[name]
        return {name: text for name, (_, text) in members.items()}

    async def ping(self) -> float:
        """See `StateStore.ping`."""
        return 0.0

    def _later(self, request_id: str, after: str) -> list[Chunk]:
        major, minor = map(int, after.split("-"))
        stream = self._streams.get(request_id, ())
        return [chunk for chunk in stream if (chunk[1] + 1, chunk[2] + 1) > (major, minor)]
