"""Offsets of the partitions of `stage-requests` that this dispatcher owns.

A partition's tracker is restored from the committed metadata when its first record is read, so no
hook of a rebalance has to wait for the broker. While a partition is moving away nothing more is
taken from it.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence

import structlog

from shared.errors import BrokerUnavailable, StaleAssignment
from shared.ports import Clock, Committed, Consumer, Record, TopicPartition
from shared.runtime.offsets import OffsetTracker

CHECK_PAUSE_FROM_RANGES = 100
RETRY_S = 0.2
log = structlog.get_logger(__name__)


class Partitions:
    """Trackers and commits of one group consumer.

    Args:
        consumer: The group consumer.
        clock: For the hourly recommit.
        recommit_s: Time after which unchanged positions are committed again, wall seconds.
    """

    def __init__(self, consumer: Consumer, clock: Clock, recommit_s: float) -> None:
        self._consumer = consumer
        self._clock = clock
        self._recommit_s = recommit_s
        self._trackers: dict[TopicPartition, OffsetTracker] = {}
        self._committed: dict[TopicPartition, tuple[Committed, float]] = {}
        self._moving: set[TopicPartition] = set()
        self._moves: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()

    async def trackers_for(
        self, records: Sequence[Record], stop: asyncio.Event
    ) -> dict[TopicPartition, OffsetTracker]:
        """Return the tracker of every partition of a batch just fetched that is still ours.

        A partition that moved while its committed position was read is left out, even if it came
        back: it is then read anew from that position, and offsets must not seem to be absent.
        Keeps trying while the broker is unavailable; after `stop` it may return less.
        """
        moves = dict(self._moves)
        for record in records:
            while record.tp not in self._trackers and self._is_still(record.tp, moves):
                try:
                    committed = await self._consumer.committed(record.tp)
                except BrokerUnavailable:
                    if stop.is_set():
                        return {}
                    await asyncio.sleep(RETRY_S)
                    continue
                if self._is_still(record.tp, moves):
                    self._trackers[record.tp] = OffsetTracker.restore(committed, record.offset)
        return {
            record.tp: self._trackers[record.tp]
            for record in records
            if record.tp in self._trackers and self._is_still(record.tp, moves)
        }

    def begin_move(self, tps: Collection[TopicPartition]) -> None:
        """Take no more records of partitions that are about to move away."""
        self._moving.update(tps)
        for tp in tps:
            self._moves[tp] = self._moves.get(tp, 0) + 1

    def end_move(self, tps: Collection[TopicPartition]) -> None:
        """Forget partitions that have moved; if they come back they are read anew."""
        self._moving.difference_update(tps)
        for tp in tps:
            self._trackers.pop(tp, None)
            self._committed.pop(tp, None)
            self._paused.discard(tp)

    def apply_pauses(self) -> None:
        """Pause partitions whose finished ranges would overflow the metadata; resume others."""
        for tp, tracker in self._trackers.items():
            if not self._is_ours(tp):
                continue
            full = tracker.num_ranges >= CHECK_PAUSE_FROM_RANGES and tracker.should_pause()
            if full and tp not in self._paused:
                self._consumer.pause(tp)
                self._paused.add(tp)
                log.warning("partition_paused", partition=tp.partition, ranges=tracker.num_ranges)
            elif not full and tp in self._paused:
                self._consumer.resume(tp)
                self._paused.discard(tp)

    async def commit(self, *, only: Collection[TopicPartition] | None = None) -> bool:
        """Commit what has changed; returns whether nothing is left to commit.

        Args:
            only: Partitions to commit; all by default.
        """
        now_s = self._clock.monotonic_s()
        due = {
            tp: tracker.committable()
            for tp, tracker in self._trackers.items()
            if (only is None or tp in only) and tp in self._consumer.assignment()
        }
        due = {tp: position for tp, position in due.items() if self._is_due(tp, position, now_s)}
        if not due:
            return True
        try:
            await self._consumer.commit(due)
        except BrokerUnavailable as exc:
            log.warning("commit_failed", error=str(exc))
            return False
        except StaleAssignment as exc:
            log.info("commit_stale", error=str(exc))  # the move's own hook drops the work
            return False
        self._committed.update({tp: (position, now_s) for tp, position in due.items()})
        return True

    def _is_ours(self, tp: TopicPartition) -> bool:
        return tp not in self._moving and tp in self._consumer.assignment()

    def _is_still(self, tp: TopicPartition, moves: Mapping[TopicPartition, int]) -> bool:
        return self._is_ours(tp) and self._moves.get(tp, 0) == moves.get(tp, 0)

    def _is_due(self, tp: TopicPartition, position: Committed, now_s: float) -> bool:
        last = self._committed.get(tp)
        return last is None or last[0] != position or now_s - last[1] >= self._recommit_s
