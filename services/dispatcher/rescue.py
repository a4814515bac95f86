"""Brings back what a dead or departed instance still held.

Its topic is read from the committed position of its worker's group to its end, and every call that
is not finished there is handed back to `stage-requests` with attempt + 1 and the same ready time
and budget. What dispatchers with older knowledge still send there is handed back too, until the
instance begins a new epoch. Each hand-back is committed under the worker's group once it is
acknowledged, so a rescue that is repeated, by whomever, repeats only what was unfinished.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import structlog

from services.dispatcher.params import DispatcherParams
from shared.contracts.codec import decode, return_address
from shared.contracts.messages import (
    MAX_DETAIL,
    BoundCall,
    CallOutcome,
    CallTimes,
    InstanceState,
    StageRequest,
)
from shared.contracts.topics import INSTANCE_STATES, STAGE_REQUESTS, Topics
from shared.errors import (
    BrokerUnavailable,
    ContractError,
    InstanceLost,
    MeshError,
    StaleAssignment,
    UnknownTopic,
)
from shared.ports import Broker, Clock, Committed, Consumer, Record, TopicPartition
from shared.runtime.metrics import Metrics
from shared.runtime.offsets import OffsetTracker
from shared.runtime.publishing import DeadLetters, Publisher
from shared.runtime.tracing import traceparent_of

FETCH_RECORDS = 64
RETRY_S = 0.2
log = structlog.get_logger(__name__)


class Rescue:
    """The rescue of one instance, from its death to its next life.

    Args:
        state: Its last state.
        broker: Messages.
        clock: Time.
        topics: Names.
        params: Attempts.
        metrics: Counts hand-backs.
    """

    def __init__(
        self,
        state: InstanceState,
        *,
        broker: Broker,
        clock: Clock,
        topics: Topics,
        params: DispatcherParams,
        metrics: Metrics,
    ) -> None:
        self._state = state
        self._broker = broker
        self._clock = clock
        self._topics = topics
        self._params = params
        self._metrics = metrics
        self._has_crashed = state.phase != "gone"
        self._publisher = Publisher(broker, topics, clock)
        self._over = asyncio.Event()
        self._dead_letters = DeadLetters(
            self._publisher, topics, clock, metrics, "recovery", self._over.is_set
        )
        self.fence_offset: int | None = None
        self.num_handed_back = 0

    def end(self) -> None:
        """Finish the batch under way, commit, and stop."""
        self._over.set()

    async def run(self) -> None:
        """Fence the instance unless it left by itself, then hand back until `end`."""
        instance_id = self._state.instance_id
        try:
            if self._has_crashed:
                await self._fence()
            await self._hand_back_all()
        except BrokerUnavailable:
            log.info("rescue_left", instance_id=instance_id)  # only when told to end
        except UnknownTopic:
            log.info("instance_forgotten", instance_id=instance_id)
            await self._forget()
        log.info("rescue_ended", instance_id=instance_id, calls=self.num_handed_back)

    async def _fence(self) -> None:
        """Begin an epoch without a worker: whoever still lives in the old one has lost its work."""
        fence = msgspec.structs.replace(
            self._state,
            phase="gone",
            epoch=-1,
            seq=0,
            nonce=self._params.dispatcher_id,
            at_s=max(0.0, self._clock.now_s()),
            num_waiting=0,
            num_running=0,
            backlog_s=0.0,
            backlog_tokens=0,
            kv_used_tokens=0,
        )
        ack = await self._publisher.until_taken(
            INSTANCE_STATES, fence, key=self._state.instance_id, give_up=self._over.is_set
        )
        self.fence_offset = ack.offset
        self._metrics.fences.add()
        log.warning("instance_fenced", instance_id=self._state.instance_id, epoch=ack.offset)

    async def _forget(self) -> None:
        """Remove the state of an instance whose topic is gone: there is nothing left to watch."""
        with suppress(BrokerUnavailable):
            await self._publisher.once(INSTANCE_STATES, None, key=self._state.instance_id)

    async def _hand_back_all(self) -> None:
        instance_id = self._state.instance_id
        tp = TopicPartition(self._topics.instance(instance_id), 0)
        await self._broker.partitions_of(tp.topic)
        async with self._broker.partition_consumer(
            [tp], start="committed", group=self._topics.worker_group(instance_id)
        ) as consumer:
            tracker: OffsetTracker | None = None
            committed: Committed | None = None
            while not self._over.is_set():
                try:
                    if tracker is None:
                        tracker = await _restored(consumer, tp)
                    records = await consumer.fetch(max_records=FETCH_RECORDS)
                except BrokerUnavailable:
                    await asyncio.sleep(RETRY_S)
                    continue
                if self._over.is_set():
                    return  # what came meanwhile belongs to the next life, or the next owner
                await self._hand_back(records, tracker)
                if tracker.committable() != committed:
                    committed = await self._commit(consumer, tp, tracker)

    async def _hand_back(self, records: Sequence[Record], tracker: OffsetTracker) -> None:
        async with asyncio.TaskGroup() as group:
            for record in records:
                tracker.seen(record.offset)
                if not tracker.is_finished(record.offset):
                    finish = _finisher(tracker, record.offset)
                    group.create_task(self._hand_back_one(record, finish), name="hand-back")

    async def _hand_back_one(self, record: Record, finish: Callable[[], None]) -> None:
        try:
            bound = decode(record.value or b"", BoundCall)
        except ContractError as exc:
            with suppress(BrokerUnavailable):
                await self._refuse(record, exc)
                finish()
            return
        failures = bound.request.failures + self._has_crashed
        request = msgspec.structs.replace(
            bound.request, attempt=bound.request.attempt + 1, failures=failures
        )
        with suppress(BrokerUnavailable):  # told to end: left unfinished for the next owner
            if self._has_crashed and failures >= self._params.max_attempts:
                await self._give_up(bound, record)
            else:
                await self._publish(request, record)
            finish()

    async def _publish(self, request: StageRequest, record: Record) -> None:
        await self._publisher.until_taken(
            STAGE_REQUESTS,
            request,
            key=request.effective_query_id,
            traceparent=traceparent_of(record),
            give_up=self._over.is_set,
        )
        self.num_handed_back += 1
        self._metrics.handed_back.add(cause="crash" if self._has_crashed else "left")
        log.info(
            "call_handed_back",
            query_id=request.effective_query_id,
            request_id=request.request_id,
            attempt=request.attempt,
            instance_id=self._state.instance_id,
        )

    async def _give_up(self, bound: BoundCall, record: Record) -> None:
        request = bound.request
        outcome = CallOutcome(
            request_id=request.request_id,
            query_id=request.effective_query_id,
            kind="failed",
            reason=InstanceLost.reason,
            detail=f"the instance died under it in attempt {request.attempt}",
            attempt=request.attempt,
            instance_id=self._state.instance_id,
            times=CallTimes(
                ready_at_s=request.ready_at_s,
                dispatched_at_s=bound.dispatched_at_s,
                finished_at_s=max(0.0, self._clock.now_s()),
            ),
            t_slo_s=request.t_slo_s,
            deadline_s=bound.deadline_s,
            terms=bound.terms,
            slo_defaulted=request.slo_defaulted,
        )
        await self._answer(outcome, request.reply_to.topic, request.reply_to.partition, record)

    async def _refuse(self, record: Record, error: MeshError) -> None:
        await self._dead_letters.bury(record, error)
        address = return_address(record.value or b"")
        if address is None:
            return
        outcome = CallOutcome(
            request_id=address.request_id,
            query_id=address.query_id,
            kind="rejected",
            reason=error.reason,
            detail=str(error)[:MAX_DETAIL],
            attempt=address.attempt,
            instance_id=self._state.instance_id,
        )
        await self._answer(outcome, address.reply_to.topic, address.reply_to.partition, record)

    async def _answer(
        self, outcome: CallOutcome, topic: str, partition: int, record: Record
    ) -> None:
        try:
            await self._publisher.until_taken(
                topic,
                outcome,
                key=outcome.request_id,
                partition=partition,
                traceparent=traceparent_of(record),
                give_up=self._over.is_set,
            )
        except UnknownTopic as exc:
            await self._dead_letters.bury(record, exc)
        else:
            self._metrics.outcomes.add(kind=outcome.kind, reason=outcome.reason)

    async def _commit(
        self, consumer: Consumer, tp: TopicPartition, tracker: OffsetTracker
    ) -> Committed | None:
        position = tracker.committable()
        try:
            await consumer.commit({tp: position})
        except (BrokerUnavailable, StaleAssignment) as exc:
            log.warning("rescue_commit_failed", topic=tp.topic, error=str(exc))
            return None
        return position


async def _restored(consumer: Consumer, tp: TopicPartition) -> OffsetTracker:
    committed = await consumer.committed(tp)
    beginning = (await consumer.beginning_offsets())[tp]
    return OffsetTracker.restore(committed, beginning)


def _finisher(tracker: OffsetTracker, offset: int) -> Callable[[], None]:
    def finish() -> None:
        tracker.finish(offset)

    return finish
