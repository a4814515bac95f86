"""The urgency set as plain Python: what the Lua scripts must be indistinguishable from."""

import copy
from dataclasses import dataclass, field

import msgspec

from shared.errors import Fenced
from shared.ports import QueueEntry, Token

WAITING, PARKED, CLAIMED = range(3)


@dataclass
class Kept:
    """One entry, its state, and the instant it is parked or leased until."""

    entry: QueueEntry
    state: int = WAITING
    until_s: float = 0.0


def _order(kept: Kept) -> tuple[float, int, str]:
    return kept.entry.score, kept.entry.arrival, kept.entry.request_id


@dataclass
class UrgencyModel:
    """A dictionary of entries and an epoch; -1 is the epoch of a set that never was."""

    epoch: int = -1
    kept: dict[str, Kept] = field(default_factory=dict)

    def begin(self, epoch: int) -> None:
        """Fence lower epochs; a higher one starts empty."""
        if epoch < self.epoch:
            raise Fenced
        if epoch > self.epoch:
            self.epoch, self.kept = epoch, {}

    def add(self, entries: list[QueueEntry]) -> list[bool]:
        """Keep each entry unless a token as high is there."""
        if entries:
            self.begin(entries[0].token.epoch)
        added = []
        for one in entries:
            old = self.kept.get(one.request_id)
            added.append(old is None or old.entry.token < one.token)
            if added[-1]:
                self.kept[one.request_id] = Kept(one)
        return added

    def claim(self, epoch: int, limit: int, now_s: float, until_s: float) -> list[QueueEntry]:
        """Take the first waiting ones, after those parked until now."""
        self.begin(epoch)
        for one in self._in(PARKED):
            if one.until_s <= now_s:
                one.state = WAITING
        taken = self._in(WAITING)[:limit]
        for one in taken:
            one.state, one.until_s = CLAIMED, until_s
        return [one.entry for one in taken]

    def ack(self, request_id: str, token: Token) -> bool:
        """Drop the entry unless its token is higher."""
        old = self.kept.get(request_id)
        if old is None or old.entry.token > token:
            return False
        del self.kept[request_id]
        return True

    def park(self, request_id: str, token: Token, due_s: float) -> bool:
        """Park what is claimed or parked with this token."""
        old = self._exactly(request_id, token)
        if old is None or old.state == WAITING:
            return False
        old.state, old.until_s = PARKED, due_s
        return True

    def release(self, request_id: str, token: Token) -> bool:
        """Let what is claimed or waiting with this token wait."""
        old = self._exactly(request_id, token)
        if old is None or old.state == PARKED:
            return False
        old.state = WAITING
        return True

    def remove(self, request_ids: list[str]) -> list[str]:
        """Drop what is not claimed."""
        removed = []
        for request_id in request_ids:
            old = self.kept.get(request_id)
            if old is not None and old.state != CLAIMED:
                del self.kept[request_id]
                removed.append(request_id)
        return removed

    def renew(self, held: list[tuple[str, Token]], until_s: float) -> list[bool]:
        """Extend what is claimed with this token."""
        renewed = []
        for request_id, token in held:
            old = self._exactly(request_id, token)
            renewed.append(old is not None and old.state == CLAIMED)
            if old is not None and renewed[-1]:
                old.until_s = until_s
        return renewed

    def reclaim(self, now_s: float) -> list[QueueEntry]:
        """Let what ran out wait under the next attempt."""
        expired = [one for one in self._in(CLAIMED) if one.until_s <= now_s]
        for one in expired:
            token = msgspec.structs.replace(one.entry.token, attempt=one.entry.token.attempt + 1)
            one.entry = msgspec.structs.replace(one.entry, token=token)
            one.state = WAITING
        return [one.entry for one in expired]

    def tokens(self, *states: int) -> dict[str, Token]:
        """Return ids and tokens of the entries in these states."""
        kept = self.kept.items()
        return {name: one.entry.token for name, one in kept if one.state in states}

    def waiting(self) -> list[QueueEntry]:
        """Return the line in order."""
        return [one.entry for one in self._in(WAITING)]

    def sizes(self) -> tuple[int, int, int]:
        """Count the entries by state."""
        return len(self._in(WAITING)), len(self._in(PARKED)), len(self._in(CLAIMED))

    def snapshot(self) -> "UrgencyModel":
        """Return a copy that later steps leave alone."""
        return copy.deepcopy(self)

    def _in(self, state: int) -> list[Kept]:
        return sorted((one for one in self.kept.values() if one.state == state), key=_order)

    def _exactly(self, request_id: str, token: Token) -> Kept | None:
        old = self.kept.get(request_id)
        return old if old is not None and old.entry.token == token else None
