"""Agents as processes on real Kafka and Redis, killed with SIGKILL."""

import asyncio
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.text2sql.samples.writing import sample_file, sample_questions
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from shared.adapters.local_process import LocalProcess
from shared.contracts.messages import CallOutcome, QueryRequest, StageRequest
from shared.contracts.topics import Topics
from shared.sdk import open_questions
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
            "HEXFLOW_TOPICS__REQUEST_PARTITIONS": "1",
            "TEXT2SQL_AGENT_ID": f"agent-{number}",
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
