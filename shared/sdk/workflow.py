"""One query as its producer drives it: stages, siblings, deadline, cancellation, streaming.

Invariants: all calls of a query name the same arrival and SLO; the id of a call depends on
(query_id, stage, iteration, sibling) alone, so a restarted producer that takes the same steps
mints the same ids; a block that is left with an error leaves no call running, unless told to.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog

from shared.contracts.codec import mint_request_id
from shared.contracts.messages import CallOutcome, Needs, StageRequest
from shared.domain.trace import PrefixPart
from shared.errors import ConfigError, GenerationFailed, StreamBroken, TooLarge
from shared.sdk.producer import Producer, Submitted

CANCEL_WITHIN_S = 5.0
GRACE_S = 60.0
QUIET_S = 0.1
log = structlog.get_logger(__name__)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What one LLM call asks for; see `StageRequest` for each field."""

    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    sampling: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    needs: Needs = Needs()
    stream: bool = False
    prefix: tuple[PrefixPart, ...] = ()
    input_tokens_estimate: int | None = None
    model: str = ""


class Emitted:
    """A call that was emitted: its outcome, and its text while it comes.

    Args:
        request: The call as it was sent.
        submitted: Its place on the mesh.
        workflow: Whose it is.
    """

    def __init__(self, request: StageRequest, submitted: Submitted, workflow: "Workflow") -> None:
        self.request = request
        self.ready_at_s = submitted.ready_at_s
        self.is_resumed = submitted.is_resumed
        self._future = submitted.outcome
        self._workflow = workflow

    async def outcome(self) -> CallOutcome:
        """Return how the call ended, whatever its kind."""
        outcome = await asyncio.shield(self._future)
        self._workflow.ended(self.request, outcome)
        return outcome

    async def text(self) -> AsyncIterator[str]:
        """Yield the generated text in pieces as it comes, the rest with the outcome.

        The pieces together are the outcome's text. Pieces of two attempts are never mixed.

        Raises:
            ConfigError: The producer has no state store, or the call does not stream.
            StreamBroken: What came later does not continue what was yielded.
            GenerationFailed: The call did not complete; says how it ended.
        """
        store = self._workflow.producer.store
        if store is None or not self.request.stream:
            raise ConfigError("to stream, open the producer with a store and emit stream=True")
        pieces = _Pieces()
        while not self._future.done() and not pieces.is_cut:
            async for found in store.chunks(
                self.request.request_id, after=pieces.after, timeout_s=QUIET_S
            ):
                piece = pieces.take(*found)
                if piece:
                    yield piece
                if pieces.is_cut:
                    break
        outcome = await self.outcome()
        if outcome.kind != "completed":
            told = f"{outcome.reason}: {outcome.detail}" if outcome.detail else outcome.reason
            raise GenerationFailed(f"the call ended {outcome.kind}: {told}")
        rest = pieces.rest(outcome.text or "")
        if rest:
            yield rest


class _Pieces:
    """What of a call's text was yielded, in order and without a gap."""

    def __init__(self) -> None:
        self.after = "0-0"
        self.is_cut = False
        self._text = ""
        self._attempt: int | None = None
        self._next_index = 0

    def take(self, position: str, attempt: int, index: int, text: str) -> str:
        """Return the piece to yield; after a gap none follows, the outcome has the whole text."""
        self.after = position
        if self._attempt is None:
            self._attempt = attempt
        if attempt != self._attempt:
            raise StreamBroken("another attempt began after text had been forwarded")
        if index != self._next_index:
            self.is_cut = True
            return ""
        self._next_index += 1
        self._text += text
        return text

    def rest(self, whole: str) -> str:
        if not whole.startswith(self._text):
            raise StreamBroken("the outcome's text does not continue what was forwarded")
        return whole[len(self._text) :]


class Workflow:
    """One query of a workflow; use it as a context.

    Args:
        producer: How calls travel.
        name: Workflow name; equal names share what the mesh learns.
        query_id: Unique; the same after a restart, if calls are to be resumed.
        slo_s: Deadline of the whole query relative to its arrival, mesh seconds; None: the
            mesh's default.
        arrival_s: When the query arrived, mesh clock; None: when the broker takes its first call.
        tenant: Who asks.
        model: Model of calls that name none.
        leaves_calls: Whether calls may go on when the block ends with an error or is cancelled
            (their producer will be back for them); False: they are cancelled on the mesh.
    """

    def __init__(
        self,
        producer: Producer,
        name: str,
        *,
        query_id: str,
        slo_s: float | None = None,
        arrival_s: float | None = None,
        tenant: str = "default",
        model: str = "default",
        leaves_calls: bool = False,
    ) -> None:
        self.producer = producer
        self.name = name
        self.query_id = query_id
        self.slo_s = slo_s
        self.arrival_s = arrival_s
        self.outcomes: dict[str, CallOutcome] = {}
        self.requests: dict[str, StageRequest] = {}
        self.leaves_calls = leaves_calls
        self._tenant = tenant
        self._model = model
        self._occurrences: Counter[str] = Counter()
        self._last: tuple[str, ...] = ()
        self._ended_at_s: dict[str, float] = {}
        self._first = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or self.leaves_calls or not self.num_open:
            return
        try:
            async with asyncio.timeout(CANCEL_WITHIN_S):
                await self.cancel("its producer gave up")
        except TimeoutError:
            log.warning("cancellation_not_taken", query_id=self.query_id)

    @property
    def num_open(self) -> int:
        """Calls emitted whose outcome has not been taken."""
        return len(self.requests) - len(self.outcomes)

    @property
    def deadline_s(self) -> float | None:
        """When the query's SLO ends, mesh clock; None while it has no arrival or no SLO."""
        if self.arrival_s is None or self.slo_s is None:
            return None
        return self.arrival_s + self.slo_s

    async def emit(
        self,
        stage: str,
        call: Call,
        *,
        iteration: int | None = None,
        sibling: int = 0,
        siblings: int = 1,
        after: Sequence[str] | None = None,
    ) -> Emitted:
        """Send one call; returns when the broker has it, or at once when it has ended already.

        Args:
            stage: Stage name.
            call: What to ask.
            iteration: Occurrence of the stage; None: counted here. Name it where stages run in
                parallel, so that a restart counts the same.
            sibling: Index among the stage's parallel calls.
            siblings: How many there are.
            after: Request ids it waited for; None: those of the last stage that was awaited.
        """
        if iteration is None:
            iteration = self._occurrences[stage]
            self._occurrences[stage] += 1
        parents = tuple(after) if after is not None else self._last
        request = self._request(stage, iteration, call, parents)
        request = msgspec.structs.replace(
            request,
            request_id=mint_request_id(self.query_id, stage, iteration, sibling),
            sibling=sibling,
            siblings=siblings,
        )
        if self.arrival_s is not None:
            return await self._submit(request)
        async with self._first:  # the first acknowledgement fixes the arrival for all
            request = msgspec.structs.replace(request, arrival_s=self.arrival_s)
            emitted = await self._submit(request)
            if self.arrival_s is None:
                self.arrival_s = emitted.ready_at_s
            return emitted

    async def stage(
        self,
        stage: str,
        calls: Sequence[Call],
        *,
        iteration: int | None = None,
        after: Sequence[str] | None = None,
    ) -> list[CallOutcome]:
        """Send a stage's calls in parallel and return their outcomes, in order.

        Args:
            stage: Stage name.
            calls: What to ask; at least one.
            iteration: As in `emit`.
            after: As in `emit`.
        """
        if iteration is None:
            iteration = self._occurrences[stage]
            self._occurrences[stage] += 1
        parents = tuple(after) if after is not None else self._last
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._run(stage, call, iteration, sibling, len(calls), parents),
                    name=f"call-{self.query_id}-{stage}-{iteration}-{sibling}",
                )
                for sibling, call in enumerate(calls)
            ]
        outcomes = [task.result() for task in tasks]
        self._last = tuple(outcome.request_id for outcome in outcomes)
        return outcomes

    async def call(self, stage: str, call: Call, **where: Any) -> CallOutcome:
        """Send one call and return its outcome; `where` as in `stage`."""
        (outcome,) = await self.stage(stage, [call], **where)
        return outcome

    async def cancel(self, reason: str = "") -> None:
        """Cancel every call of the query on the mesh, those to come included."""
        deadline_s = self.deadline_s
        until_s = (deadline_s if deadline_s is not None else self.producer.clock.now_s()) + GRACE_S
        await self.producer.cancel(self.query_id, until_s=until_s, reason=reason)

    def ended(self, request: StageRequest, outcome: CallOutcome) -> None:
        """Note a call's outcome (called by `Emitted`)."""
        if request.request_id in self.outcomes:
            return
        self.outcomes[request.request_id] = outcome
        self._ended_at_s[request.request_id] = self.producer.clock.now_s()
        if self.slo_s is None and outcome.deadline_s is not None and self.arrival_s is not None:
            self.slo_s = max(1e-3, outcome.deadline_s - self.arrival_s)  # the mesh chose it

    async def _run(
        self,
        stage: str,
        call: Call,
        iteration: int,
        sibling: int,
        siblings: int,
        parents: tuple[str, ...],
    ) -> CallOutcome:
        emitted = await self.emit(
            stage, call, iteration=iteration, sibling=sibling, siblings=siblings, after=parents
        )
        return await emitted.outcome()

    async def _submit(self, request: StageRequest) -> Emitted:
        self.requests[request.request_id] = request
        try:
            submitted = await self.producer.submit(request)
        except TooLarge as exc:
            refused = CallOutcome(
                request_id=request.request_id,
                query_id=self.query_id,
                kind="rejected",
                reason=exc.reason,
                detail=str(exc)[:500],
            )
            future: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
            future.set_result(refused)
            submitted = Submitted(ready_at_s=None, outcome=future)
        return Emitted(request, submitted, self)

    def _request(
        self, stage: str, iteration: int, call: Call, parents: tuple[str, ...]
    ) -> StageRequest:
        return StageRequest(
            request_id="unset",
            query_id=self.query_id,
            workflow=self.name,
            stage=stage,
            iteration=iteration,
            parents=parents,
            tenant=self._tenant,
            model=call.model or self._model,
            needs=call.needs,
            messages=call.messages,
            prompt=call.prompt,
            max_tokens=call.max_tokens,
            sampling=call.sampling,
            extra=call.extra,
            stream=call.stream,
            input_tokens_estimate=call.input_tokens_estimate,
            prefix=call.prefix,
            arrival_s=self.arrival_s,
            slo_s=self.slo_s,
            think_s=self._think_s(parents),
            reply_to=self.producer.reply_to,
        )

    def _think_s(self, parents: Sequence[str]) -> float:
        """Return how long the producer has worked since the last parent's outcome, seconds."""
        ended = [self._ended_at_s[one] for one in parents if one in self._ended_at_s]
        return max(0.0, self.producer.clock.now_s() - max(ended)) if ended else 0.0
