"""A producer's connection to the mesh: submits calls and resolves them from one reply partition.

The outcome of a call is the first record with its request_id in the reply partition; later ones
are dropped. Several producers may share a partition: outcomes of others are passed over.

Resuming. With `resume_as`, outcomes that nobody here waits for are kept, and reading begins at the
position that this name last committed (`keep_from`). A call that is submitted again after a crash,
with the same request_id, then gets the outcome that is there already and is not sent.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog

from shared.contracts.codec import decode
from shared.contracts.messages import CallOutcome, CancelQuery, ReplyTo, StageRequest
from shared.contracts.topics import CANCELLATIONS, STAGE_REQUESTS, STAGE_RESULTS, Topics
from shared.errors import BrokerUnavailable, ContractError
from shared.ports import Ack, Broker, Clock, Committed, Consumer, Record, StateStore, TopicPartition
from shared.runtime.publishing import Publisher

MAX_REMEMBERED = 200_000
MAX_KEPT = 20_000
MAX_KEPT_BYTES = 64 * 1024 * 1024
log = structlog.get_logger(__name__)


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A call on its way.

    Attributes:
        ready_at_s: When the broker took it, mesh clock; None where only its outcome is known and
            that does not say.
        outcome: Resolves to the call's outcome.
        is_resumed: Whether the outcome was there already and nothing was sent.
    """

    ready_at_s: float | None
    outcome: "asyncio.Future[CallOutcome]"
    is_resumed: bool = False


class Producer:
    """Submits calls of any number of workflows; open with `open_producer`.

    Args:
        consumer: Reads the reply partition.
        publisher: Publishes requests and cancellations.
        clock: Mesh clock.
        tp: The reply partition.
        store: Where streamed tokens are read; None: nothing can be streamed.
        keeps: Whether outcomes that nobody waits for are kept.
    """

    def __init__(
        self,
        *,
        consumer: Consumer,
        publisher: Publisher,
        clock: Clock,
        tp: TopicPartition,
        store: StateStore | None,
        keeps: bool,
    ) -> None:
        self._consumer = consumer
        self._publisher = publisher
        self._tp = tp
        self._keeps = keeps
        self._pending: dict[str, asyncio.Future[CallOutcome]] = {}
        self._ended: dict[str, None] = {}
        self._kept: dict[str, tuple[CallOutcome, int]] = {}
        self._kept_bytes = 0
        self._next_offset = 0
        self.first_offset = 0
        """Offset of the first outcome that was read."""
        self.clock = clock
        self.store = store
        self.reply_to = ReplyTo(topic=STAGE_RESULTS, partition=tp.partition)
        self.counts: Counter[str] = Counter()

    @property
    def next_offset(self) -> int:
        """Offset of the next outcome to read: calls submitted from now on end at or above it."""
        return self._next_offset

    async def submit(self, request: StageRequest, *, traceparent: str | None = None) -> Submitted:
        """Publish a call with this producer's reply partition; returns once it is acknowledged.

        Args:
            request: The call.
            traceparent: W3C trace context that it belongs to.

        Raises:
            TooLarge: The message is above the largest size; nothing was submitted.
        """
        kept = self._drop(request.request_id)
        if kept is not None:
            return self._resumed(kept)
        request = msgspec.structs.replace(request, reply_to=self.reply_to)
        future = self._pending.get(request.request_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._pending[request.request_id] = future
        ack: Ack | None = None
        try:
            ack = await self._publisher.until_taken(
                STAGE_REQUESTS,
                request,
                key=request.effective_query_id,
                traceparent=traceparent,
            )
        finally:
            if ack is None:
                self._pending.pop(request.request_id, None)
        self.counts["submitted"] += 1
        return Submitted(ready_at_s=self.clock.mesh_s(ack.append_unix_s), outcome=future)

    async def cancel(self, cancelled_id: str, *, until_s: float, reason: str = "") -> None:
        """Cancel every call of a query, or one call, now and until `until_s` (mesh clock)."""
        tombstone = CancelQuery(query_id=cancelled_id, until_s=max(0.0, until_s), reason=reason)
        await self._publisher.until_taken(CANCELLATIONS, tombstone, key=cancelled_id)

    def abandon(self, request_id: str) -> None:
        """Wait no longer for a call's outcome; it is passed over if it comes."""
        self._pending.pop(request_id, None)

    async def keep_from(self, offset: int) -> None:
        """Commit from where the next life has to read outcomes; only with `resume_as`.

        Raises:
            BrokerUnavailable: Not committed; safe to repeat.
        """
        await self._consumer.commit({self._tp: Committed(offset=offset)})

    def forget(self, query_id: str) -> None:
        """Drop the kept outcomes of a query that has ended."""
        for request_id in [r for r, (kept, _) in self._kept.items() if kept.query_id == query_id]:
            self._drop(request_id)

    async def start(self) -> None:
        """Fix where reading begins, and read what is there already when outcomes are kept.

        A name that never committed has no former life: it begins at the end, and says so at once.
        """
        if self._keeps and await self._consumer.committed(self._tp) is None:
            end = (await self._consumer.end_offsets())[self._tp]
            self._consumer.seek(self._tp, end)
            await self.keep_from(end)
        self._next_offset = self.first_offset = await self._consumer.position(self._tp)
        if not self._keeps:
            return
        end = (await self._consumer.end_offsets())[self._tp]
        while await self._consumer.position(self._tp) < end:
            for record in await self._consumer.fetch(timeout_s=0.2):
                self._take(record)

    async def receive(self, stop: asyncio.Event) -> None:
        """Read outcomes until `stop` is set."""
        while not stop.is_set():
            try:
                records = await self._consumer.fetch(timeout_s=0.2)
            except BrokerUnavailable:
                await asyncio.sleep(0.2)
                continue
            for record in records:
                self._take(record)

    def _resumed(self, outcome: CallOutcome) -> Submitted:
        future: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        future.set_result(outcome)
        self.counts["resumed"] += 1
        self._remember(outcome.request_id)
        return Submitted(ready_at_s=outcome.times.ready_at_s, outcome=future, is_resumed=True)

    def _take(self, record: Record) -> None:
        self._next_offset = record.offset + 1
        try:
            outcome = decode(record.value or b"", CallOutcome)
        except ContractError as exc:
            self.counts["undecodable"] += 1
            log.warning("outcome_undecodable", detail=exc.detail)
            return
        future = self._pending.pop(outcome.request_id, None)
        if future is not None and not future.done():
            self._remember(outcome.request_id)
            self.counts[outcome.kind] += 1
            future.set_result(outcome)
        elif outcome.request_id in self._ended:
            self.counts["duplicates"] += 1
        elif self._keeps:
            self._keep(outcome, len(record.value or b""))
        else:
            self.counts["foreign"] += 1

    def _keep(self, outcome: CallOutcome, size_bytes: int) -> None:
        if outcome.request_id in self._kept:
            return  # the first one counts
        self._kept[outcome.request_id] = (outcome, size_bytes)
        self._kept_bytes += size_bytes
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, request_id: str) -> CallOutcome | None:
        outcome, size_bytes = self._kept.pop(request_id, (None, 0))
        self._kept_bytes -= size_bytes
        return outcome

    def _remember(self, request_id: str) -> None:
        self._ended[request_id] = None
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]


@asynccontextmanager
async def open_producer(
    broker: Broker,
    topics: Topics,
    clock: Clock,
    *,
    partition: int,
    store: StateStore | None = None,
    resume_as: str | None = None,
) -> AsyncIterator[Producer]:
    """Open a producer on one partition of `stage-results`, and read outcomes while it is open.

    Args:
        broker: The broker.
        topics: Names.
        clock: Mesh clock.
        partition: Reply partition; best one that no other producer uses at the same time.
        store: Where streamed tokens are read.
        resume_as: Name (a consumer group without prefix) under which a position is kept across
            restarts; None: read from the present end.

    Raises:
        UnknownTopic: The mesh's topics, or the partition, do not exist.
        BrokerUnavailable: The broker does not answer.
    """
    tp = TopicPartition(topics.name(STAGE_RESULTS), partition)
    done = asyncio.Event()
    async with broker.partition_consumer(
        [tp],
        start="end" if resume_as is None else "committed",
        group=None if resume_as is None else topics.group(resume_as),
    ) as consumer:
        producer = Producer(
            consumer=consumer,
            publisher=Publisher(broker, topics, clock),
            clock=clock,
            tp=tp,
            store=store,
            keeps=resume_as is not None,
        )
        await producer.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(producer.receive(done), name=f"outcomes-{partition}")
            try:
                yield producer
            finally:
                done.set()
