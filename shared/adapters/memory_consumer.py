"""Readers of the in-process broker."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from shared.adapters.commit_metadata import check_metadata
from shared.adapters.memory_log import Partition
from shared.errors import StaleAssignment, UnknownTopic
from shared.ports import (
    AssignedHook,
    Committed,
    Record,
    RevokedHook,
    StartAt,
    TopicPartition,
)


class Store(Protocol):
    """What a reader needs from its broker."""

    def partition(self, tp: TopicPartition) -> Partition:
        """Return a partition, or raise UnknownTopic."""
        ...

    def start_of(self, tp: TopicPartition, start: StartAt, group: str | None) -> int:
        """Return the offset at which a reader begins."""
        ...

    def free_of(self, group: str, wanted: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return those of some partitions that exist and that no member of a group owns."""
        ...

    def committed(self, group: str, tp: TopicPartition) -> Committed | None:
        """Return a group's committed position."""
        ...

    def commit(self, group: str, positions: Mapping[TopicPartition, Committed]) -> None:
        """Store a group's positions."""
        ...


class MemoryConsumer:
    """A Consumer on the in-process broker.

    Args:
        store: The broker.
        group: Group under whose id positions are committed, or None.
        wanted: Partitions to own as a member of the group; empty for fixed partitions.
        on_assigned: Awaited after partitions have arrived.
        on_revoked: Awaited when partitions are gone because their topic was deleted.
    """

    def __init__(
        self,
        store: Store,
        *,
        group: str | None,
        wanted: Sequence[TopicPartition] = (),
        on_assigned: AssignedHook | None = None,
        on_revoked: RevokedHook | None = None,
    ) -> None:
        self.group = group
        self._store = store
        self._wanted = wanted
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._waiter: asyncio.Future[bool] | None = None
        self._rebalancing = bool(wanted)
        self._turn = 0
        self._is_closed = False

    async def fetch(self, *, max_records: int = 500, timeout_s: float = 0.2) -> list[Record]:
        """Return records in offset order per partition; see the port."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        # A reader that always finds records must not starve the other tasks.
        await asyncio.sleep(0)
        while True:
            if self._is_closed:
                raise StaleAssignment("this consumer's context was left")
            await self.rebalance()
            records = self._drain(max_records)
            if records or not await self._is_woken_by(loop, deadline_s):
                return records

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions read at present."""
        return frozenset(self._positions)

    async def position(self, tp: TopicPartition) -> int:
        """Return the offset from which `fetch` goes on."""
        self._check_owned(tp)
        return self.position_in(self._store.partition(tp))

    async def end_offsets(self) -> dict[TopicPartition, int]:
        """Return the offset after the last record of every assigned partition."""
        return {tp: self._store.partition(tp).log.end for tp in self._positions}

    async def beginning_offsets(self) -> dict[TopicPartition, int]:
        """Return the first available offset of every assigned partition."""
        return {tp: self._store.partition(tp).log.begin for tp in self._positions}

    async def committed(self, tp: TopicPartition) -> Committed | None:
        """Return the group's committed position, or None when there is none."""
        return None if self.group is None else self._store.committed(self.group, tp)

    async def commit(self, positions: Mapping[TopicPartition, Committed]) -> None:
        """Commit positions for the group; see the port."""
        if self.group is None:
            raise ValueError("a consumer without a group cannot commit")
        check_metadata(positions)
        for tp in positions:
            self._check_owned(tp)
        self._store.commit(self.group, positions)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Make `offset` the next one read."""
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        self._check_owned(tp)
        self._positions[tp] = offset
        self.wake()

    def pause(self, *tps: TopicPartition) -> None:
        """Stop returning records of these partitions."""
        self._paused.update(self._positions.keys() & set(tps))

    def resume(self, *tps: TopicPartition) -> None:
        """Return records of these partitions again."""
        self._paused.difference_update(tps)
        self.wake()

    # What the broker calls.

    def position_in(self, home: Partition) -> int:
        """Return where to read on: forgotten or never written offsets lead to the beginning."""
        offset = self._positions[home.tp]
        begin = home.log.begin
        return begin if offset < begin or offset > home.log.end else offset

    def assign(self, tp: TopicPartition, offset: int) -> None:
        """Begin to read a partition at an offset."""
        self._positions[tp] = offset
        self._store.partition(tp).readers[self] = None

    def wake(self, tp: TopicPartition | None = None) -> None:
        """Let a waiting `fetch` look again; for a paused partition it sleeps on."""
        if self._waiter is None or self._waiter.done() or tp in self._paused:
            return
        self._waiter.set_result(True)

    def request_rebalance(self) -> None:
        """Let the next `fetch` see which partitions are free or gone by now."""
        self._rebalancing = bool(self._wanted)
        self.wake()

    async def rebalance(self) -> None:
        """Take the group's free partitions and forget deleted ones, awaiting the hooks."""
        if not self._rebalancing or self.group is None:
            return
        self._rebalancing = False
        gone = [tp for tp in self._positions if not self._is_there(tp)]
        if gone and self._on_revoked is not None:
            await self._on_revoked(gone)
        for tp in gone:
            self._positions.pop(tp, None)
            self._paused.discard(tp)
        free = self._store.free_of(self.group, self._wanted)
        for tp in free:
            self.assign(tp, self._store.start_of(tp, "committed", self.group))
        if free and self._on_assigned is not None:
            await self._on_assigned(free)

    def close(self) -> Collection[TopicPartition]:
        """Stop reading; returns the partitions given up."""
        given_up = list(self._positions)
        for tp in given_up:
            if self._is_there(tp):
                home = self._store.partition(tp)
                home.readers.pop(self, None)
                home.given_up.discard(self)
        self._positions.clear()
        self._rebalancing = False
        self._is_closed = True
        self.wake()
        return given_up

    # Inside.

    def _is_there(self, tp: TopicPartition) -> bool:
        try:
            self._store.partition(tp)
        except UnknownTopic:
            return False
        return True

    def _check_owned(self, tp: TopicPartition) -> None:
        if tp not in self._positions:
            raise StaleAssignment(f"partition {tp.partition} of {tp.topic} is not read here")

    def _drain(self, max_records: int) -> list[Record]:
        records: list[Record] = []
        tps = [tp for tp in self._positions if tp not in self._paused]
        self._turn += 1
        for index in range(len(tps)):
            tp = tps[(index + self._turn) % len(tps)]
            home = self._store.partition(tp)
            # The topic may have been deleted and created again.
            home.readers.setdefault(self)
            found = home.log.read(self.position_in(home), max_records - len(records))
            if found:
                self._positions[tp] = found[-1].offset + 1
                records += found
                home.progress.set()
                if self._positions[tp] == home.log.end:
                    home.given_up.discard(self)
            if len(records) >= max_records:
                break
        return records

    async def _is_woken_by(self, loop: asyncio.AbstractEventLoop, deadline_s: float) -> bool:
        """Wait for `wake`; False when the deadline came first."""
        if loop.time() >= deadline_s:
            return False
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        timer = loop.call_at(deadline_s, _give_up, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiter = None


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
