"""One call's way through the mesh, as the gateway sees it: submit, wait, stream, give up.

Invariant: every call that was submitted ends here in one of two ways: its outcome was read, or a
tombstone for it was published. `counts` says how many did which, so a leak shows as a difference.
A client that goes away cancels its call, unless another client waits for the same one.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import structlog

from services.gateway.chunk_reader import ChunkReader, Stream
from services.gateway.params import GatewayParams
from services.gateway.problems import Problem, deadline_problem, unavailable
from services.gateway.query_memory import QueryMemory
from shared.contracts.messages import CallOutcome, CallTimes, StageRequest
from shared.errors import TooLarge
from shared.ports import Clock
from shared.sdk import Producer, Submitted

TOMBSTONE_S = 600.0
LONGEST_NAP_S = 60.0
log = structlog.get_logger(__name__)


class OpenCall:
    """A call that was submitted and has a client.

    Args:
        request: The call.
        submitted: What the producer said.
        give_up_at_s: When its client is told that the deadline passed, mesh clock; None: unknown.
        began_s: When it was submitted, monotonic wall seconds.
    """

    def __init__(
        self,
        request: StageRequest,
        submitted: Submitted,
        give_up_at_s: float | None,
        began_s: float,
    ) -> None:
        self.request = request
        self.arrival_s = submitted.ready_at_s
        self.give_up_at_s = give_up_at_s
        self.future = submitted.outcome
        self.began_s = began_s

    @property
    def outcome(self) -> CallOutcome | None:
        """How it ended, when that is known."""
        return self.future.result() if self.future.done() else None


class CallDesk:
    """Takes calls from HTTP handlers to the mesh and back.

    Args:
        producer: Submits and resolves.
        chunks: Reads streamed tokens.
        clock: Mesh clock.
        params: Bounds.
        memory: Where a query's calls are remembered.
        on_unbound: Told of calls that ended before an instance had them; nobody else tells.
    """

    def __init__(
        self,
        producer: Producer,
        chunks: ChunkReader,
        clock: Clock,
        params: GatewayParams,
        memory: QueryMemory,
        on_unbound: Callable[[StageRequest, CallOutcome], None] = lambda _request, _outcome: None,
    ) -> None:
        self._on_unbound = on_unbound
        self._producer = producer
        self._chunks = chunks
        self._clock = clock
        self._params = params
        self._memory = memory
        self._clients: Counter[str] = Counter()
        self._to_cancel: asyncio.Queue[str] = asyncio.Queue()
        self.counts: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Calls that have a client."""
        return self._clients.total()

    @property
    def num_reading(self) -> int:
        """Calls whose chunks are read."""
        return len(self._chunks)

    @asynccontextmanager
    async def call(self, request: StageRequest, late_s: float) -> AsyncIterator[OpenCall]:
        """Submit a call; when the block ends before its outcome, it is cancelled on the mesh.

        Args:
            request: What to run.
            late_s: How long after the deadline an answer is still wanted, mesh seconds.

        Raises:
            Problem: The call is too large, or the broker does not answer.
        """
        request_id = request.request_id
        self._clients[request_id] += 1
        call: OpenCall | None = None
        try:
            call = await self._submit(request, late_s)
            yield call
        finally:
            self._clients[request_id] -= 1
            if not self._clients[request_id]:
                del self._clients[request_id]
                self._leave(request, call)

    async def outcome(self, call: OpenCall) -> CallOutcome:
        """Return how a call ended.

        Raises:
            Problem: Its deadline, and the time after it, passed (504).
        """
        while not call.future.done():
            await self._wait(call)
        return call.future.result()

    async def texts(self, call: OpenCall, stream: Stream) -> AsyncGenerator[str, None]:
        """Yield a call's text as it is generated, then end; its outcome is known then.

        The texts together are the outcome's text, or a Problem says why not.

        Raises:
            Problem: The deadline passed, or another attempt took over after text was forwarded.
        """
        sent: list[str] = []
        while not call.future.done():
            await self._wait(call, stream.ready())
            if stream.has_second_attempt:
                raise spliced(call.outcome)
            text = stream.take()
            if text:
                sent.append(text)
                yield text
        outcome = call.future.result()
        if outcome.kind != "completed":
            return
        rest = rest_of_text(outcome, "".join(sent), stream)
        if rest:
            yield rest

    def reading(self, request: StageRequest) -> AbstractContextManager[Stream]:
        """Return a context that reads a call's chunks; enter it before the call is submitted."""
        return self._chunks.reading(request.request_id)

    async def run(self) -> None:
        """Publish tombstones of abandoned calls; runs until cancelled."""
        while True:
            request_id = await self._to_cancel.get()
            until_s = self._clock.now_s() + TOMBSTONE_S * self._clock.time_scale
            await self._producer.cancel(request_id, until_s=until_s, reason="its client left")
            self.counts["cancels_sent"] += 1
            self._to_cancel.task_done()
            asyncio.get_running_loop().call_later(TOMBSTONE_S, self._producer.abandon, request_id)

    async def cancels_sent(self) -> None:
        """Return when every tombstone so far is published."""
        await self._to_cancel.join()

    async def _submit(self, request: StageRequest, late_s: float) -> OpenCall:
        try:
            async with asyncio.timeout(self._params.submit_timeout_s):
                submitted = await self._producer.submit(request)
        except TooLarge as exc:
            raise Problem(413, str(exc), code=exc.reason) from exc
        except TimeoutError as exc:
            raise unavailable("the broker") from exc
        except (OverflowError, ValueError, TypeError) as exc:  # a number of 30 digits, say
            text = f"a value in the request cannot be sent: {exc}"
            raise Problem(400, text, code="invalid_value") from exc
        self.counts["submitted"] += 1
        arrival_s = request.arrival_s if request.arrival_s is not None else submitted.ready_at_s
        if arrival_s is not None:
            self._memory.arrived(request.query_id, arrival_s)
        give_up_at_s = None
        if request.slo_s is not None and arrival_s is not None:
            give_up_at_s = arrival_s + request.slo_s + late_s
        return OpenCall(request, submitted, give_up_at_s, self._clock.monotonic_s())

    def _leave(self, request: StageRequest, call: OpenCall | None) -> None:
        """Note that nobody waits for a call any more."""
        outcome = call.outcome if call is not None else None
        if request.query_id:
            self._memory.end(
                request.query_id,
                request.stage,
                request_id=request.request_id,
                parents=request.parents,
                at_s=self._clock.now_s(),
            )
        if outcome is not None:
            self.counts["ended"] += 1
            if not outcome.instance_id:
                self._on_unbound(request, outcome)
        elif call is not None:
            self.counts["abandoned"] += 1
            call.future.add_done_callback(self._abandoned_ended)
            self._to_cancel.put_nowait(request.request_id)

    def _abandoned_ended(self, _: "asyncio.Future[CallOutcome]") -> None:
        self.counts["abandoned_ended"] += 1

    async def _wait(self, call: OpenCall, *others: "asyncio.Future[None]") -> None:
        """Return when the outcome, or one of the others, is there, or after a while.

        Raises:
            Problem: Nothing came, and it is too late for it.
        """
        if call.give_up_at_s is None:
            left_s = call.began_s + self._params.longest_wait_s - self._clock.monotonic_s()
        else:
            left_s = (call.give_up_at_s - self._clock.now_s()) / self._clock.time_scale
        waited: list[asyncio.Future[Any]] = [call.future, *others]
        done, _ = await asyncio.wait(
            waited,
            timeout=min(max(0.0, left_s), LONGEST_NAP_S),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done and left_s <= 0:
            raise self._too_late(call)

    def _too_late(self, call: OpenCall) -> Problem:
        request, now_s = call.request, self._clock.now_s()
        deadline_s = None
        detail = "no answer within the gateway's bound"
        if call.give_up_at_s is not None and request.slo_s is not None:
            arrival_s = request.arrival_s if request.arrival_s is not None else call.arrival_s or 0
            deadline_s = arrival_s + request.slo_s
            detail = f"no answer {max(0.0, now_s - deadline_s):.1f} s after it"
        outcome = CallOutcome(
            request_id=request.request_id,
            query_id=request.effective_query_id,
            kind="evicted",
            reason="deadline_passed",
            detail=detail,
            deadline_s=deadline_s,
            times=CallTimes(ready_at_s=call.arrival_s, finished_at_s=now_s),
        )
        return deadline_problem(detail, outcome)


def rest_of_text(outcome: CallOutcome, sent: str, stream: Stream) -> str:
    """Return what is missing of a completed call's text.

    Raises:
        Problem: What was sent is of another attempt, or is no beginning of the text.
    """
    text = outcome.text or ""
    if sent and (stream.attempt != outcome.attempt or not text.startswith(sent)):
        raise spliced(outcome)
    return text[len(sent) :]


def spliced(outcome: CallOutcome | None) -> Problem:
    """Return the error of a stream whose call began anew after text had been forwarded."""
    return Problem(
        502,
        "the call was run again after part of its text had been sent; send it again",
        code="stream_broken",
        kind="server_error",
        outcome=outcome,
    )
