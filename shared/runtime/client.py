"""A producer's side of the mesh: submit calls, await their outcomes, cancel queries.

One client reads one reply partition. The outcome of a call is the first record with its
request_id in that partition; later ones are counted as duplicates and dropped.
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
from shared.ports import Ack, Broker, Clock, Consumer, TopicPartition
from shared.runtime.publishing import Publisher

log = structlog.get_logger(__name__)


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A call on its way.

    Attributes:
        ready_at_s: When the broker took it, mesh clock: also the query's arrival if it is the
            query's first call.
        outcome: Resolves to the call's outcome.
    """

    ready_at_s: float
    outcome: "asyncio.Future[CallOutcome]"


class MeshClient:
    """Submits calls and resolves them from the reply partition; open with `open_client`.

    Args:
        consumer: Reads the reply partition.
        publisher: Publishes requests and cancellations.
        clock: Converts append times.
        reply_to: The reply partition.
    """

    def __init__(
        self, consumer: Consumer, publisher: Publisher, clock: Clock, reply_to: ReplyTo
    ) -> None:
        self._consumer = consumer
        self._publisher = publisher
        self._clock = clock
        self._pending: dict[str, asyncio.Future[CallOutcome]] = {}
        self._done: dict[str, None] = {}
        self.reply_to = reply_to
        self.counts: Counter[str] = Counter()

    async def submit(self, request: StageRequest) -> Submitted:
        """Publish a call with this client's reply partition; returns once it is acknowledged.

        Raises:
            TooLarge: The message is above the largest size; nothing was submitted.
        """
        request = msgspec.structs.replace(request, reply_to=self.reply_to)
        future = self._pending.get(request.request_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._pending[request.request_id] = future
        ack: Ack | None = None
        try:
            ack = await self._publisher.until_taken(
                STAGE_REQUESTS, request, key=request.effective_query_id
            )
        finally:
            if ack is None:
                self._pending.pop(request.request_id, None)
        self.counts["submitted"] += 1
        return Submitted(ready_at_s=self._clock.mesh_s(ack.append_unix_s), outcome=future)

    async def call(self, request: StageRequest) -> CallOutcome:
        """Submit a call and wait for its outcome."""
        return await (await self.submit(request)).outcome

    async def cancel(self, query_id: str, *, until_s: float, reason: str = "") -> None:
        """Cancel every call of a query, now and until `until_s` (mesh clock)."""
        tombstone = CancelQuery(query_id=query_id, until_s=until_s, reason=reason)
        await self._publisher.until_taken(CANCELLATIONS, tombstone, key=query_id)

    async def receive(self, stop: asyncio.Event) -> None:
        """Read outcomes until `stop` is set; run this in the caller's TaskGroup."""
        while not stop.is_set():
            try:
                records = await self._consumer.fetch(timeout_s=0.2)
            except BrokerUnavailable:
                await asyncio.sleep(0.2)
                continue
            for record in records:
                self._take(record.value)

    def _take(self, value: bytes | None) -> None:
        try:
            outcome = decode(value or b"", CallOutcome)
        except ContractError as exc:
            self.counts["undecodable"] += 1
            log.warning("outcome_undecodable", detail=exc.detail)
            return
        future = self._pending.pop(outcome.request_id, None)
        if future is not None and not future.done():
            self._remember(outcome.request_id)
            self.counts[outcome.kind] += 1
            future.set_result(outcome)
        elif outcome.request_id in self._done:
            self.counts["duplicates"] += 1
        else:
            self.counts["foreign"] += 1

    def _remember(self, request_id: str) -> None:
        self._done[request_id] = None
        if len(self._done) > 200_000:
            del self._done[next(iter(self._done))]


@asynccontextmanager
async def open_client(
    broker: Broker, topics: Topics, clock: Clock, *, partition: int
) -> AsyncIterator[MeshClient]:
    """Open a client on one partition of `stage-results`, reading from its present end.

    Args:
        broker: The broker.
        topics: Names.
        clock: Mesh clock.
        partition: Reply partition; each concurrent client uses its own.
    """
    name = topics.name(STAGE_RESULTS)
    tp = TopicPartition(name, partition)
    async with broker.partition_consumer([tp], start="end") as consumer:
        await consumer.position(tp)  # fixes the start before anything is submitted
        reply_to = ReplyTo(topic=STAGE_RESULTS, partition=partition)
        yield MeshClient(consumer, Publisher(broker, topics, clock), clock, reply_to)
