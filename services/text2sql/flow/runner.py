"""Runs a workflow's stages through the mesh, within the query's time.

A stage starts when all it waits for have ended; stages that wait for the same ones run at the same
time. An optional stage, and every round after the first, runs only where the time that remains can
pay for it. The runner knows nothing of what the stages are about.
"""

import asyncio
from collections.abc import Mapping, Sequence

from services.text2sql.flow.definition import StageDef, WorkflowDef
from services.text2sql.flow.step import Context, Ended, Step
from shared.contracts.messages import CallOutcome
from shared.errors import ConfigError
from shared.sdk import Workflow

SAFETY = 1.2
WEIGHT = 0.2


class StageCosts:
    """How long stages take lately, seconds: an exponential mean per workflow and stage."""

    def __init__(self) -> None:
        self._mean_s: dict[tuple[str, str], float] = {}

    def expected_s(self, workflow: str, stage: str) -> float | None:
        """Return what an occurrence of a stage is expected to take; None: it never ran."""
        return self._mean_s.get((workflow, stage))

    def note(self, workflow: str, stage: str, took_s: float) -> None:
        """Learn from one occurrence."""
        key = (workflow, stage)
        before = self._mean_s.get(key, took_s)
        self._mean_s[key] = before + WEIGHT * (took_s - before)


class Runner:
    """Runs one query.

    Args:
        definition: Its workflow.
        steps: Step name -> step.
        flow: How its calls travel.
        context: What its steps know.
        costs: What stages take, shared by all queries of an agent.

    Raises:
        ConfigError: The workflow names a step that there is not.
    """

    def __init__(
        self,
        definition: WorkflowDef,
        steps: Mapping[str, Step],
        flow: Workflow,
        context: Context,
        costs: StageCosts,
    ) -> None:
        missing = {stage.step for stage in definition.stages} - set(steps)
        if missing:
            raise ConfigError(
                f"workflow {definition.name!r}: there is no step {min(missing)!r}; "
                f"there are {', '.join(sorted(steps))}"
            )
        self._definition = definition
        self._steps = steps
        self._flow = flow
        self._context = context
        self._costs = costs
        self._ended = [asyncio.Event() for _ in definition.stages]
        self._last: dict[int, tuple[str, ...]] = {}

    async def run(self) -> None:
        """Run every stage.

        Raises:
            Ended: The query ends before its last stage.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for index, stage in enumerate(self._definition.stages):
                    name = f"stage-{self._flow.query_id}-{stage.name}"
                    group.create_task(self._run_stage(index), name=name)
        except* Ended as ended:
            raise _first(ended) from None

    async def _run_stage(self, index: int) -> None:
        parents = self._definition.parents(index)
        for parent in parents:
            await self._ended[parent].wait()
        after = tuple(one for parent in parents for one in self._last[parent])
        self._last[index] = await self._rounds(index, tuple(dict.fromkeys(after)))
        self._ended[index].set()

    async def _rounds(self, index: int, after: tuple[str, ...]) -> tuple[str, ...]:
        """Run a stage's rounds; returns the request ids that later stages wait for."""
        stage = self._definition.stages[index]
        step, base = self._steps[stage.step], self._definition.iteration_base(index)
        for number in range(stage.rounds):
            if (number or stage.optional) and not self._can_pay(stage):
                left_s = self._context.remaining_s
                note = f"{stage.name}: {left_s:.1f} s are left, too few for another round"
                await self._context.progress.tell("note", stage=stage.mesh_stage, detail=note)
                break
            calls = list(await step.calls(stage, number))[: stage.siblings]
            if not calls:
                break
            where = (stage.mesh_stage, base + number, len(calls))
            await self._tell("stage_began", where)
            outcomes = await self._flow.stage(
                stage.mesh_stage, calls, iteration=base + number, after=after
            )
            await self._finish(where, outcomes)
            after = tuple(outcome.request_id for outcome in outcomes)
            if not await step.take(stage, number, outcomes):
                break
        return after

    async def _finish(self, where: tuple[str, int, int], outcomes: Sequence[CallOutcome]) -> None:
        took_s = max(map(_took_s, outcomes))
        if all(outcome.kind == "completed" for outcome in outcomes):
            self._costs.note(self._definition.name, where[0], took_s)
        num = sum(outcome.usage.output_tokens for outcome in outcomes)
        await self._tell("stage_ended", where, took_s=took_s, output_tokens=num)
        for outcome in outcomes:
            if outcome.kind == "cancelled":
                raise Ended("cancelled", "cancelled", outcome.detail or "cancelled")

    async def _tell(
        self, kind: str, where: tuple[str, int, int], took_s: float = 0.0, output_tokens: int = 0
    ) -> None:
        stage, iteration, siblings = where
        await self._context.progress.tell(
            "stage_began" if kind == "stage_began" else "stage_ended",
            stage=stage,
            iteration=iteration,
            siblings=siblings,
            took_s=took_s,
            output_tokens=output_tokens,
        )

    def _can_pay(self, stage: StageDef) -> bool:
        expected_s = self._costs.expected_s(self._definition.name, stage.mesh_stage) or 0.0
        return self._context.remaining_s > SAFETY * expected_s


def _took_s(outcome: CallOutcome) -> float:
    """Return how long the mesh had a call, seconds; also true of one that ended long ago."""
    times = outcome.times
    if times.ready_at_s is None or times.finished_at_s is None:
        return 0.0
    return max(0.0, times.finished_at_s - times.ready_at_s)


def _first(group: BaseExceptionGroup[Ended]) -> Ended:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    if not isinstance(found, Ended):
        raise TypeError("a group of endings holds something else")
    return found
