"""Agents that end in the middle: the next one goes on, and repeats no finished call."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.text2sql.samples.writing import sample_file, sample_questions
from shared.contracts.messages import CallOutcome, QueryRequest, StageRequest
from shared.contracts.query_events import event_stream
from shared.contracts.topics import QUERY_RESULTS
from shared.ports import Ack, Broker
from tests.support.agents import AgentBench, open_agent_bench, scripted

# Corrected twice, then judged: it goes through more stages than most.
QUESTION_ID = "l24"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[AgentBench]:
    """The league, and the scripted model."""
    answer = scripted(sample_questions("league").questions)
    async with open_agent_bench({"league": sample_file("league", tmp_path)}, answer) as opened:
        yield opened


async def stages_of(bench: AgentBench, request: QueryRequest) -> int:
    """Return how many stages a question has when nothing happens."""
    async with bench.agent():
        result = await (await bench.questions.ask(request)).result()
    assert result.kind == "completed"
    return len({(call.stage, call.iteration) for call in result.calls})


async def killed_at(bench: AgentBench, request: QueryRequest, boundary: int) -> None:
    """Run a question; cut its agent off as the mesh sees the first call of a stage."""
    reached = asyncio.Event()
    seen: set[tuple[str, int]] = set()
    answer = bench.mesh.answer

    def watch(one: StageRequest) -> list[CallOutcome]:
        if one.query_id == request.query_id:
            seen.add((one.stage, one.iteration))
            if len(seen) == boundary:
                reached.set()
        return list(answer(one))

    bench.mesh.answer = watch
    try:
        async with bench.agent() as task:
            asked = await bench.questions.ask(request)
            await reached.wait()
            task.cancel()
        async with asyncio.timeout(60), bench.agent(agent_id="next"):
            result = await asked.result()
    finally:
        bench.mesh.answer = answer
    assert result.kind == "completed"
    assert result.agent_id in ("next", "agent")


@pytest.mark.slow
async def test_an_agent_cut_off_at_any_stage_is_replaced_without_repeating_a_call(
    bench: AgentBench,
):
    """One answer each, the right one, and every call was sent once: counted at the mesh."""
    (one,) = [one for one in sample_questions("league").questions if one.id == QUESTION_ID]
    request = QueryRequest(query_id="whole", question=one.question, slo_s=600.0)
    num_stages = await stages_of(bench, request)
    assert num_stages >= 6
    for boundary in range(1, num_stages + 1):
        query_id = f"cut-{boundary}"
        again = QueryRequest(query_id=query_id, question=one.question, slo_s=600.0)
        await killed_at(bench, again, boundary)
        sent = Counter(r.request_id for r in bench.mesh.requests if r.query_id == query_id)
        assert set(sent.values()) == {1}, (boundary, sent)


async def test_the_events_of_the_next_agent_follow_those_of_the_first(bench: AgentBench):
    """A reader of events sees another `began`, and nothing is overwritten."""
    request = QueryRequest(
        query_id="told", question="How many teams play in the league?", slo_s=600.0, events=True
    )
    await killed_at(bench, request, 2)
    attempts = [attempt for attempt, _, _ in bench.store.streams[event_stream("told")]]
    assert sorted(attempts) == attempts
    assert set(attempts) == {0, 1}


async def test_a_result_is_committed_so_that_it_is_not_given_again(bench: AgentBench):
    """An agent that starts later finds nothing to do."""
    async with bench.agent():
        await bench.ask("How many teams play in the league?")
    num = len(bench.mesh.requests)
    async with bench.agent(agent_id="next"):
        assert (await bench.ask("?", workflow="none")).reason == "unknown_workflow"
    assert len(bench.mesh.requests) == num
    ended = bench.metrics[-1].totals()
    assert ended == {
        "hexflow_messages_read_total{topic=queries}": 1.0,
        "hexflow_queries_ended_total{kind=rejected,workflow=unknown}": 1.0,
    }


class LateAcks:
    """A broker that acknowledges results late."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.has_result = asyncio.Event()
        self.acks = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    async def publish(self, topic: str, value: bytes | None, **named: Any) -> Ack:
        """Take a record, and say so late when it is a result."""
        ack = await self._broker.publish(topic, value, **named)
        if topic.endswith(QUERY_RESULTS):
            self.has_result.set()
            await self.acks.wait()
        return ack


async def test_a_result_on_its_way_when_an_agent_ends_is_not_given_again(bench: AgentBench):
    """Its time is over while the broker takes a result: that is committed all the same."""
    late: Any = LateAcks(bench.broker)
    bench.broker = late
    request = QueryRequest(
        query_id="told", question="How many teams play in the league?", slo_s=600.0
    )
    async with bench.agent():
        asked = await bench.questions.ask(request)
        await late.has_result.wait()
        asyncio.get_running_loop().call_later(0.7, late.acks.set)  # the agent has ended its work
    assert (await asked.result()).kind == "completed"
    async with bench.agent(agent_id="next"):
        assert (await bench.ask("?", workflow="none")).reason == "unknown_workflow"
    assert bench.metrics[-1].totals()["hexflow_messages_read_total{topic=queries}"] == 1.0
    assert bench.questions.counts["duplicates"] == 0
