"""One question from its message to its result, whatever happens on the way."""

import asyncio
from typing import Any

import msgspec
import structlog

from services.text2sql.chess.state import Work
from services.text2sql.chess.steps import text2sql_steps
from services.text2sql.desk import Desk
from services.text2sql.flow.definition import WorkflowDef
from services.text2sql.flow.progress import Progress
from services.text2sql.flow.prompting import PromptStep
from services.text2sql.flow.runner import Runner
from services.text2sql.flow.step import Context, Ended, Step
from services.text2sql.sql.database import Database
from shared.contracts.messages import (
    MAX_DETAIL,
    QueryCall,
    QueryKind,
    QueryRequest,
    QueryResult,
)
from shared.domain.near_names import did_you_mean
from shared.errors import DeadlinePassed, MeshError
from shared.sdk import Producer, Workflow

MIN_MARGIN_S = 0.05
CANCEL_WITHIN_S = 5.0
log = structlog.get_logger(__name__)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a question ends, where it does not end with an answer."""

    kind: QueryKind
    reason: str
    detail: str


class Answering:
    """Drives one question.

    Args:
        request: The question.
        arrival_s: When it arrived, mesh clock.
        desk: What all questions share.
        is_again: Whether another agent may have begun with it.
    """

    def __init__(
        self, request: QueryRequest, arrival_s: float, desk: Desk, *, is_again: bool = False
    ) -> None:
        self.request = request
        self._arrival_s = arrival_s
        self._desk = desk
        self._is_again = is_again
        self._scope: asyncio.Timeout | None = None
        self._cancelled: str | None = None
        self._work: Work | None = None

    def cancel(self, reason: str) -> None:
        """End the question soon, as cancelled."""
        if self._cancelled is None:
            self._cancelled = reason or "cancelled"
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def answer(self, producer: Producer) -> QueryResult:
        """Return the question's result; only the agent's own end interrupts this.

        Args:
            producer: How calls travel.
        """
        desk, started_s = self._desk, self._desk.clock.now_s()
        definition = desk.workflows.get(self.request.workflow)
        slo_s = self.request.slo_s or (definition.slo_s if definition else 0.0)
        base = QueryResult(
            query_id=self.request.query_id,
            workflow=self.request.workflow,
            kind="failed",
            tenant=self.request.tenant,
            model=self.request.model or desk.params.model,
            database=self.request.database,
            arrival_s=self._arrival_s,
            started_at_s=started_s,
            slo_s=slo_s,
            agent_id=desk.params.agent_id,
        )
        if definition is None:
            known, word = ", ".join(sorted(desk.workflows)), self.request.workflow
            hint = did_you_mean(word, desk.workflows)
            detail = f"there is no workflow {word!r}{hint} (there are: {known})"
            return self._closed(base, _no("rejected", "unknown_workflow", detail))
        context = Context(
            request=self.request,
            clock=desk.clock,
            deadline_s=self._arrival_s + slo_s * (1 - desk.params.margin) - MIN_MARGIN_S,
            progress=Progress(
                desk.store if self.request.events else None, desk.clock, self.request.query_id
            ),
            outputs={
                **definition.inputs,
                "question": self.request.question,
                "hint": self.request.hint,
                **self.request.inputs,
            },
        )
        flow = Workflow(
            producer,
            definition.name,
            query_id=self.request.query_id,
            slo_s=slo_s,
            arrival_s=self._arrival_s,
            tenant=self.request.tenant,
            model=base.model,
            leaves_calls=True,  # this process may end and be back; see `_release`
        )
        verdict = await self._run(definition, context, flow)
        return self._result(base, verdict, definition, context, flow)

    async def _run(
        self, definition: WorkflowDef, context: Context, flow: Workflow
    ) -> Verdict | None:
        """Run the workflow within its time; None: it came to its end."""
        verdict: Verdict | None = None
        try:
            async with asyncio.timeout(max(0.0, context.remaining_wall_s)) as self._scope, flow:
                if self._cancelled is not None:
                    self._scope.reschedule(0.0)
                await context.progress.begin(
                    f"agent {self._desk.params.agent_id}", is_again=self._is_again
                )
                steps = self._steps(definition, context)
                await Runner(definition, steps, flow, context, self._desk.costs).run()
        except TimeoutError:
            verdict = self._timed_out()
        except Ended as ended:
            verdict = Verdict(kind=ended.kind, reason=ended.word, detail=ended.detail)
        except MeshError as exc:
            verdict = Verdict(kind="failed", reason=exc.reason, detail=str(exc))
        except Exception as exc:  # a bug in one question must not end the others
            log.exception("question_raised", query_id=self.request.query_id)
            verdict = Verdict(kind="failed", reason="agent_error", detail=type(exc).__name__)
        self._scope = None  # a scope that is over cannot be ended again
        await self._release(flow)
        return verdict

    def _timed_out(self) -> Verdict:
        if self._cancelled is not None:
            return Verdict(kind="cancelled", reason="cancelled", detail=self._cancelled)
        detail = "the question's time was over before its workflow was"
        return Verdict(kind="evicted", reason=DeadlinePassed.reason, detail=detail)

    async def _release(self, flow: Workflow) -> None:
        """Cancel on the mesh what is still open: nobody waits for it any more."""
        if not flow.num_open:
            return
        try:
            async with asyncio.timeout(CANCEL_WITHIN_S):
                await flow.cancel("its question has ended")
        except TimeoutError:
            log.warning("cancellation_not_taken", query_id=flow.query_id)

    def _steps(self, definition: WorkflowDef, context: Context) -> dict[str, Step]:
        steps: dict[str, Step] = {"prompt": PromptStep(context)}
        if all(stage.step == "prompt" for stage in definition.stages):
            return steps
        params = self._desk.params
        self._work = Work(
            context=context,
            database=self._database(),
            schema_tokens=params.schema_tokens,
            max_rows=self.request.max_rows or params.max_rows,
            is_structured=params.is_structured,
        )
        return {**steps, **text2sql_steps(self._work)}

    def _database(self) -> Database:
        known = self._desk.databases
        if not self.request.database and len(known) == 1:
            return next(iter(known.values()))
        if self.request.database not in known:
            names, word = ", ".join(sorted(known)) or "none", self.request.database
            detail = (
                f"there is no database {word!r}{did_you_mean(word, known)} (there are: {names})"
            )
            raise Ended("rejected", "unknown_database", detail)
        return known[self.request.database]

    def _result(
        self,
        base: QueryResult,
        verdict: Verdict | None,
        definition: WorkflowDef,
        context: Context,
        flow: Workflow,
    ) -> QueryResult:
        result = msgspec.structs.replace(base, calls=calls_of(flow))
        work = self._work
        if work is None:
            return self._prompted(result, verdict, definition, context)
        attempts = work.attempts()
        result = msgspec.structs.replace(
            result,
            database=work.database.schema.name,
            attempts=attempts,
            database_s=sum(attempt.database_s for attempt in attempts),
        )
        chosen = work.chosen()
        gives_up = verdict is not None and verdict.kind != "evicted"
        if chosen is None or chosen.rows is None or chosen.last is None or gives_up:
            return self._closed(result, verdict or _why_none(work))
        rows = chosen.rows
        return self._closed(
            msgspec.structs.replace(
                result,
                kind="completed",
                sql=chosen.last.sql,
                columns=rows.columns,
                rows=rows.rows,
                is_truncated=rows.is_truncated,
                answer=_in_words(rows.columns, rows.rows),
                detail="its time was over: the best candidate so far" if verdict else "",
            )
        )

    def _prompted(
        self,
        result: QueryResult,
        verdict: Verdict | None,
        definition: WorkflowDef,
        context: Context,
    ) -> QueryResult:
        names = [stage.name for stage in definition.stages]
        outputs = {name: context.outputs[name] for name in names if name in context.outputs}
        result = msgspec.structs.replace(result, outputs=outputs)
        if verdict is not None:
            return self._closed(result, verdict)
        answer = outputs.get(definition.answer_stage, "")
        text = answer if isinstance(answer, str) else "\n".join(map(str, answer))
        return self._closed(msgspec.structs.replace(result, kind="completed", answer=text))

    def _closed(self, result: QueryResult, verdict: Verdict | None = None) -> QueryResult:
        if verdict is not None:
            result = msgspec.structs.replace(
                result,
                kind=verdict.kind,
                reason=verdict.reason,
                detail=verdict.detail[:MAX_DETAIL],
            )
        return msgspec.structs.replace(result, finished_at_s=self._desk.clock.now_s())


def calls_of(flow: Workflow) -> tuple[QueryCall, ...]:
    """Return every ended call of a query, in the order in which they were sent."""
    found = []
    for request_id, request in flow.requests.items():
        outcome = flow.outcomes.get(request_id)
        if outcome is None:
            continue
        found.append(
            QueryCall(
                request_id=request_id,
                stage=request.stage,
                iteration=request.iteration,
                sibling=request.sibling,
                siblings=request.siblings,
                parents=request.parents,
                kind=outcome.kind,
                reason=outcome.reason,
                instance_id=outcome.instance_id,
                think_s=request.think_s,
                usage=outcome.usage,
                times=outcome.times,
                prefix=request.prefix,
            )
        )
    return tuple(found)


def _no(kind: QueryKind, reason: str, detail: str) -> Verdict:
    return Verdict(kind=kind, reason=reason, detail=detail)


def _why_none(work: Work) -> Verdict:
    """Return why there is no answer although the workflow came to its end."""
    if work.refusal is not None:
        kind, reason, detail = work.refusal
        return Verdict(kind=msgspec.convert(kind, QueryKind), reason=reason, detail=detail)
    attempts = work.attempts()
    if not any(attempt.sql for attempt in attempts):
        return _no("unanswered", "no_statement", "no SQL statement could be read in any answer")
    last = attempts[-1]
    tries = f"{len(attempts)} attempt{'s' * (len(attempts) != 1)}"
    detail = f"no statement ran in {tries}; the last: {last.detail}"
    return _no("unanswered", f"sql_{last.verdict}", detail)


def _in_words(columns: tuple[str, ...], rows: tuple[tuple[Any, ...], ...]) -> str:
    if len(rows) == 1 and len(columns) == 1:
        return str(rows[0][0])
    return f"{len(rows)} row{'s' * (len(rows) != 1)}"
