"""Keeps what others rely on in step with memory: committed offsets, and the state store's index.

Memory and Kafka are the truth, the index is not: it may lose everything or its last second, or
keep what should be gone. Comparing it with memory every second repairs each of these.
"""

import structlog

from services.worker.calls import HeldCall, Place
from services.worker.life import End, Life
from services.worker.vitals import BROKER, STORE
from shared.errors import (
    BrokerUnavailable,
    Fenced,
    StaleAssignment,
    StateUnavailable,
    UnknownTopic,
)
from shared.ports import Committed, Consumer, QueueEntry, Token, TopicPartition

log = structlog.get_logger(__name__)


class Upkeep:
    """Commits and heals.

    Args:
        life: Whose offsets and index.
        consumer: Commits the positions of the instance's topic.
        tp: That topic's partition.
    """

    def __init__(self, life: Life, consumer: Consumer, tp: TopicPartition) -> None:
        self._life = life
        self._consumer = consumer
        self._tp = tp
        self._committed: Committed | None = None
        self._committed_at_s = 0.0

    async def commit_forever(self) -> None:
        """Commit every little while; runs until cancelled."""
        while True:
            await self._life.clock.sleep_wall(self._life.params.commit_s)
            self._life.vitals.beat("commit")
            await self.commit()

    async def commit(self) -> bool:
        """Commit what is handed on, if it moved or was committed long ago; whether it is safe."""
        life = self._life
        position = life.offsets.committable()
        now_s = life.clock.monotonic_s()
        is_recent = now_s - self._committed_at_s < life.params.recommit_s
        if position == self._committed and is_recent:
            return True
        try:
            await self._consumer.commit({self._tp: position})
        except BrokerUnavailable as exc:
            life.vitals.trouble(BROKER, exc)
            return False
        except (StaleAssignment, UnknownTopic) as exc:
            log.warning("commit_refused", error=str(exc))
            life.over.set(End.FENCED)
            return False
        self._committed = position
        self._committed_at_s = now_s
        return True

    async def heal_forever(self) -> None:
        """Repair the index and forget expired tombstones; runs until cancelled."""
        life = self._life
        while True:
            await life.clock.sleep_wall(life.params.heal_s)
            life.vitals.beat("heal")
            life.tombstones.prune(life.clock.now_s())
            try:
                await self.heal()
            except StateUnavailable as exc:
                life.vitals.trouble(STORE, exc)
            except Fenced:
                life.over.set(End.FENCED)
                return
            else:
                life.vitals.recovered(STORE)
                life.bells.claim.set()

    async def heal(self) -> None:
        """Compare the index with memory once, and make it equal.

        Raises:
            StateUnavailable: Not compared.
            Fenced: A newer life owns the index.
        """
        life = self._life
        async with life.index_lock:
            members = await life.index.members()
            claimed = await life.index.claimed()
            lost = missing_from(members, life)
            unclaimed = [
                held
                for held in life.book.at(Place.WAITING)
                if claimed.get(held.request_id) == held.token
            ]
            gone = {key: token for key, token in members.items() if not _is_held(life, key, token)}
            # What only crossed an addition or acknowledgement on its way is no repair.
            num_added = sum(await life.index.add(lost)) if lost else 0
            num_released = await self._release(unclaimed)
            num_dropped = 0
            for request_id, token in gone.items():
                num_dropped += await life.index.ack(request_id, token)
        if num_added or num_released or num_dropped:
            log.info(
                "index_repaired",
                num_added=num_added,
                num_released=num_released,
                num_dropped=num_dropped,
            )

    async def _release(self, unclaimed: list[HeldCall]) -> int:
        num_released = 0
        for held in unclaimed:
            if held.place is Place.WAITING:
                num_released += await self._life.index.release(held.request_id, held.token)
        return num_released


def missing_from(members: dict[str, Token], life: Life) -> list[QueueEntry]:
    """Return the entries of waiting calls that the index does not have."""
    return [
        held.entry()
        for held in life.book.at(Place.WAITING)
        if members.get(held.request_id) != held.token
    ]


def _is_held(life: Life, request_id: str, token: Token) -> bool:
    held = life.book.get(request_id)
    return held is not None and held.token == token
