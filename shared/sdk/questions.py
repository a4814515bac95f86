"""Ask agents questions: `queries` out, `query-results` back, progress in between.

The result of a question is the first record with its query_id in the reply partition; later ones
are dropped.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog

from shared.contracts.codec import decode
from shared.contracts.messages import CancelQuery, QueryReplyTo, QueryRequest, QueryResult
from shared.contracts.query_events import QueryEvent, decode_event, event_stream
from shared.contracts.topics import CANCELLATIONS, QUERIES, QUERY_RESULTS, Topics
from shared.errors import BrokerUnavailable, ConfigError, ContractError
from shared.ports import Ack, Broker, Clock, Consumer, StateStore, TopicPartition
from shared.runtime.publishing import Publisher

QUIET_S = 0.1
MAX_REMEMBERED = 100_000
log = structlog.get_logger(__name__)


class Asked:
    """A question on its way.

    Args:
        request: The question.
        arrival_s: When the broker took it, mesh clock.
        result: Resolves to its result.
        store: Where its events are read; None: nowhere.
    """

    def __init__(
        self,
        request: QueryRequest,
        arrival_s: float,
        result: "asyncio.Future[QueryResult]",
        store: StateStore | None,
    ) -> None:
        self.request = request
        self.query_id = request.query_id
        self.arrival_s = arrival_s
        self._result = result
        self._store = store

    @property
    def is_done(self) -> bool:
        """Whether the result is there."""
        return self._result.done()

    async def result(self) -> QueryResult:
        """Return the question's result, whatever its kind."""
        return await asyncio.shield(self._result)

    async def events(self) -> AsyncIterator[QueryEvent]:
        """Yield what happens to the question until its result is there.

        Events are a courtesy: an outage of the state store may lose some. After an agent died,
        the one that took over begins again with `began`.

        Raises:
            ConfigError: There is no state store, or the question does not ask for events.
            StateUnavailable: The store does not answer; the result comes all the same.
        """
        if self._store is None or not self.request.events:
            raise ConfigError("for events, open the questions with a store and ask events=True")
        after, is_last = "0-0", False
        while not is_last:
            is_last = self.is_done  # one more look after the result, for what came before it
            async for found in self._store.chunks(
                event_stream(self.query_id), after=after, timeout_s=QUIET_S
            ):
                after = found[0]
                event = decode_event(found[3])
                if event is not None:
                    yield event


class Questions:
    """Asks questions and resolves their results; open with `open_questions`.

    Args:
        consumer: Reads the reply partition.
        publisher: Publishes questions and cancellations.
        clock: Mesh clock.
        reply_to: The reply partition.
        store: Where events are read.
    """

    def __init__(
        self,
        consumer: Consumer,
        publisher: Publisher,
        clock: Clock,
        reply_to: QueryReplyTo,
        store: StateStore | None,
    ) -> None:
        self._consumer = consumer
        self._publisher = publisher
        self._clock = clock
        self._store = store
        self._pending: dict[str, asyncio.Future[QueryResult]] = {}
        self._ended: dict[str, None] = {}
        self.reply_to = reply_to
        self.counts: Counter[str] = Counter()

    async def ask(self, request: QueryRequest) -> Asked:
        """Publish a question with this client's reply partition; returns once it is taken.

        Raises:
            TooLarge: The message is above the largest size; nothing was asked.
        """
        request = msgspec.structs.replace(request, reply_to=self.reply_to)
        future = self._pending.get(request.query_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._pending[request.query_id] = future
        ack: Ack | None = None
        try:
            ack = await self._publisher.until_taken(QUERIES, request, key=request.query_id)
        finally:
            if ack is None:
                self._pending.pop(request.query_id, None)
        self.counts["asked"] += 1
        return Asked(request, self._clock.mesh_s(ack.append_unix_s), future, self._store)

    async def cancel(self, query_id: str, *, until_s: float, reason: str = "") -> None:
        """Cancel a question and its calls, now and until `until_s` (mesh clock)."""
        tombstone = CancelQuery(query_id=query_id, until_s=max(0.0, until_s), reason=reason)
        await self._publisher.until_taken(CANCELLATIONS, tombstone, key=query_id)

    async def receive(self, stop: asyncio.Event) -> None:
        """Read results until `stop` is set."""
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
            result = decode(value or b"", QueryResult)
        except ContractError as exc:
            self.counts["undecodable"] += 1
            log.warning("result_undecodable", detail=exc.detail)
            return
        future = self._pending.pop(result.query_id, None)
        if future is not None and not future.done():
            self._ended[result.query_id] = None
            if len(self._ended) > MAX_REMEMBERED:
                del self._ended[next(iter(self._ended))]
            self.counts[result.kind] += 1
            future.set_result(result)
        elif result.query_id in self._ended:
            self.counts["duplicates"] += 1
        else:
            self.counts["foreign"] += 1


@asynccontextmanager
async def open_questions(
    broker: Broker,
    topics: Topics,
    clock: Clock,
    *,
    partition: int,
    store: StateStore | None = None,
) -> AsyncIterator[Questions]:
    """Open a client on one partition of `query-results`, and read results while it is open.

    Args:
        broker: The broker.
        topics: Names.
        clock: Mesh clock.
        partition: Reply partition; best one that no other client uses at the same time.
        store: Where events are read.

    Raises:
        UnknownTopic: The mesh's topics, or the partition, do not exist.
        BrokerUnavailable: The broker does not answer.
    """
    tp = TopicPartition(topics.name(QUERY_RESULTS), partition)
    done = asyncio.Event()
    async with broker.partition_consumer([tp], start="end") as consumer:
        await consumer.position(tp)  # fixes the start before anything is asked
        reply_to = QueryReplyTo(partition=partition)
        publisher = Publisher(broker, topics, clock)
        questions = Questions(consumer, publisher, clock, reply_to, store)
        async with asyncio.TaskGroup() as group:
            group.create_task(questions.receive(done), name=f"results-{partition}")
            try:
                yield questions
            finally:
                done.set()
