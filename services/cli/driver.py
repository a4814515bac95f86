"""Drives queries through a mesh as a producer: stage after stage, siblings in parallel.

The driver is open-loop: a query arrives when its time has come, whether or not earlier ones have
ended. The next stage's calls are submitted when the outcomes they wait for have been consumed, so
a mesh that stops answering shows in the numbers. A call that does not complete ends its query with
the same kind; siblings already under way are waited for, later stages are not submitted.

Invariants: each query ends exactly once in the tally; request ids are minted from the run's own
query ids, so replays of the same trace on one mesh never meet.
"""

import asyncio
import hashlib
import math
from collections.abc import Sequence

import structlog

from services.cli.tally import Tally
from shared.contracts.codec import mint_request_id
from shared.contracts.messages import CallOutcome, SimulatedLengths, StageRequest
from shared.domain.trace import TraceQuery, TraceStage
from shared.errors import RejectedError
from shared.ports import Clock
from shared.runtime.client import MeshClient
from shared.scheduling.attainment import QueryEnd

PLACEHOLDER_PROMPT = "replayed call"
CANCEL_WAIT_S = 5.0
TOMBSTONE_GRACE_S = 60.0
MAX_ID = 128
log = structlog.get_logger(__name__)


def stage_parents(query: TraceQuery, index: int) -> tuple[int, ...]:
    """Return the indices of the stages that a stage waits for: by default the one before it."""
    named = query.stages[index].parents
    if named is not None:
        return named
    return (index - 1,) if index else ()


def mesh_query_id(run_id: str, trace_id: str) -> str:
    """Return a query's id on the mesh: unique per run, and never too long for a message."""
    query_id = f"{run_id}-{trace_id}"
    if len(query_id) <= MAX_ID:
        return query_id
    return f"{run_id}-{hashlib.blake2b(trace_id.encode(), digest_size=16).hexdigest()}"


class QueryRun:
    """One query on its way through the mesh.

    Args:
        query: What to run.
        query_id: Its id on this mesh.
        client: How calls are submitted.
        clock: Mesh clock.
        tally: Where outcomes are counted.
    """

    def __init__(
        self, query: TraceQuery, query_id: str, client: MeshClient, clock: Clock, tally: Tally
    ) -> None:
        self.query_id = query_id
        self._query = query
        self._client = client
        self._clock = clock
        self._tally = tally
        self._slo_s = query.slo_s
        self._arrival_s: float | None = None
        self._arrived = asyncio.Event()
        self._ended = [asyncio.Event() for _ in query.stages]
        self._failure: str | None = None

    @property
    def deadline_s(self) -> float:
        """When its SLO ends, mesh clock; now when it has none or has not arrived yet."""
        start_s = self._arrival_s if self._arrival_s is not None else self._clock.now_s()
        return start_s + (self._slo_s or 0.0)

    async def drive(self) -> None:
        """Run all stages and count the query's end; being cancelled counts as `cancelled`."""
        self._tally.queries["submitted"] += 1
        kind = "cancelled"
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._query.stages)):
                    name = f"stage-{self.query_id}-{index}"
                    group.create_task(self._run_stage(index), name=name)
            kind = self._failure or "completed"
        finally:
            self._tally.query_ended(kind, self._end(kind))

    def _end(self, kind: str) -> QueryEnd | None:
        if self._arrival_s is None:
            return None
        return QueryEnd(
            arrival_s=self._arrival_s,
            end_s=self._clock.now_s(),
            slo_s=self._slo_s if self._slo_s is not None else math.inf,
            completed=kind == "completed",
        )

    async def _run_stage(self, index: int) -> None:
        try:
            for parent in stage_parents(self._query, index):
                await self._ended[parent].wait()
            if self._failure is None:
                await self._submit_stage(index)
        finally:
            self._ended[index].set()

    async def _submit_stage(self, index: int) -> None:
        stage = self._query.stages[index]
        if stage.think_s > 0:
            await self._clock.sleep(stage.think_s)
        parents = tuple(
            self._request_id(self._query.stages[parent], sibling)
            for parent in stage_parents(self._query, index)
            for sibling in range(len(self._query.stages[parent].calls))
        )
        async with asyncio.TaskGroup() as group:
            for sibling in range(len(stage.calls)):
                is_first = index == 0 and sibling == 0
                name = f"call-{self.query_id}-{index}-{sibling}"
                group.create_task(self._run_call(stage, sibling, parents, is_first), name=name)

    async def _run_call(
        self, stage: TraceStage, sibling: int, parents: tuple[str, ...], is_first: bool
    ) -> None:
        if not is_first:
            await self._arrived.wait()
        try:
            submitted = await self._client.submit(self._request(stage, sibling, parents))
        except RejectedError as exc:
            log.warning("call_refused", query_id=self.query_id, reason=exc.reason)
            self._failure = self._failure or "rejected"
            self._arrived.set()
            return
        self._tally.calls["submitted"] += 1
        if is_first:
            self._arrival_s = submitted.ready_at_s
            self._arrived.set()
        self._take(await submitted.outcome)

    def _take(self, outcome: CallOutcome) -> None:
        self._tally.call_ended(outcome, self._clock.now_s())
        if self._slo_s is None and outcome.deadline_s is not None and self._arrival_s is not None:
            self._slo_s = outcome.deadline_s - self._arrival_s  # the mesh chose it
        if outcome.kind != "completed" and self._failure is None:
            self._failure = outcome.kind

    def _request_id(self, stage: TraceStage, sibling: int) -> str:
        return mint_request_id(self.query_id, stage.stage, stage.iteration, sibling)

    def _request(self, stage: TraceStage, sibling: int, parents: tuple[str, ...]) -> StageRequest:
        call = stage.calls[sibling]
        return StageRequest(
            request_id=self._request_id(stage, sibling),
            query_id=self.query_id,
            workflow=self._query.workflow,
            stage=stage.stage,
            iteration=stage.iteration,
            sibling=sibling,
            siblings=len(stage.calls),
            parents=parents,
            tenant=self._query.tenant,
            model=self._query.model,
            prompt=PLACEHOLDER_PROMPT,
            input_tokens_estimate=call.input_tokens,
            prefix=call.prefix,
            arrival_s=self._arrival_s,
            slo_s=self._query.slo_s,
            think_s=stage.think_s,
            simulated=SimulatedLengths(
                input_tokens=call.input_tokens, output_tokens=call.output_tokens
            ),
        )


class ReplayDriver:
    """Injects queries at their arrival times and drives each to its end.

    Args:
        client: How calls are submitted; its `receive` must run meanwhile.
        clock: Mesh clock.
        tally: Where outcomes are counted.
        run_id: Put before every query id; unique per run.
    """

    def __init__(self, client: MeshClient, clock: Clock, tally: Tally, run_id: str) -> None:
        self._client = client
        self._clock = clock
        self._tally = tally
        self._run_id = run_id
        self._open: dict[asyncio.Task[None], QueryRun] = {}

    async def run(self, queries: Sequence[TraceQuery], stop: asyncio.Event) -> None:
        """Return when every query has ended, or soon after `stop` is set.

        On `stop` no further query is injected, the open ones are cancelled on the mesh, and their
        outcomes are waited for a few seconds; what is still open then counts as cancelled.

        Args:
            queries: With arrivals relative to the start, seconds.
            stop: Set to end the run early.
        """
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._cancel_open_on(stop), name="replay-stop")
            await self._inject(queries, stop)
            watcher.cancel()
        self._tally.calls["duplicates"] = self._client.counts["duplicates"]

    async def _inject(self, queries: Sequence[TraceQuery], stop: asyncio.Event) -> None:
        start_s = self._elapsed_s()
        async with asyncio.TaskGroup() as group:
            for query in sorted(queries, key=_arrival_s):
                due_s = start_s + _arrival_s(query)
                if await self._stopped_before(due_s, stop):
                    return
                self._tally.arrived(self._elapsed_s() - due_s)
                query_id = mesh_query_id(self._run_id, query.query_id)
                run = QueryRun(query, query_id, self._client, self._clock, self._tally)
                task = group.create_task(run.drive(), name=f"query-{query_id}")
                self._open[task] = run
                task.add_done_callback(lambda done: self._open.pop(done, None))

    async def _stopped_before(self, due_s: float, stop: asyncio.Event) -> bool:
        wait_s = due_s - self._elapsed_s()
        if wait_s <= 0 or stop.is_set():
            return stop.is_set()
        async with asyncio.TaskGroup() as group:
            nap = group.create_task(self._clock.sleep(wait_s), name="until-arrival")
            halt = group.create_task(stop.wait(), name="until-stop")
            await asyncio.wait((nap, halt), return_when=asyncio.FIRST_COMPLETED)
            nap.cancel()
            halt.cancel()
        return stop.is_set()

    def _elapsed_s(self) -> float:
        """Return workload seconds since some instant; unlike mesh time they never jump."""
        return self._clock.monotonic_s() * self._clock.time_scale

    async def _cancel_open_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                for run in list(self._open.values()):
                    until_s = run.deadline_s + TOMBSTONE_GRACE_S
                    await self._client.cancel(run.query_id, until_s=until_s, reason="replay ended")
                if self._open:
                    await asyncio.wait(list(self._open))
        except TimeoutError:
            log.warning("replay_left_open", num_queries=len(self._open))
        for task in list(self._open):
            task.cancel()


def _arrival_s(query: TraceQuery) -> float:
    return query.arrival_s or 0.0
