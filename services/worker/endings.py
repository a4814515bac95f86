"""How a call leaves a worker: answered, handed back, or buried.

Invariant: a call's offsets are finished, and may therefore be committed, only after its outcome
is acknowledged on the reply topic or the call itself on `stage-requests`. The order is always:
publish, acknowledge in the state store, finish, forget. A step that is lost in between is repeated
by the next delivery or by `upkeep`, never skipped.
"""

import asyncio

import structlog

from services.worker.bells import Bells
from services.worker.calls import CallBook, EndedCalls, HeldCall
from services.worker.messages import (
    Verdict,
    latency_event_of,
    next_attempt_of,
    outcome_of,
    refusal_of,
    without_text,
)
from services.worker.params import WorkerParams
from services.worker.spans import trace_call
from services.worker.vitals import STORE, Vitals
from shared.contracts.codec import return_address
from shared.contracts.messages import CallOutcome, LatencyEvent, ReplyTo
from shared.contracts.topics import LATENCY_EVENTS, STAGE_REQUESTS
from shared.errors import ContractError, StateUnavailable, TooLarge, UnknownTopic
from shared.ports import Clock, Record, UrgencySet
from shared.runtime.metrics import Metrics
from shared.runtime.offsets import OffsetTracker
from shared.runtime.publishing import DeadLetters, Publisher

MAX_ATTEMPT = 1_000  # what the contract carries
MAX_EVENTS = 10_000
EVENTS_AT_ONCE = 100
log = structlog.get_logger(__name__)


class Endings:
    """Ends calls of one life.

    Args:
        book: What is held.
        offsets: What may be committed.
        ended: Recognises later deliveries.
        index: The instance's urgency set.
        publisher: Publishes outcomes and requests.
        dead_letters: Takes what nobody can handle.
        clock: Mesh clock.
        metrics: Counts what was published.
        params: Names and limits.
        bells: Rung when a call has moved.
        vitals: Whether the state store answers.
    """

    def __init__(
        self,
        *,
        book: CallBook,
        offsets: OffsetTracker,
        ended: EndedCalls,
        index: UrgencySet,
        publisher: Publisher,
        dead_letters: DeadLetters,
        clock: Clock,
        metrics: Metrics,
        params: WorkerParams,
        bells: Bells,
        vitals: Vitals,
    ) -> None:
        self._book = book
        self._offsets = offsets
        self._ended = ended
        self._index = index
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._clock = clock
        self._metrics = metrics
        self._params = params
        self._bells = bells
        self._vitals = vitals
        self._events: asyncio.Queue[LatencyEvent] = asyncio.Queue(MAX_EVENTS)

    def stop_counting(self, held: HeldCall) -> None:
        """Take a call out of queue or engine; what follows is paperwork."""
        self._book.end(held, self._clock.now_s())
        self._bells.ring()

    async def answer(self, held: HeldCall, verdict: Verdict) -> None:
        """Publish a call's outcome, then forget the call."""
        self.stop_counting(held)
        while True:
            request = held.request
            outcome = outcome_of(held, verdict, self._params.instance_id)
            outcome = await self._publish_outcome(held, request.reply_to, outcome)
            if held.request.ready_at_s == request.ready_at_s:
                break  # else the producer asked again meanwhile, perhaps from another place
        held.handed_on = "answered"
        trace_call(self._publisher.traces, held, outcome, 1.0 / self._clock.time_scale)
        self._tell_tuner(latency_event_of(held, outcome))
        self._observe_queue_time(held, outcome)
        await self._ack(held)
        self.close(held)

    async def hand_back(
        self, held: HeldCall, cause: str, *, failed: bool = False, counts: bool = True
    ) -> None:
        """Put a call back on `stage-requests` for another attempt, then forget it.

        Args:
            held: The call.
            cause: Constant word.
            failed: Whether the engine here failed it, so that others should try.
            counts: Whether that was one of its attempts.
        """
        failed_on = self._params.instance_id if failed else ""
        self.stop_counting(held)
        while True:
            attempt = held.attempt
            if attempt >= MAX_ATTEMPT:
                await self.answer(held, Verdict(kind="failed", reason="attempts_exhausted"))
                return
            try:
                await self._publisher.until_taken(
                    STAGE_REQUESTS,
                    next_attempt_of(held, failed_on, counts=counts),
                    key=held.query_id,
                    traceparent=held.traceparent,
                )
            except TooLarge as exc:
                await self.answer(held, Verdict(kind="failed", reason=exc.reason, detail=str(exc)))
                return
            self._metrics.handed_back.add(cause=cause)
            if held.attempt == attempt:
                break  # else a later attempt was delivered here meanwhile and ends here too
        held.handed_on = "back"
        log.info("call_handed_back", request_id=held.request_id, cause=cause, attempt=attempt)
        await self._ack(held)
        self.close(held)

    async def bury(self, record: Record, error: ContractError) -> None:
        """Dead-letter a record; tell its producer where the record says who that is."""
        address = return_address(record.value or b"")
        if address is not None:
            outcome = refusal_of(address, error, self._params.instance_id)
            try:
                await self._publisher.until_taken(
                    address.reply_to.topic,
                    outcome,
                    key=outcome.query_id,
                    partition=address.reply_to.partition,
                )
                self._metrics.outcomes.add(kind=outcome.kind, reason=outcome.reason)
            except (UnknownTopic, TooLarge) as exc:
                log.warning("refusal_undeliverable", error=str(exc), request_id=outcome.request_id)
        await self._dead_letters.bury(record, error)
        self._offsets.finish(record.offset)
        self._bells.ring()

    async def send_events(self) -> None:
        """Publish latency events as they come; runs until cancelled."""
        while True:
            batch = [await self._events.get()]
            while len(batch) < EVENTS_AT_ONCE and not self._events.empty():
                batch.append(self._events.get_nowait())
            async with asyncio.TaskGroup() as group:
                for event in batch:
                    group.create_task(self._send(event), name=f"event-{event.request_id}")

    async def events_sent(self) -> None:
        """Return when every latency event so far is acknowledged."""
        await self._events.join()

    async def _send(self, event: LatencyEvent) -> None:
        try:
            await self._publisher.until_taken(LATENCY_EVENTS, event, key=event.query_id)
        except TooLarge as exc:  # its parents or prefixes; the tuner can do without
            log.warning("latency_event_dropped", request_id=event.request_id, error=str(exc))
        finally:
            self._events.task_done()

    def _tell_tuner(self, event: LatencyEvent) -> None:
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:  # the broker is away; the tuner can do without
            log.warning("latency_event_dropped", request_id=event.request_id)

    async def _publish_outcome(
        self, held: HeldCall, reply_to: ReplyTo, outcome: CallOutcome
    ) -> CallOutcome:
        try:
            try:
                await self._send_outcome(held, reply_to, outcome)
            except TooLarge as exc:
                outcome = without_text(outcome, exc)
                await self._send_outcome(held, reply_to, outcome)
        except UnknownTopic as exc:
            await self._dead_letters.bury(held.record, exc)
            return outcome
        self._metrics.outcomes.add(kind=outcome.kind, reason=outcome.reason)
        return outcome

    async def _send_outcome(self, held: HeldCall, reply_to: ReplyTo, outcome: CallOutcome) -> None:
        await self._publisher.until_taken(
            reply_to.topic,
            outcome,
            key=outcome.query_id,
            partition=reply_to.partition,
            traceparent=held.traceparent,
        )

    async def _ack(self, held: HeldCall) -> None:
        if self._vitals.is_troubled(STORE):
            return  # upkeep removes what stays behind
        try:
            await self._index.ack(held.request_id, held.token)
        except StateUnavailable as exc:
            self._vitals.trouble(STORE, exc)

    def close(self, held: HeldCall) -> None:
        """Finish the offsets of a call that is handed on, and forget it; repeating is harmless."""
        if self._book.get(held.request_id) is not held:
            return
        for offset in held.offsets:
            self._offsets.finish(offset)
        self._ended.remember(held)
        self._book.forget(held)
        self._bells.ring()

    def _observe_queue_time(self, held: HeldCall, outcome: CallOutcome) -> None:
        if held.started_at_s is not None and held.request.ready_at_s is not None:
            waited_s = max(0.0, held.started_at_s - held.request.ready_at_s)
            self._metrics.queue_s.observe(waited_s, kind=outcome.kind)
