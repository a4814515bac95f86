"""The mesh as separate processes on real Apache Kafka and real Redis, counted three ways."""

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.cli.options import mesh_settings
from services.cli.processes import ProcessesParams, ProcessMesh, open_processes
from services.cli.replay import ReplayPlan, replay
from services.cli.tally import Tally
from services.cli.workload import WorkloadParams, load_fleet
from shared.contracts.codec import decode
from shared.contracts.messages import CallOutcome
from shared.contracts.topics import STAGE_RESULTS
from shared.ports import TopicPartition
from shared.runtime.settings import MeshSettings
from tests.support.servers import KafkaServer, RedisServer

pytestmark = [pytest.mark.real, pytest.mark.slow]
TIME_SCALE = 20.0
KINDS = ("completed", "failed", "rejected", "evicted", "cancelled")


@pytest.fixture
def settings(kafka_server: KafkaServer, redis_server: RedisServer) -> MeshSettings:
    """Return settings of a mesh with topics and keys of its own."""
    found = mesh_settings(
        kafka=kafka_server.bootstrap, redis=redis_server.url, time_scale=TIME_SCALE
    )
    topics = found.topics.model_copy(update={"prefix": f"cli-{secrets.token_hex(4)}."})
    return found.model_copy(update={"topics": topics})


@pytest.fixture
async def mesh(settings: MeshSettings, tmp_path: Path) -> AsyncIterator[ProcessMesh]:
    """Return two dispatchers, four workers and a tuner, each a process."""
    params = ProcessesParams(fleet=load_fleet("hetero-1"), dispatchers=2)
    async with open_processes(settings, params, tmp_path) as running:
        yield running


async def run(settings: MeshSettings, num: int, seed: int = 0) -> Tally:
    """Replay generated queries through the running mesh."""
    workload = WorkloadParams(mode="natural", limit=num, rate_qps=0.6, seed=seed)
    plan = ReplayPlan(workload=workload, kafka=settings)
    return (await replay(plan, asyncio.Event())).tally


async def raw_outcomes(mesh: ProcessMesh) -> list[CallOutcome]:
    """Read every record of the results topic, independently of any client."""
    name = mesh.topics.name(STAGE_RESULTS)
    partitions = [TopicPartition(name, n) for n in range(await mesh.broker.partitions_of(name))]
    found = []
    async with mesh.broker.partition_consumer(partitions, start="beginning") as consumer:
        ends = await consumer.end_offsets()
        while any([await consumer.position(tp) < end for tp, end in ends.items()]):
            found += [decode(record.value or b"", CallOutcome) for record in await consumer.fetch()]
    return found


def counter_of(mesh: ProcessMesh, service: str, metric: str) -> Counter[str]:
    """Return a counter's values per process of a service, from the processes' own metrics."""
    found: Counter[str] = Counter()
    for name in mesh.pids:
        if name.startswith(service):
            lines = mesh.metrics(name).splitlines()
            samples = [line for line in lines if re.match(rf"{metric}_total\{{", line)]
            found[name] += int(sum(float(line.rsplit(" ", 1)[1]) for line in samples))
    return found


async def test_three_independent_counts_agree(mesh: ProcessMesh, settings: MeshSettings):
    """The producer's tally, the processes' counters and the raw topic tell the same numbers."""
    tally = await run(settings, 12)
    assert tally.queries["completed"] == tally.queries["submitted"] == 12
    num_calls = tally.calls["submitted"]
    assert tally.calls["completed"] == num_calls
    assert tally.calls["duplicates"] == 0

    raw = await raw_outcomes(mesh)
    assert len({outcome.request_id for outcome in raw}) == len(raw) == num_calls
    per_instance = Counter(outcome.instance_id for outcome in raw)
    assert per_instance == {name: one.calls for name, one in tally.instances.items()}

    counted = await asyncio.to_thread(counter_of, mesh, "worker", "hexflow_call_outcomes")
    assert {name.removeprefix("worker-"): n for name, n in counted.items() if n} == per_instance
    dispatched = await asyncio.to_thread(counter_of, mesh, "dispatcher", "hexflow_calls_dispatched")
    assert sum(dispatched.values()) == num_calls
    assert len(dispatched) == 2


async def test_numbers_follow_what_really_runs(mesh: ProcessMesh, settings: MeshSettings):
    """With a worker stopped, its instance answers nothing, and the queries still complete."""
    await asyncio.to_thread(mesh.processes["worker-a100-1"].stop)
    tally = await run(settings, 6)
    assert tally.queries["completed"] == 6
    assert "a100-1" not in tally.instances
    assert tally.instances["a100-0"].calls > 0


async def test_replays_on_one_mesh_do_not_meet(mesh: ProcessMesh, settings: MeshSettings):
    """The same workload twice at the same time: each producer gets its own outcomes, once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(settings, 5), name=f"run-{n}") for n in range(2)]
    for tally in (task.result() for task in tasks):
        assert tally.queries["completed"] == 5
        assert tally.calls["completed"] == tally.calls["submitted"]
    assert len(await raw_outcomes(mesh)) == sum(t.result().calls["submitted"] for t in tasks)


def test_topics_creates_and_checks(
    settings: MeshSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Missing: exit 1. Created: exit 0. A topic with too few partitions: exit 1, with advice."""
    monkeypatch.setenv("HEXFLOW_TOPICS__PREFIX", settings.topics.prefix)
    words = ["topics", "--kafka", settings.kafka.bootstrap_servers, "--json"]
    assert outcome_of([*words, "--check"], capsys)[0] == 1
    code, report, _ = outcome_of(words, capsys)
    assert code == 0
    assert {topic["state"] for topic in report["topics"]} == {"created"}
    monkeypatch.setenv("HEXFLOW_TOPICS__REQUEST_PARTITIONS", "24")
    code, report, err = outcome_of([*words, "--check"], capsys)
    assert code == 1
    assert report["ok"] is False
    assert "--partitions 24" in err


def test_replay_without_a_mesh_says_so(
    settings: MeshSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A Kafka without topics, then without instances: each is one message that says what to do."""
    monkeypatch.setenv("HEXFLOW_TOPICS__PREFIX", settings.topics.prefix)
    address = settings.kafka.bootstrap_servers
    words = ["replay", "--generate", "natural", "--kafka", address]
    with pytest.raises(SystemExit, match="1"):
        main(words)
    assert "run hexflow topics" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["topics", "--kafka", address])
    with pytest.raises(SystemExit, match="1"):
        main(words)
    assert "no instance serves" in capsys.readouterr().err


def test_bench_measures_a_mesh_of_processes(
    settings: MeshSettings, capsys: pytest.CaptureFixture[str]
):
    """Every call comes back, and each kind of process has its processor time told."""
    where = ["--kafka", settings.kafka.bootstrap_servers, "--redis", settings.redis.url]
    words = ["bench", "mesh", *where, "--rate", "40", "--seconds", "2", "--json"]
    code, report, _ = outcome_of(words, capsys)
    assert code == 0
    assert report["calls"]["completed"] == report["calls"]["submitted"] == 80
    assert report["request_to_engine_ms"]["p50"] > 0
    assert set(report["cpu_ms_per_call"]) <= {"dispatcher", "worker", "tuner", "producer"}


def outcome_of(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, object], str]:
    """Run a command; return exit code, its JSON object, and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(captured.out), captured.err
