"""One partition of `queries`: its questions, their calls' outcomes, and what may be committed.

The questions of a partition get their outcomes on one partition of `stage-results` that follows
from theirs, so whoever takes the partition over finds them there. Two positions are committed: of
`queries`, below the lowest question without a result; and of the outcomes, below those of any such
question. The second never overtakes the first.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial

import msgspec
import structlog

from services.text2sql.answering import Answering
from services.text2sql.desk import Desk
from shared.contracts.codec import decode, query_return_address
from shared.contracts.messages import (
    MAX_DETAIL,
    CancelQuery,
    QueryReplyTo,
    QueryRequest,
    QueryResult,
)
from shared.contracts.topics import QUERIES
from shared.errors import BrokerUnavailable, ContractError, TooLarge, UnknownTopic
from shared.ports import Committed, Record, TopicPartition
from shared.runtime.metrics import Metrics
from shared.runtime.offsets import OffsetTracker
from shared.runtime.publishing import DeadLetters, Publisher
from shared.runtime.tracing import traceparent_of
from shared.sdk import Producer

OpenProducer = Callable[[TopicPartition], AbstractAsyncContextManager[Producer]]
RETRY_S = 0.5
RECOMMIT_S = 3_600.0
log = structlog.get_logger(__name__)


class Lane:
    """Works on the questions of one partition while it is owned.

    Args:
        tp: The partition.
        tracker: What of it is done.
        known_end: Questions below it may have been begun before.
        desk: What all questions share.
        open_producer: Opens the producer of a partition.
        publisher: Publishes results.
        dead_letters: Takes what nobody can read.
        metrics: Counts.
        slots: Bounds the questions under way in the whole agent.
        tombstone: Returns the cancellation of a question, if there is one.
    """

    def __init__(
        self,
        *,
        tp: TopicPartition,
        tracker: OffsetTracker,
        known_end: int,
        desk: Desk,
        open_producer: OpenProducer,
        publisher: Publisher,
        dead_letters: DeadLetters,
        metrics: Metrics,
        slots: asyncio.Semaphore,
        tombstone: Callable[[str], CancelQuery | None],
    ) -> None:
        self.tp = tp
        self.tracker = tracker
        self._known_end = known_end
        self._desk = desk
        self._open_producer = open_producer
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._metrics = metrics
        self._slots = slots
        self._tombstone = tombstone
        self._inbox: asyncio.Queue[Record] = asyncio.Queue()
        self._taken: set[int] = set()
        self._floors: dict[int, int] = {}
        self._open: dict[str, Answering] = {}
        self._working: dict[int, asyncio.Task[None]] = {}
        self._telling: set[int] = set()
        self._is_left = False
        self._producer: Producer | None = None
        self._kept_floor = -1
        self._committed: Committed | None = None
        self._committed_at_s = 0.0

    @property
    def num_open(self) -> int:
        """Questions taken and not ended."""
        return len(self._taken)

    def put(self, record: Record) -> None:
        """Take a record; one that is done, or is here already, is passed over."""
        self.tracker.seen(record.offset)
        if not self.tracker.is_finished(record.offset) and record.offset not in self._taken:
            self._taken.add(record.offset)
            self._inbox.put_nowait(record)

    def cancel(self, query_id: str, reason: str) -> None:
        """Cancel a question that is under way here."""
        answering = self._open.get(query_id)
        if answering is not None:
            answering.cancel(reason)

    def leave(self) -> set[asyncio.Task[None]]:
        """Leave what is open to the next owner; nothing is begun any more.

        Returns:
            What is not open any more but has not ended: once these are done, all that was told is
            known to be done, and may be committed.
        """
        self._is_left = True
        for offset, task in self._working.items():
            if offset not in self._telling:
                task.cancel()
        return set(self._working.values())

    async def run(self) -> None:
        """Work until cancelled; what is open then is left for the next owner."""
        async with AsyncExitStack() as stack:
            producer = await self._opened(stack)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            self._producer = producer
            first_floor = producer.first_offset
            while True:
                record = await self._inbox.get()
                is_again = record.offset < self._known_end
                self._floors[record.offset] = first_floor if is_again else producer.next_offset
                await self._slots.acquire()
                task = group.create_task(
                    self._handle(record, producer, is_again=is_again),
                    name=f"question-{self.tp.partition}-{record.offset}",
                )
                self._working[record.offset] = task
                task.add_done_callback(partial(self._worked, record.offset))

    def _worked(self, offset: int, _: asyncio.Task[None]) -> None:
        del self._working[offset]
        self._telling.discard(offset)
        self._slots.release()

    async def _opened(self, stack: AsyncExitStack) -> Producer:
        """Return the lane's producer; keeps trying while the broker is away."""
        while True:
            try:
                return await stack.enter_async_context(self._open_producer(self.tp))
            except BrokerUnavailable as exc:
                log.warning("lane_waits", partition=self.tp.partition, error=str(exc))
            await asyncio.sleep(RETRY_S)

    def is_due(self, position: Committed, now_s: float) -> bool:
        """Return whether a position is to be committed: it, or the floor, is another than last.

        Args:
            position: Of `queries`.
            now_s: Monotonic seconds.
        """
        if now_s - self._committed_at_s >= RECOMMIT_S:
            return True
        return position != self._committed or self._floor(position) > self._kept_floor

    async def keep_floor(self, position: Committed, now_s: float) -> None:
        """Commit from where outcomes are still needed, once questions below a position are done.

        Raises:
            BrokerUnavailable: Not committed; safe to repeat.
        """
        floor = self._floor(position)
        if self._producer is not None and floor >= 0:
            await self._producer.keep_from(floor)
            self._kept_floor = floor
        self._committed, self._committed_at_s = position, now_s

    def _floor(self, position: Committed) -> int:
        """Return the lowest outcome that a question may need; -1: it is not known yet."""
        if self._producer is None:
            return -1
        if position.offset < self._known_end:  # begun before, perhaps, and not all back yet
            return max(self._kept_floor, self._producer.first_offset)
        needed = [
            floor
            for offset, floor in self._floors.items()
            if offset >= position.offset and not self.tracker.is_finished(offset)
        ]
        return min(needed, default=self._producer.next_offset)

    async def _handle(self, record: Record, producer: Producer, *, is_again: bool) -> None:
        if self._is_left:
            return
        self._metrics.messages.add(topic=QUERIES)
        try:
            request = decode(record.value or b"", QueryRequest)
        except ContractError as exc:
            self._telling.add(record.offset)
            await self._refuse(record, exc)
        else:
            await self._answer(request, record, producer, is_again=is_again)
        self.tracker.finish(record.offset)
        self._taken.discard(record.offset)
        del self._floors[record.offset]

    async def _answer(
        self, request: QueryRequest, record: Record, producer: Producer, *, is_again: bool
    ) -> None:
        arrival_s = self._desk.clock.mesh_s(record.append_unix_s)
        answering = Answering(request, arrival_s, self._desk, is_again=is_again)
        if request.query_id in self._open:
            self._metrics.duplicates.add(topic=QUERIES)
            return  # the same question again while it is under way: one result is enough
        self._open[request.query_id] = answering
        tombstone = self._tombstone(request.query_id)
        if tombstone is not None:
            answering.cancel(tombstone.reason)
        try:
            with self._publisher.traces.around(
                f"question {self._known(request.workflow)}",
                "consumer",
                traceparent_of(record),
                attributes={
                    "messaging.system": "kafka",
                    "messaging.operation.name": "process",
                    "messaging.destination.name": record.tp.topic,
                    "hexflow.query_id": request.query_id,
                },
            ) as span:
                result = await answering.answer(producer)
                answered = result.kind == "completed"
                span.end(error=None if answered else result.reason or result.kind)
        finally:
            del self._open[request.query_id]
        self._telling.add(record.offset)
        await self._publish(result, request.reply_to, record)
        producer.forget(request.query_id)
        log.info(
            "question_ended",
            query_id=result.query_id,
            kind=result.kind,
            reason=result.reason,
            took_s=round(result.finished_at_s - result.arrival_s, 3),
            num_calls=len(result.calls),
        )

    async def _publish(self, result: QueryResult, reply_to: QueryReplyTo, record: Record) -> None:
        try:
            try:
                await self._send(result, reply_to)
            except TooLarge as exc:
                result = msgspec.structs.replace(
                    result,
                    kind="failed",
                    reason=exc.reason,
                    detail="the answer is above the largest message size",
                    rows=(),
                    outputs={},
                    answer="",
                    attempts=(),
                )
                await self._send(result, reply_to)
        except UnknownTopic as exc:
            await self._dead_letters.bury(record, exc)
        self._metrics.queries_ended.add(kind=result.kind, workflow=self._known(result.workflow))

    async def _send(self, result: QueryResult, reply_to: QueryReplyTo) -> None:
        await self._publisher.until_taken(
            reply_to.topic, result, key=result.query_id, partition=reply_to.partition
        )

    async def _refuse(self, record: Record, error: ContractError) -> None:
        address = query_return_address(record.value or b"")
        if address is not None:
            query_id, reply_to = address
            result = QueryResult(
                query_id=query_id,
                kind="rejected",
                reason=error.reason,
                detail=error.detail[:MAX_DETAIL],
                agent_id=self._desk.params.agent_id,
            )
            try:
                await self._send(result, reply_to)
            except (UnknownTopic, TooLarge) as exc:
                log.warning("refusal_undeliverable", error=str(exc), query_id=query_id)
        await self._dead_letters.bury(record, error)

    def _known(self, workflow: str) -> str:
        """Return a workflow's name for a metric: names that anybody may send are not bounded."""
        return workflow if workflow in self._desk.workflows else "unknown"


async def try_keep(lane: Lane, position: Committed, now_s: float) -> None:
    """Commit a lane's floor; an outage of the broker only makes the next life read more."""
    try:
        await lane.keep_floor(position, now_s)
    except BrokerUnavailable as exc:
        log.warning("floor_not_kept", error=str(exc))
