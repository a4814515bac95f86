"""Questions on their way through the agents, as the gateway sees them.

A question outlives the connection that asked it: its tenant may look, come back, or cancel it. What
a replica knows is in memory, bounded; that a question exists, whose it is, and its result are also
in the state store for a while, so that any replica can tell.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import structlog

from services.gateway.chunk_reader import FIRST, ChunkReader
from services.gateway.params import GatewayParams
from services.gateway.problems import Problem, unavailable
from services.gateway.query_records import ASKED, ENDED, Known, QueryRecords
from shared.contracts.messages import QueryRequest, QueryResult
from shared.contracts.query_events import QueryEvent, decode_event, event_stream
from shared.errors import DeadlinePassed, StateUnavailable, TooLarge
from shared.ports import Clock
from shared.sdk import Asked, Questions

MAX_EVENTS = 1_000
TOMBSTONE_S = 600.0
log = structlog.get_logger(__name__)


class OpenQuery:
    """A question, what happened to it, and its result.

    Args:
        request: The question.
    """

    def __init__(self, request: QueryRequest) -> None:
        self.request = request
        self.position = FIRST
        self.arrival_s: float | None = None
        self.events: list[QueryEvent] = []
        self.result: QueryResult | None = None
        self._changed = asyncio.Event()

    def put(self, position: str, attempt: int, index: int, text: str) -> None:
        """Take an event that was read."""
        del attempt, index
        self.position = position
        event = decode_event(text)
        if event is not None and len(self.events) < MAX_EVENTS:
            self.events.append(event)
            self._wake()

    def end(self, result: QueryResult) -> None:
        """Note how it ended."""
        self.result = result
        self._wake()

    async def changes(self) -> AsyncGenerator[QueryEvent, None]:
        """Yield what happened so far and what happens until the result is there."""
        seen = 0
        while True:
            changed = self._changed
            while seen < len(self.events):
                seen += 1
                yield self.events[seen - 1]
            if self.result is not None:
                return
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class QueryDesk:
    """Asks agents, and remembers what was asked.

    Args:
        questions: Asks and resolves.
        chunks: Reads events.
        records: What all replicas share.
        clock: Mesh clock.
        params: Bounds.
    """

    def __init__(
        self,
        questions: Questions,
        chunks: ChunkReader,
        records: QueryRecords,
        clock: Clock,
        params: GatewayParams,
    ) -> None:
        self._questions = questions
        self._chunks = chunks
        self._records = records
        self._clock = clock
        self._params = params
        self._known: OrderedDict[str, OpenQuery] = OrderedDict()
        self._to_follow: asyncio.Queue[tuple[OpenQuery, Asked, AsyncExitStack]] = asyncio.Queue()
        self.num_open = 0
        """Questions whose result is not known yet, or not yet to the other replicas."""
        self.counts: Counter[str] = Counter()

    def find(self, query_id: str) -> OpenQuery | None:
        """Return a question that this replica knows."""
        return self._known.get(query_id)

    async def ask(self, request: QueryRequest, place: AsyncExitStack) -> OpenQuery:
        """Ask a question; one with a known id is not asked again.

        Args:
            request: The question.
            place: What is held until the question has ended; taken over unless this raises.

        Raises:
            Problem: The id belongs to another question, the question is too large, or the broker
                does not answer.
        """
        known = self._known.get(request.query_id)
        if known is not None:
            if _same(known.request, request):
                return known
            text = "another question was asked under this id or idempotency key"
            raise Problem(409, text, code="idempotency_conflict", param="query_id")
        query = self._known[request.query_id] = OpenQuery(request)
        self._forget_oldest()
        try:
            asked = await self._ask(request)
        except Problem:
            self._known.pop(request.query_id, None)
            raise
        query.arrival_s = asked.arrival_s
        self.counts["asked"] += 1
        partition = self._questions.reply_to.partition
        shared = Known(tenant=request.tenant, partition=partition)
        await self._share(request.query_id, ASKED, shared)
        self.num_open += 1
        self._to_follow.put_nowait((query, asked, place.pop_all()))
        return query

    async def cancel(self, query_id: str) -> None:
        """Cancel a question and its calls."""
        until_s = self._clock.now_s() + TOMBSTONE_S * self._clock.time_scale
        await self._questions.cancel(query_id, until_s=until_s, reason="cancelled over HTTP")
        self.counts["cancelled"] += 1

    async def look(self, query_id: str) -> Known | None:
        """Return what the replicas know together of a question; None: nothing.

        Raises:
            StateUnavailable: The state store does not answer.
        """
        return await self._records.look(query_id)

    async def run(self) -> None:
        """Follow every question to its end; runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                query, asked, place = await self._to_follow.get()
                name = f"query-{query.request.query_id}"
                group.create_task(self._follow(query, asked, place), name=name)

    async def _ask(self, request: QueryRequest) -> Asked:
        try:
            async with asyncio.timeout(self._params.submit_timeout_s):
                return await self._questions.ask(request)
        except TooLarge as exc:
            raise Problem(413, str(exc), code=exc.reason) from exc
        except TimeoutError as exc:
            raise unavailable("the broker") from exc

    async def _follow(self, query: OpenQuery, asked: Asked, place: AsyncExitStack) -> None:
        request = query.request
        try:
            async with place:
                with self._chunks.feeding(event_stream(request.query_id), query):
                    result = await self._result(request, asked)
            self.counts[result.kind] += 1
            query.end(result)
            known = Known(tenant=request.tenant, result=result_view(result))
            await self._share(request.query_id, ENDED, known)
        finally:
            self.num_open -= 1

    async def _result(self, request: QueryRequest, asked: Asked) -> QueryResult:
        wall_s = self._params.longest_wait_s
        if request.slo_s is not None:
            wall_s = (request.slo_s + self._params.late_s) / self._clock.time_scale
        try:
            async with asyncio.timeout(wall_s):
                return await asked.result()
        except TimeoutError:
            await self.cancel(request.query_id)
        return QueryResult(
            query_id=request.query_id,
            workflow=request.workflow,
            kind="evicted",
            reason=DeadlinePassed.reason,
            detail="no agent answered in time",
            tenant=request.tenant,
            arrival_s=asked.arrival_s,
            finished_at_s=self._clock.now_s(),
            slo_s=request.slo_s or 0.0,
        )

    async def _share(self, query_id: str, place: int, known: Known) -> None:
        try:
            await self._records.put(query_id, place, known)
        except StateUnavailable as exc:
            log.warning("query_not_shared", query_id=query_id, error=str(exc))

    def _forget_oldest(self) -> None:
        while len(self._known) > self._params.max_queries:
            self._known.popitem(last=False)


def result_view(result: QueryResult) -> dict[str, Any]:
    """Return a result as JSON for the client."""
    found: dict[str, Any] = msgspec.to_builtins(result)
    for name in ("type", "version"):
        found.pop(name, None)
    return found


def _same(first: QueryRequest, second: QueryRequest) -> bool:
    """Return whether two requests ask the same."""
    return msgspec.structs.replace(first, reply_to=second.reply_to) == second
