"""Reads the instance's topic: decodes, recognises duplicates, queues by urgency.

The queue is bounded: at `queue_bound` calls or `queue_bytes` bytes, or when the finished ranges
would outgrow the commit metadata, nothing is fetched until there is room again. Dispatchers see
the bound in the worker's state and stop assigning; what they sent before stays in the topic.
"""

from collections.abc import Sequence

import structlog

from services.worker.bells import heard_within
from services.worker.calls import HeldCall
from services.worker.life import End, Life
from services.worker.messages import Verdict, verdict_if_hopeless
from services.worker.vitals import BROKER, STORE
from shared.contracts.codec import decode
from shared.contracts.messages import BoundCall
from shared.errors import (
    BrokerUnavailable,
    ContractError,
    Fenced,
    StateUnavailable,
    UnknownTopic,
)
from shared.ports import Consumer, Record

TOPIC_LABEL = "instance"
FETCH_RECORDS = 500
FETCH_S = 0.5
BACKOFF_S = 0.2
MAX_BURIALS = 100
log = structlog.get_logger(__name__)


class Intake:
    """Takes calls in.

    Args:
        life: Whose calls.
        consumer: Reads the instance's topic.
    """

    def __init__(self, life: Life, consumer: Consumer) -> None:
        self._life = life
        self._consumer = consumer
        self._next_offset = 0
        self.num_burials = 0
        self.is_leaving = False

    async def take_forever(self) -> None:
        """Fetch and queue until cancelled."""
        life = self._life
        while True:
            life.vitals.beat("intake")
            room = self._room()
            if room < 1:
                await heard_within(life.bells.room, 1.0)
                continue
            try:
                records = await self._consumer.fetch(max_records=room, timeout_s=FETCH_S)
            except BrokerUnavailable as exc:
                life.vitals.trouble(BROKER, exc)
                await life.clock.sleep_wall(BACKOFF_S)
                continue
            except UnknownTopic as exc:  # deleted under us; a new life creates it again
                log.warning("instance_topic_gone", error=str(exc))
                life.over.set(End.FENCED)
                return
            life.vitals.recovered(BROKER)
            if records:
                await self._take(records)

    def _room(self) -> int:
        life = self._life
        if life.book.held_bytes >= life.params.queue_bytes or self.num_burials >= MAX_BURIALS:
            return 0
        if life.offsets.should_pause():
            return 0
        # Calls that are being answered count too: while the broker is away they only grow.
        num_held = len(life.book) - life.book.num_running
        return min(FETCH_RECORDS, life.params.queue_bound - num_held)

    async def _take(self, records: Sequence[Record]) -> None:
        life = self._life
        life.metrics.messages.add(len(records), topic=TOPIC_LABEL)
        added: list[HeldCall] = []
        for record in records:
            if record.offset < self._next_offset:
                log.error("topic_rewound", offset=record.offset, expected=self._next_offset)
                life.over.set(End.FENCED)
                return
            self._next_offset = record.offset + 1
            life.offsets.seen(record.offset)
            held = self._read(record)
            if held is not None and self._may_wait(held):
                added.append(held)
            life.book.account(record.offset)
        await self._index(added)
        life.bells.ring()

    def _read(self, record: Record) -> HeldCall | None:
        """Return the call of a record if it is new here."""
        life = self._life
        if life.offsets.is_finished(record.offset):
            return None
        try:
            call = decode(record.value or b"", BoundCall)
        except ContractError as exc:
            self.num_burials += 1
            life.spawn(self._bury(record, exc), name=f"bury-{record.offset}")
            return None
        known = life.book.get(call.request.request_id)
        if known is not None and known.handed_on:
            life.endings.close(known)  # this may be its next attempt, which is another call
        if life.book.attach(call, record):
            life.metrics.duplicates.add(topic=TOPIC_LABEL)
            return None
        if life.ended.knows(call.request):
            life.metrics.duplicates.add(topic=TOPIC_LABEL)
            life.offsets.finish(record.offset)
            return None
        return life.book.hold(call, record, epoch=life.epoch, now_s=life.clock.now_s())

    def _may_wait(self, held: HeldCall) -> bool:
        """Return whether the call waits; else its end is under way."""
        life = self._life
        tombstone = life.tombstones.find(held.query_id, held.request_id)
        if tombstone is not None:
            self._end(held, Verdict(kind="cancelled", reason="cancelled", detail=tombstone.reason))
            return False
        hopeless = verdict_if_hopeless(held, life.clock.now_s(), life.params.evict_after_s)
        if hopeless is not None:
            self._end(held, hopeless)
            return False
        if self.is_leaving:
            life.endings.stop_counting(held)
            life.spawn(life.endings.hand_back(held, "drain"), name=f"hand-back-{held.request_id}")
            return False
        return True

    def _end(self, held: HeldCall, verdict: Verdict) -> None:
        life = self._life
        life.endings.stop_counting(held)
        life.spawn(life.endings.answer(held, verdict), name=f"end-{held.request_id}")

    async def _bury(self, record: Record, error: ContractError) -> None:
        await self._life.endings.bury(record, error)
        self.num_burials -= 1

    async def _index(self, added: Sequence[HeldCall]) -> None:
        if not added or self._life.vitals.is_troubled(STORE):
            return
        try:
            await self._life.index.add([held.entry() for held in added])
        except StateUnavailable as exc:  # upkeep adds what is missing
            self._life.vitals.trouble(STORE, exc)
        except Fenced:
            self._life.over.set(End.FENCED)
