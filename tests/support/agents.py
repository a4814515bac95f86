"""An agent on an in-memory broker, in front of a mesh that a test plays."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from services.text2sql.app import build_agent
from services.text2sql.params import AgentParams
from services.text2sql.samples.writing import Question
from services.text2sql.scripted.model import ScriptedModel
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.messages import CallOutcome, QueryRequest, QueryResult, StageRequest
from shared.contracts.topics import Topics
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.sdk import Questions, open_questions
from tests.support.played_mesh import Answer, FakeChunks, PlayedMesh, completed, playing

TOPICS = Topics(request_partitions=3, result_partitions=2)


def scripted(questions: Sequence[Question]) -> Answer:
    """Return what answers calls as the scripted model does."""
    model = ScriptedModel(questions)

    def answer(request: StageRequest) -> list[CallOutcome]:
        return [completed(request, model.answer(request.messages or ()))]

    return answer


@dataclass
class AgentBench:
    """Where agents come and go."""

    broker: MemoryBroker
    clock: SystemClock
    mesh: PlayedMesh
    questions: Questions
    store: Any
    databases: dict[str, str]
    metrics: list[Metrics] = field(default_factory=list)

    @asynccontextmanager
    async def agent(self, **named: Any) -> AsyncIterator["asyncio.Task[None]"]:
        """Run an agent; cancelling the task given ends it without any farewell."""
        params = AgentParams(
            **{"agent_id": "agent", "databases": self.databases, "drain_s": 0.0, **named}
        )
        self.metrics.append(Metrics("text2sql"))
        agent = build_agent(
            broker=self.broker,
            store=self.store,
            clock=self.clock,
            topics=TOPICS,
            params=params,
            metrics=self.metrics[-1],
            health=Health(self.clock),
        )
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(agent.serve(stop), name="agent")
            try:
                yield task
            finally:
                stop.set()

    async def ask(self, question: str, **named: Any) -> QueryResult:
        """Ask and wait for the result."""
        request = QueryRequest(
            **{"query_id": secrets.token_hex(8), "question": question, "slo_s": 120.0, **named}
        )
        asked = await self.questions.ask(request)
        async with asyncio.timeout(60):
            return await asked.result()


@asynccontextmanager
async def open_agent_bench(
    databases: dict[str, str], answer: Answer, *, time_scale: float = 1.0
) -> AsyncIterator[AgentBench]:
    """Open the surroundings of agents."""
    clock = SystemClock(time_scale=time_scale)
    broker = MemoryBroker(clock)
    await broker.create_topics(TOPICS.specs())
    store: Any = FakeChunks()
    async with (
        playing(broker, clock, TOPICS, answer) as mesh,
        open_questions(broker, TOPICS, clock, partition=1, store=store) as questions,
    ):
        yield AgentBench(broker, clock, mesh, questions, store, databases)
