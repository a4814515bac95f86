"""Agents as processes on real Kafka and Redis, killed with SIGKILL."""

import asyncio
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from services.cli.console import mesh_error_in
from services.cli.embedded import EmbeddedParams, open_mesh_on
from services.cli.options import mesh_settings
from services.cli.text2sql.ask import AskPlan, ask
from services.cli.text2sql.mesh import AgentPlan
from services.cli.workload import load_fleet
from services.text2sql.samples.writing import sample_file, sample_questions
from services.text2sql.scripted.engine import ScriptedEngine
from services.text2sql.scripted.model import ScriptedModel
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from shared.adapters.local_process import LocalProcess
from shared.adapters.redis_store import RedisStore
from shared.contracts.messages import CallOutcome, QueryRequest, StageRequest
from shared.contracts.topics import Topics
from shared.domain.instance import InstanceSpec
from shared.errors import ConfigError
from shared.ports import Clock, Engine
from shared.runtime.connections import redis_params
from shared.runtime.settings import MeshSettings
from shared.sdk import agents_of, open_questions
from tests.support.agents import scripted
from tests.support.played_mesh import playing
from tests.support.servers import KafkaServer, RedisServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
QUESTION_ID = "l24"  # corrected twice


@dataclass
class Agents:
    """Agent processes, one at a time."""

    kafka: str
    redis: str
    prefix: str
    database: str
    folder: Path
    processes: list[LocalProcess] = field(default_factory=list)

    def start(self) -> None:
        """Start another one."""
        number = len(self.processes)
        environ = {
            **os.environ,
            "HEXFLOW_KAFKA__BOOTSTRAP_SERVERS": self.kafka,
            "HEXFLOW_REDIS__URL": self.redis,
            "HEXFLOW_TOPICS__PREFIX": self.prefix,
            "TEXT2SQL_AGENT_ID": f"agent-{number}",
            "TEXT2SQL_LEASE_S": "2",
            "TEXT2SQL_DATABASES": json.dumps({"league": self.database}),
        }
        process = LocalProcess(
            f"agent-{number}",
            [sys.executable, "-m", "services.text2sql"],
            self.folder / f"agent-{number}.log",
            environ,
        )
        process.start()
        self.processes.append(process)

    def kill(self) -> None:
        """End the last one with SIGKILL."""
        self.processes[-1].kill()

    def stop(self) -> None:
        """End whatever runs."""
        for process in self.processes:
            process.stop()


@pytest.fixture
async def agents(
    kafka_server: KafkaServer, redis_server: RedisServer, tmp_path: Path
) -> AsyncIterator[Agents]:
    """Return what starts agents on topics of their own."""
    found = Agents(
        kafka=kafka_server.bootstrap,
        redis=redis_server.url,
        prefix=f"t2s-{secrets.token_hex(4)}.",
        database=sample_file("league", tmp_path),
        folder=tmp_path,
    )
    yield found
    await asyncio.to_thread(found.stop)


async def test_an_agent_killed_at_every_stage_boundary_gives_one_answer(agents: Agents):
    """SIGKILL each time a further stage begins: one right answer, no finished call repeated.

    The mesh answers every call once it was sent, so a call that is seen twice was repeated.
    """
    clock = SystemClock()
    topics = Topics(prefix=agents.prefix, request_partitions=1, result_partitions=2)
    (one,) = [one for one in sample_questions("league").questions if one.id == QUESTION_ID]
    answer, stages = scripted([one]), dict[tuple[str, int], None]()
    began: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    def watch(request: StageRequest) -> list[CallOutcome]:
        key = (request.stage, request.iteration)
        if key not in stages:
            stages[key] = None
            began.put_nowait(key)
        return list(answer(request))

    async with KafkaBroker.open(KafkaParams(bootstrap_servers=agents.kafka)) as broker:
        await broker.create_topics(topics.specs())
        async with (
            playing(broker, clock, topics, watch) as mesh,
            open_questions(broker, topics, clock, partition=1) as questions,
        ):
            await asyncio.to_thread(agents.start)
            request = QueryRequest(query_id="killed", question=one.question, slo_s=3_600.0)
            asked = await questions.ask(request)
            kills = 0
            while True:
                next_stage = asyncio.create_task(began.get(), name="next-stage")
                result = asyncio.create_task(asked.result(), name="result")
                done, _ = await asyncio.wait(
                    {next_stage, result}, timeout=120, return_when=asyncio.FIRST_COMPLETED
                )
                next_stage.cancel()
                if result in done:
                    break
                result.cancel()
                assert done, agents.processes[-1].log_tail(30)
                await asyncio.to_thread(agents.kill)
                kills += 1
                await asyncio.to_thread(agents.start)
            final = await asked.result()
            assert (final.kind, final.reason) == ("completed", "")
            assert len(final.rows) == 1
            assert kills >= 5
            sent = Counter(call.request_id for call in mesh.requests)
            assert set(sent.values()) == {1}, sent
            assert len(sent) == len(final.calls)
            assert questions.counts["duplicates"] == 0


async def test_agents_that_come_and_go_answer_every_question_once(agents: Agents):
    """Two agents share the questions; one is told to stop, and its open ones go to the other."""
    clock = SystemClock()
    topics = Topics(prefix=agents.prefix, request_partitions=4, result_partitions=2)
    known = sample_questions("league").questions[:16]
    answer, held = scripted(known), list[StageRequest]()
    is_holding = True

    def hold(request: StageRequest) -> list[CallOutcome]:
        if is_holding and request.stage == "generate_candidate":
            held.append(request)
            return []
        return list(answer(request))

    async with KafkaBroker.open(KafkaParams(bootstrap_servers=agents.kafka)) as broker:
        await broker.create_topics(topics.specs())
        async with (
            playing(broker, clock, topics, hold) as mesh,
            open_questions(broker, topics, clock, partition=1) as questions,
        ):
            await asyncio.to_thread(agents.start)
            await asyncio.to_thread(agents.start)
            asked = [
                await questions.ask(
                    QueryRequest(query_id=f"q-{one.id}", question=one.question, slo_s=3_600.0)
                )
                for one in known
            ]
            async with asyncio.timeout(120):
                while len(held) < 2 * len(known):  # all wait for their candidates
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(agents.processes[0].stop, 40.0)
            is_holding = False
            for request in held:
                for outcome in answer(request):
                    await mesh.publish(request, outcome)
            async with asyncio.timeout(120):
                results = [await one.result() for one in asked]
            assert {result.kind for result in results} == {"completed"}
            sent = Counter(call.request_id for call in mesh.requests)
            again = {one for one, times in sent.items() if times > 1}
            assert again <= {request.request_id for request in held}  # not ended: sent again
            assert len(sent) == sum(len(result.calls) for result in results)


async def test_a_mesh_that_runs_already_is_asked_with_and_without_agents(
    agents: Agents, kafka_server: KafkaServer
):
    """A database by its address is asked from here; a name, by the agents that know it."""
    (one,) = [one for one in sample_questions("league").questions if one.id == "l20"]
    model = ScriptedModel([one])

    @asynccontextmanager
    async def scripted_engine(spec: InstanceSpec, clock: Clock) -> AsyncIterator[Engine]:
        async with ScriptedEngine.open(spec, clock, model) as engine:
            yield engine

    params = EmbeddedParams(
        fleet=load_fleet("hetero-1")[:1], tunes=False, drain_s=1.0, open_engine=scripted_engine
    )
    clock = SystemClock()
    async with (
        KafkaBroker.open(KafkaParams(bootstrap_servers=kafka_server.bootstrap)) as broker,
        open_mesh_on(broker, clock, params, Topics(prefix=agents.prefix)) as mesh,
    ):
        agents.redis = mesh.state_url
        settings = mesh_settings(kafka=kafka_server.bootstrap, redis=mesh.state_url)
        topics = settings.topics.model_copy(update={"prefix": agents.prefix})
        settings = settings.model_copy(update={"topics": topics})
        await asyncio.to_thread(agents.start)
        await _announced(settings, num=1)
        for databases, name in (({"mine": agents.database}, "mine"), ({}, "league")):
            console = Console(record=True, width=200)
            plan = AskPlan(
                agent=AgentPlan(databases=databases, settings=settings),
                request=QueryRequest(
                    query_id=f"asked-{name}",
                    question=one.question,
                    hint=one.hint,
                    database=name,
                    slo_s=600.0,
                    events=True,
                ),
                is_quiet=False,
            )
            async with asyncio.timeout(100):
                result = await ask(plan, console)
            assert (result.kind, result.sql.split()) == ("completed", one.sql.split())
            assert result.agent_id.startswith("cli-") is bool(databases)
            assert "generate_candidate" in console.export_text()
        wrong = msgspec.structs.replace(plan.request, query_id="wrong", database="leage")
        assert "did you mean league?" in await _refusal(
            msgspec.structs.replace(plan, request=wrong)
        )
        await asyncio.to_thread(agents.kill)
        await _announced(settings, num=0)  # after its lease
        assert "no agent answers questions" in await _refusal(plan)


async def _refusal(plan: AskPlan) -> str:
    """Return what a person is told whose question is refused."""
    with pytest.raises(Exception) as told:  # noqa: PT011 - a group around it
        await ask(plan, Console(quiet=True))
    error = mesh_error_in(told.value)
    assert isinstance(error, ConfigError)
    return str(error)


async def _announced(settings: MeshSettings, num: int) -> None:
    """Return when so many agents say that they are there."""
    async with RedisStore.open(redis_params(settings)) as store, asyncio.timeout(100):
        while len(await agents_of(store)) != num:
            await asyncio.sleep(0.1)
