"""`hexflow doctor` against real Apache Kafka and real Redis, on which each fault is caused."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from services.cli.__main__ import main
from services.cli.doctor.examination import examine
from services.cli.doctor.findings import diagnose
from services.cli.options import mesh_settings
from services.cli.processes import ProcessesParams, open_processes
from services.cli.remote import connect
from services.cli.workload import load_fleet
from shared.adapters.clock import SystemClock
from shared.adapters.local_process import free_port
from shared.contracts.messages import (
    DeadLetter,
    InstanceState,
    RecoveryProbe,
    StageRequest,
)
from shared.contracts.topics import DEAD_LETTERS, INSTANCE_STATES, STAGE_REQUESTS
from shared.ports import Broker
from shared.runtime.publishing import Publisher
from shared.runtime.settings import MeshSettings
from tests.support.servers import KafkaServer, RedisServer

pytestmark = [pytest.mark.real, pytest.mark.slow]
SPEC = load_fleet("hetero-1")[0]


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Undo what a command does to this process's logging: its stderr is closed by then."""
    level = logging.getLogger("aiokafka").level
    yield
    structlog.reset_defaults()
    logging.getLogger("aiokafka").setLevel(level)


@pytest.fixture
def settings(kafka_server: KafkaServer, redis_server: RedisServer) -> MeshSettings:
    """Return settings of a mesh with topics and keys of its own."""
    found = mesh_settings(kafka=kafka_server.bootstrap, redis=redis_server.url)
    topics = found.topics.model_copy(update={"prefix": f"doc-{secrets.token_hex(4)}."})
    return found.model_copy(update={"topics": topics})


@pytest.fixture
async def broker(settings: MeshSettings) -> AsyncIterator[Broker]:
    """Return the mesh's broker, with its topics created."""
    async with connect(settings, "doctor-test") as opened:
        await opened.create_topics(settings.topics.topics().specs())
        yield opened


@asynccontextmanager
async def speaking(
    broker: Broker,
    settings: MeshSettings,
    *states: InstanceState,
    offset_s: float = 0.0,
    probes: bool = True,
) -> AsyncIterator[Publisher]:
    """Publish states, and a dispatcher's probes, every half second while the block runs."""
    publisher = Publisher(broker, settings.topics.topics(), SystemClock())

    async def speak() -> None:
        for seq in range(1_000):
            probe = RecoveryProbe(owner_id="d", seq=seq)
            if probes:
                await publisher.once(INSTANCE_STATES, probe, key="probe/d", partition=0)
            for state in states:
                now = msgspec.structs.replace(state, seq=seq, at_s=time.time() + offset_s)
                await publisher.once(INSTANCE_STATES, now, key=state.instance_id)
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(speak(), name="speak")
        yield publisher
        task.cancel()


def at_work(**fields: Any) -> InstanceState:
    """Return what an instance at work says."""
    known = {"instance_id": SPEC.instance_id, "phase": "serving", "epoch": 0, "spec": SPEC}
    return InstanceState(**{**known, **fields})


async def problems(settings: MeshSettings, watch_s: float = 1.5) -> set[str]:
    """Return the names of what the doctor finds."""
    return {finding.problem for finding in diagnose(await examine(settings, watch_s))}


async def test_a_running_mesh_is_well(settings: MeshSettings, tmp_path: Path):
    """Two dispatchers, a tuner and workers as processes: nothing is wrong."""
    async with open_processes(settings, ProcessesParams(fleet=(SPEC,)), tmp_path):
        await asyncio.sleep(2)
        assert await problems(settings) == set()


async def test_no_word_from_anybody(settings: MeshSettings, broker: Broker):
    """Topics without services: no instance and no dispatcher, and nothing else."""
    assert broker is not None
    assert await problems(settings) == {"no-instance", "no-dispatcher"}


async def test_an_engine_that_takes_nothing_and_a_clock_that_is_off(
    settings: MeshSettings, broker: Broker
):
    """Calls wait and none runs; the worker's clock is 30 s ahead; no key is in this Redis."""
    async with speaking(broker, settings, at_work(num_waiting=3), offset_s=30.0):
        found = await problems(settings)
    assert found == {"engine-unready", "clock-skew", "redis-mismatch"}


async def test_another_time_scale(settings: MeshSettings, broker: Broker):
    """The workers' seconds are not the settings' seconds."""
    other = settings.model_copy(update={"time_scale": 20.0})
    async with speaking(broker, settings, at_work()):
        assert await problems(other) == {"time-scale"}


async def test_silence_stuck_readers_and_dead_letters(settings: MeshSettings, broker: Broker):
    """An instance that fell silent, calls that nobody reads, and a message nobody could handle."""
    other = at_work(instance_id="silent-1", at_s=time.time())
    async with speaking(broker, settings, at_work(), probes=False) as publisher:
        await publisher.once(INSTANCE_STATES, other, key=other.instance_id)
        call = StageRequest(request_id="r", model=SPEC.model, prompt="?")
        await publisher.once(STAGE_REQUESTS, call, key="r")
        letter = DeadLetter(
            value=b"?",
            topic="stage-requests",
            partition=0,
            offset=0,
            error="bad",
            detail="",
            service="dispatcher",
        )
        await publisher.once(DEAD_LETTERS, letter)
        assert await problems(settings) == {"dead-letters", "no-dispatcher"}
        await asyncio.sleep(10)
        found = await problems(settings)
    assert found == {"instance-silent", "reader-stuck", "dead-letters", "no-dispatcher"}


async def test_an_evicting_redis(settings: MeshSettings, broker: Broker, own_redis: RedisServer):
    """A Redis that drops keys to save memory loses calls' places in the queue."""
    from redis.asyncio import from_url  # noqa: PLC0415 - the one test that alters a server

    async with from_url(own_redis.url) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
    own = settings.redis.model_copy(update={"url": own_redis.url})
    async with speaking(broker, settings, at_work()):
        assert await problems(settings.model_copy(update={"redis": own})) == {"redis-evicts"}


def test_the_command_tells_and_fails(
    settings: MeshSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Missing topics: exit 1 and what to run; an unreachable Kafka and Redis: both named."""
    monkeypatch.setenv("HEXFLOW_TOPICS__PREFIX", settings.topics.prefix)
    where = ["--kafka", settings.kafka.bootstrap_servers, "--redis", settings.redis.url]
    code, report = run(["doctor", *where, "--watch", "0.5", "--json"], capsys)
    assert code == 1
    assert report["findings"][0]["problem"] in ("topic-missing", "wrong-prefix")

    monkeypatch.setenv("HEXFLOW_KAFKA__CONNECT_TIMEOUT_S", "2")
    nowhere = ["--kafka", f"127.0.0.1:{free_port()}", "--redis", f"redis://127.0.0.1:{free_port()}"]
    code, report = run(["doctor", *nowhere, "--json"], capsys)
    assert code == 1
    found = [finding["problem"] for finding in report["findings"]]
    assert found == ["kafka-unreachable", "redis-unreachable"]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Run a command; return its exit code and JSON object."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out)
