"""Outcomes that the dispatcher itself decides: rejected, cancelled; and dead letters.

Only the holder of a call writes its outcome. An outcome that cannot be delivered because its reply
partition does not exist becomes a dead letter, so that the call still ends visibly.
"""

from collections.abc import Callable

import msgspec

from services.dispatcher.call_book import OpenCall
from services.dispatcher.intake import Refusal
from shared.contracts.codec import ReturnAddress, encode
from shared.contracts.messages import MAX_DETAIL, CallOutcome, CallTimes, OutcomeKind
from shared.contracts.topics import Topics
from shared.errors import InvalidCall, UnknownTopic
from shared.ports import Clock, Record
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import DeadLetters, Publisher


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ends here.

    Attributes:
        kind: Outcome kind.
        reason: Constant word.
        detail: One sentence for people; never prompt text.
    """

    kind: OutcomeKind
    reason: str
    detail: str


class Answers:
    """Publishes the dispatcher's own outcomes.

    Args:
        publisher: How to publish.
        topics: Names.
        clock: Time of the decision.
        metrics: Counts outcomes.
        give_up: Asked between tries while the broker is unavailable; then BrokerUnavailable.
    """

    def __init__(
        self,
        publisher: Publisher,
        topics: Topics,
        clock: Clock,
        metrics: Metrics,
        give_up: Callable[[], bool],
    ) -> None:
        self._publisher = publisher
        self._topics = topics
        self._clock = clock
        self._metrics = metrics
        self._give_up = give_up
        self._dead_letters = DeadLetters(publisher, topics, clock, metrics, "dispatcher", give_up)

    async def end_call(self, call: OpenCall, verdict: Verdict) -> None:
        """Publish the outcome of a readable call; returns when it is acknowledged."""
        request = call.request
        address = ReturnAddress(
            request_id=request.request_id,
            query_id=request.effective_query_id,
            reply_to=request.reply_to,
            attempt=request.attempt,
        )
        deadline_s = None
        if request.arrival_s is not None and request.slo_s is not None:
            deadline_s = request.arrival_s + request.slo_s
        outcome = msgspec.structs.replace(
            self._outcome(address, verdict),
            times=CallTimes(
                ready_at_s=request.ready_at_s, finished_at_s=max(0.0, self._clock.now_s())
            ),
            t_slo_s=request.t_slo_s,
            deadline_s=deadline_s,
            slo_defaulted=request.slo_defaulted,
        )
        try:
            await self._publish(address, outcome, call.traceparent)
        except UnknownTopic as exc:
            origin = call.origins[0] if call.origins else None
            if origin is not None:
                record = Record(
                    tp=origin.tp,
                    offset=origin.offset,
                    append_unix_s=0.0,
                    key=request.effective_query_id.encode(),
                    value=encode(request),
                )
                await self._dead_letters.bury(record, InvalidCall(f"nowhere to answer: {exc}"))

    async def refuse(self, record: Record, refusal: Refusal, traceparent: str | None) -> None:
        """Bury and answer a record that is no valid call, as far as its verdict says."""
        if refusal.bury:
            await self._dead_letters.bury(record, refusal.error)
        if refusal.address is None:
            return
        error = refusal.error
        verdict = Verdict(kind="rejected", reason=error.reason, detail=str(error))
        try:
            outcome = self._outcome(refusal.address, verdict)
            await self._publish(refusal.address, outcome, traceparent)
        except UnknownTopic as exc:
            if not refusal.bury:
                await self._dead_letters.bury(record, InvalidCall(f"nowhere to answer: {exc}"))

    def _outcome(self, address: ReturnAddress, verdict: Verdict) -> CallOutcome:
        return CallOutcome(
            request_id=address.request_id,
            query_id=address.query_id,
            kind=verdict.kind,
            reason=verdict.reason,
            detail=verdict.detail[:MAX_DETAIL],
            attempt=address.attempt,
        )

    async def _publish(
        self, address: ReturnAddress, outcome: CallOutcome, traceparent: str | None
    ) -> None:
        await self._publisher.until_taken(
            address.reply_to.topic,
            outcome,
            key=address.request_id,
            partition=address.reply_to.partition,
            traceparent=traceparent,
            give_up=self._give_up,
        )
        self._metrics.outcomes.add(kind=outcome.kind, reason=outcome.reason)
