"""The urgency set on Redis: one Lua script per step, so every step is atomic.

Invariants: an entry is in exactly one of waiting, parked, claimed; the set holds entries of one
epoch only, the highest seen; scores, offsets and epochs are kept as text and come back exactly.
Only ids, scores and tokens are stored here. The calls themselves live in Kafka, so the whole set
may vanish or go back in time, and its owner repairs it (`members`, `claimed`, `add`).

No instant is ever taken from the server: callers pass the mesh clock's.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shared.adapters.redis_client import Argument, RedisClient, load_script
from shared.ports import QueueEntry, Token

# Offsets and epochs are at most 2**63 - 1: 19 digits.
_LARGEST = 2**63 - 1
_LARGEST_ATTEMPT = 10**10 - 1
_NO_LEASE = "+inf"
# A script holds the server up while it runs; 500 entries take about 2 ms.
_ENTRIES_PER_SCRIPT = 500
_ALL = 0
_STRINGS = msgspec.json.Decoder(list[str])

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class RedisUrgencySet:
    """One urgency set; implements `UrgencySet` and `SharedUrgencySet`.

    Args:
        client: Runs the scripts.
        name: Which set: letters, digits, `.`, `_`, `:`, `-`; at most 128 characters.

    Raises:
        ValueError: The name has other characters.
    """

    def __init__(self, client: RedisClient, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an urgency set")
        self._client = client
        # The braces make a cluster keep all five on one node.
        base = f"{client.params.prefix}{{{name}}}"
        parts = ("entries", "waiting", "parked", "claimed", "epoch")
        self._keys = tuple(f"{base}:{part}" for part in parts)

    async def begin(self, epoch: int) -> None:
        """Start a new life of the owner; see `UrgencySet.begin`."""
        await self._run("begin", _epoch_text(epoch))

    async def add(self, entries: Sequence[QueueEntry]) -> list[bool]:
        """Add entries of one epoch; see `UrgencySet.add`.

        Large additions run as several scripts, each atomic.
        """
        epochs = {entry.token.epoch for entry in entries}
        if len(epochs) > 1:
            raise ValueError("one addition holds entries of one epoch")
        fields = [entry_fields(entry) for entry in entries]
        added: list[bool] = []
        for start in range(0, len(entries), _ENTRIES_PER_SCRIPT):
            args = [field for four in fields[start : start + _ENTRIES_PER_SCRIPT] for field in four]
            reply = await self._run("add", _epoch_text(entries[0].token.epoch), *args)
            added += [flag == 1 for flag in reply]
        return added

    async def claim(self, epoch: int, *, limit: int, now_s: float) -> list[QueueEntry]:
        """Take the first entries and mark them claimed; see `UrgencySet.claim`."""
        return await self._claim(epoch, limit, now_s, _NO_LEASE)

    async def claim_leased(
        self, epoch: int, *, limit: int, now_s: float, lease_s: float
    ) -> list[QueueEntry]:
        """Take the first entries for `lease_s`; see `SharedUrgencySet.claim_leased`."""
        return await self._claim(epoch, limit, now_s, _number(now_s + lease_s))

    async def ack(self, request_id: str, token: Token) -> bool:
        """Forget an entry whose outcome is published; see `UrgencySet.ack`."""
        return bool(await self._run("ack", request_id, _token_text(token)) == 1)

    async def park(self, request_id: str, token: Token, *, due_s: float) -> bool:
        """Put a claimed entry aside until `due_s`; see `UrgencySet.park`."""
        return bool(await self._run("park", request_id, _token_text(token), _number(due_s)) == 1)

    async def release(self, request_id: str, token: Token) -> bool:
        """Make a claimed entry waiting again at its old place; see `UrgencySet.release`."""
        return bool(await self._run("release", request_id, _token_text(token)) == 1)

    async def remove(self, request_ids: Sequence[str]) -> list[str]:
        """Remove waiting and parked entries; see `UrgencySet.remove`."""
        removed: list[str] = []
        for start in range(0, len(request_ids), _ENTRIES_PER_SCRIPT):
            part = request_ids[start : start + _ENTRIES_PER_SCRIPT]
            removed += [request_id.decode() for request_id in await self._run("remove", *part)]
        return removed

    async def members(self) -> dict[str, Token]:
        """Return every entry in any state; see `UrgencySet.members`."""
        return _tokens(await self._run("members"))

    async def claimed(self) -> dict[str, Token]:
        """Return the claimed entries; see `UrgencySet.claimed`."""
        return _tokens(await self._run("list", "c", _ALL))

    async def waiting(self, *, limit: int) -> list[QueueEntry]:
        """Return the first waiting entries in order; see `UrgencySet.waiting`."""
        return _entries(await self._run("list", "w", limit)) if limit > 0 else []

    async def sizes(self) -> tuple[int, int, int]:
        """Return how many entries are (waiting, parked, claimed)."""
        waiting, parked, claimed = await self._run("sizes")
        return waiting, parked, claimed

    async def renew(
        self, held: Sequence[tuple[str, Token]], *, now_s: float, lease_s: float
    ) -> list[bool]:
        """Extend leases to `now_s + lease_s`; see `SharedUrgencySet.renew`."""
        if not held:
            return []
        args = [field for request_id, token in held for field in (request_id, _token_text(token))]
        reply = await self._run("renew", _number(now_s + lease_s), *args)
        return [flag == 1 for flag in reply]

    async def reclaim(self, *, now_s: float, limit: int = 500) -> list[QueueEntry]:
        """Make claims whose lease ended wait again; see `SharedUrgencySet.reclaim`."""
        return _entries(await self._run("reclaim", _number(now_s), limit)) if limit > 0 else []

    async def drop(self) -> None:
        """Delete the set with its epoch, when its owner is gone for good."""
        await self._client.command("DEL", *self._keys)

    async def _claim(
        self, epoch: int, limit: int, now_s: float, lease_until: str
    ) -> list[QueueEntry]:
        args = (_epoch_text(epoch), max(limit, 0), _number(now_s), lease_until)
        # Sent again after a lost reply it would take entries that nobody hears of twice.
        return _entries(await self._run("claim", *args, repeat=False))

    async def _run(self, name: str, *args: Argument, repeat: bool = True) -> Any:
        return await self._client.run(load_script(name), self._keys, args, repeat=repeat)


def _bounded(value: int, largest: int, what: str) -> int:
    if not 0 <= value <= largest:
        raise ValueError(f"{what} {value} is not between 0 and {largest}")
    return value


def _epoch_text(epoch: int) -> str:
    return f"{_bounded(epoch, _LARGEST, 'epoch'):019d}"


def _token_text(token: Token) -> str:
    """Return a token as fixed-width digits, whose text order is the token order."""
    offset = _bounded(token.offset, _LARGEST, "offset")
    attempt = _bounded(token.attempt, _LARGEST_ATTEMPT, "attempt")
    return f"{_epoch_text(token.epoch)}{offset:019d}{attempt:010d}"


def _number(value: float) -> str:
    """Return a float as text that reads back as exactly the same float."""
    if math.isnan(value):
        raise ValueError("an instant or score is not a number")
    return repr(float(value))


def entry_fields(entry: QueueEntry) -> tuple[str, str, str, str]:
    """Return an entry as the scripts keep it.

    Raises:
        ValueError: A number is out of range, or none.
    """
    arrival = _bounded(entry.arrival, _LARGEST, "arrival")
    return entry.request_id, _token_text(entry.token), f"{arrival:019d}", _number(entry.score)


def _token(entry: str) -> Token:
    return Token(int(entry[1:20]), int(entry[20:39]), int(entry[39:49]))


def _entries(reply: bytes) -> list[QueueEntry]:
    return [
        QueueEntry(
            request_id=request_id,
            score=float(entry[68:]),
            arrival=int(entry[49:68]),
            token=_token(entry),
        )
        for request_id, entry in _pairs(reply)
    ]


def _tokens(reply: bytes) -> dict[str, Token]:
    return {request_id: _token(entry) for request_id, entry in _pairs(reply)}


def _pairs(reply: bytes) -> Iterable[tuple[str, str]]:
    flat = _STRINGS.decode(reply)
    return zip(flat[::2], flat[1::2], strict=True)
