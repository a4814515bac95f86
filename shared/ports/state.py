"""The state store: urgency sets, capped streams of token chunks, and who is there."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec


class Token(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identifies one delivery of a call to one life of an owner: (epoch, offset, attempt).

    It never comes from a Redis counter, so a wiped or rewound Redis cannot confuse it. A higher
    token fences every lower one.
    """

    epoch: int
    offset: int
    attempt: int


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One waiting call in an urgency set.

    Attributes:
        request_id: The call.
        score: Queue position, smallest first; ties by `arrival`, then request_id.
        arrival: Order of arrival (the offset on the instance's topic), >= 0.
        token: Identifies this delivery.
    """

    request_id: str
    score: float
    arrival: int
    token: Token


class UrgencySet(Protocol):
    """A priority queue in the state store, kept by one owner (an instance's worker).

    Entries are waiting, parked (a retry that is due later; it keeps its score) or claimed, all of
    one epoch: the highest that any method was told. Every method is one atomic step and raises
    StateUnavailable when the store does not answer; it may have taken effect then, and each is
    safe to repeat.

    Bound: the set never refuses an entry, because an owner that repairs it adds entries that were
    accepted long ago. Whoever accepts calls checks the bound first (`sizes`, or its own count) and
    raises QueueFull.

    Repair: the store is an index and may lose everything (FLUSHALL), or its last second (a crash).
    About every second, and not while a claim of its own is under way, the owner
      1. adds what it holds that is neither running nor among `members` with its token,
      2. releases what is among `claimed` but neither running nor finished (a claim whose reply
         was lost),
      3. acks what is among `members` but finished.
    A claim may return a call that runs or is finished already; the owner then ignores it, or acks
    it.
    """

    async def begin(self, epoch: int) -> None:
        """Start a new life of the owner: entries of lower epochs are dropped and fenced.

        To begin the current epoch again changes nothing.

        Raises:
            Fenced: A higher epoch has begun already.
        """
        ...

    async def add(self, entries: Sequence[QueueEntry]) -> list[bool]:
        """Add entries of one epoch; per entry, whether it waits now because of this call.

        An entry already waiting, parked or claimed with the same or a higher token is left as
        it is (so healing can add again what it is unsure of); a lower token is replaced, also
        while claimed. An epoch above the set's begins here: a store that was wiped or went back
        in time does not know the owner's.

        Raises:
            Fenced: The entries' epoch is below the set's; nothing was added.
        """
        ...

    async def claim(self, epoch: int, *, limit: int, now_s: float) -> list[QueueEntry]:
        """Take up to `limit` entries, smallest score first, and mark them claimed.

        Parked entries due by `now_s` become waiting first. Equal scores come by arrival, then
        request_id. An epoch above the set's begins here, as in `add`. Repeated after a lost
        reply it takes further entries; the repair above releases the first ones.

        Raises:
            Fenced: `epoch` is below the set's.
        """
        ...

    async def ack(self, request_id: str, token: Token) -> bool:
        """Forget an entry whose outcome is published, whatever its state; whether it was there.

        An entry with a lower token goes too, one with a higher token stays (False).
        """
        ...

    async def park(self, request_id: str, token: Token, *, due_s: float) -> bool:
        """Put a claimed entry aside until `due_s` (mesh clock) for a retry; its score stays.

        False when no such entry is claimed or parked with exactly this token.
        """
        ...

    async def release(self, request_id: str, token: Token) -> bool:
        """Make a claimed entry waiting again at its old place.

        False when no such entry is claimed or waiting with exactly this token.
        """
        ...

    async def remove(self, request_ids: Sequence[str]) -> list[str]:
        """Remove waiting and parked entries; returns the ids removed (claimed ones stay)."""
        ...

    async def members(self) -> dict[str, Token]:
        """Return every entry in any state."""
        ...

    async def claimed(self) -> dict[str, Token]:
        """Return the claimed entries."""
        ...

    async def waiting(self, *, limit: int) -> list[QueueEntry]:
        """Return the first waiting entries in order, without claiming them."""
        ...

    async def sizes(self) -> tuple[int, int, int]:
        """Return how many entries are (waiting, parked, claimed)."""
        ...

    async def drop(self) -> None:
        """Delete the set with its epoch: its owner is gone, or the broker's history is lost."""
        ...


class SharedUrgencySet(UrgencySet, Protocol):
    """An urgency set with several claimers, whose claims expire unless they are renewed.

    The epoch is the set's, not a claimer's. Every claimer passes the same mesh clock.
    """

    async def claim_leased(
        self, epoch: int, *, limit: int, now_s: float, lease_s: float
    ) -> list[QueueEntry]:
        """Claim as `claim` does, until `now_s + lease_s` (mesh seconds).

        Raises:
            Fenced: `epoch` is below the set's.
        """
        ...

    async def renew(
        self, held: Sequence[tuple[str, Token]], *, now_s: float, lease_s: float
    ) -> list[bool]:
        """Extend leases to `now_s + lease_s`; False: lost, another claimer may have it."""
        ...

    async def reclaim(self, *, now_s: float, limit: int = 500) -> list[QueueEntry]:
        """Make claims whose lease ended by `now_s` wait again, at their old place.

        Their tokens' attempt rises by one, which fences the claimer that lost them. Any claimer
        may call it. Returns them as they are now.
        """
        ...


class StateStore(Protocol):
    """The state store: urgency sets, capped streams of token chunks, and who is there."""

    def urgency_set(self, name: str) -> SharedUrgencySet:
        """Return the urgency set of an owner (an instance id) or of several claimers."""
        ...

    async def append_chunk(self, request_id: str, attempt: int, index: int, text: str) -> None:
        """Append one chunk of streamed text to the call's capped stream (expires by itself).

        Chunks of one call come in order of (attempt, index), each >= 0. One that is there
        already, or is overtaken by a later one, is dropped without an error.
        """
        ...

    def chunks(
        self, request_id: str, *, after: str = "0-0", timeout_s: float = 1.0
    ) -> AsyncIterator[tuple[str, int, int, str]]:
        """Yield (position, attempt, index, text) as they come; ends after a quiet time-out."""
        ...

    async def read_chunks(
        self, after: Mapping[str, str], *, wait_s: float
    ) -> dict[str, list[tuple[str, int, int, str]]]:
        """Return new chunks of many calls at once, as `chunks` does; waits for the first.

        Args:
            after: request_id -> the position read last, "0-0" at the start; at least one.
            wait_s: Longest wait while none of them has any, wall seconds.

        Returns:
            request_id -> its chunks, for those that have some; empty after a quiet wait.
        """
        ...

    async def announce(self, kind: str, name: str, text: str, *, lease_s: float) -> None:
        """Say that a member of a kind is there, for `lease_s` wall seconds from now.

        Said again, it replaces what was said before, and its lease begins anew.

        Raises:
            StateUnavailable: The store does not answer.
        """
        ...

    async def announced(self, kind: str) -> dict[str, str]:
        """Return what the members of a kind said whose lease has not ended: name -> text.

        Bounded: of very many, those whose leases end last.

        Raises:
            StateUnavailable: The store does not answer.
        """
        ...

    async def ping(self) -> float:
        """Return the round-trip time, wall seconds."""
        ...
