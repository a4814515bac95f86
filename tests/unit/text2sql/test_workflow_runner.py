"""What runs a workflow's stages: order, rounds, budget."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.text2sql.flow.definition import StageDef, parse_definition
from services.text2sql.flow.progress import Progress
from services.text2sql.flow.runner import Runner, StageCosts
from services.text2sql.flow.step import Context, Ended
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.messages import CallOutcome, QueryRequest, StageRequest
from shared.contracts.topics import Topics
from shared.errors import ConfigError
from shared.sdk import Call, Workflow, open_producer
from tests.support.played_mesh import Answer, completed, playing

TOPICS = Topics(request_partitions=1, result_partitions=1)
WORKFLOW = """
name = "w"
[[stages]]
name = "first"
step = "many"
siblings = 2
[[stages]]
name = "again"
stage = "shared"
step = "many"
rounds = 4
[[stages]]
name = "branch"
stage = "shared"
after = ["first"]
step = "once"
optional = true
[[stages]]
name = "join"
after = ["again", "branch"]
step = "once"
"""


class Many:
    """Asks for three calls in each round, and wants another round for ever."""

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return three calls."""
        return [Call(prompt=f"{stage.name} {number} {n}") for n in range(3)]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Want more."""
        del stage, number, outcomes
        return True


class Once(Many):
    """Asks for one call in one round."""

    async def calls(self, stage: StageDef, number: int) -> Sequence[Call]:
        """Return one call."""
        return [Call(prompt=f"{stage.name} {number}")]

    async def take(self, stage: StageDef, number: int, outcomes: Sequence[CallOutcome]) -> bool:
        """Be content."""
        del stage, number, outcomes
        return False


def answered(request: StageRequest) -> list[CallOutcome]:
    """Answer at once."""
    return [completed(request, "ok")]


@asynccontextmanager
async def running(
    answer: Answer = answered, costs: StageCosts | None = None, slo_s: float = 60.0, **steps: Any
) -> AsyncIterator[tuple[Runner, list[StageRequest]]]:
    """Open a runner of the workflow above on a played mesh."""
    clock = SystemClock()
    broker = MemoryBroker(clock)
    await broker.create_topics(TOPICS.specs())
    async with (
        playing(broker, clock, TOPICS, answer) as mesh,
        open_producer(broker, TOPICS, clock, partition=0) as producer,
        Workflow(producer, "w", query_id="q", slo_s=slo_s, arrival_s=clock.now_s()) as flow,
    ):
        context = Context(
            request=QueryRequest(query_id="q", question="?"),
            clock=clock,
            deadline_s=clock.now_s() + slo_s,
            progress=Progress(None, clock, "q"),
        )
        found = {"many": Many(), "once": Once(), **steps}
        yield (
            Runner(parse_definition(WORKFLOW), found, flow, context, costs or StageCosts()),
            mesh.requests,
        )


async def test_rounds_and_fan_out_keep_to_the_definition():
    """Three calls are cut to the siblings allowed; a stage that always wants more ends."""
    async with running() as (runner, requests):
        await runner.run()
    assert sorted(str(one.prompt) for one in requests) == [
        *(f"again {number} 0" for number in range(4)),
        "branch 0",
        "first 0 0",
        "first 0 1",
        "join 0",
    ]


async def test_stages_that_share_a_name_on_the_mesh_share_no_iteration():
    """Ids are minted from stage and iteration: two calls never have the same."""
    async with running() as (runner, requests):
        await runner.run()
    shared = sorted((one.iteration, str(one.prompt)) for one in requests if one.stage == "shared")
    assert [iteration for iteration, _ in shared] == [0, 1, 2, 3, 4]
    assert shared[-1] == (4, "branch 0")
    assert len({one.request_id for one in requests}) == len(requests)


async def test_a_join_waits_for_all_it_names():
    """Its parents are the last calls of both branches."""
    async with running() as (runner, requests):
        await runner.run()
    by_id = {one.request_id: str(one.prompt) for one in requests}
    (join,) = [one for one in requests if one.stage == "join"]
    assert {by_id[one] for one in join.parents} == {"again 3 0", "branch 0"}
    assert requests[-1] is join


async def test_rounds_that_the_time_cannot_pay_for_are_left_out():
    """The first round and required stages always run; further rounds and optional stages do not."""
    costs = StageCosts()
    costs.note("w", "shared", 100.0)
    async with running(costs=costs) as (runner, requests):
        await runner.run()
    assert sorted(str(one.prompt) for one in requests) == [
        "again 0 0",
        "first 0 0",
        "first 0 1",
        "join 0",
    ]


async def test_a_cancelled_call_ends_the_query():
    """Nothing is sent after it."""

    def cancelled(request: StageRequest) -> list[CallOutcome]:
        return [
            CallOutcome(request_id=request.request_id, query_id="q", kind="cancelled", detail="why")
        ]

    async with running(cancelled) as (runner, requests):
        with pytest.raises(Ended) as caught:
            await runner.run()
        assert (caught.value.kind, caught.value.detail) == ("cancelled", "why")
        await asyncio.sleep(0)
        assert {one.stage for one in requests} == {"first"}


async def test_a_step_that_there_is_not_is_told():
    """With those that there are."""
    with pytest.raises(ConfigError, match="no step 'many'; there are once"):
        Runner(
            parse_definition(WORKFLOW),
            {"once": Once()},
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            StageCosts(),
        )


def test_costs_follow_what_happens():
    """An exponential mean; nothing is known of what never ran."""
    costs = StageCosts()
    assert costs.expected_s("w", "a") is None
    costs.note("w", "a", 10.0)
    costs.note("w", "a", 20.0)
    assert costs.expected_s("w", "a") == pytest.approx(12.0)
