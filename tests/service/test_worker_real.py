"""The worker as a process runs it, on real Apache Kafka and real Redis."""

import asyncio
import contextlib
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.worker.app import run
from services.worker.settings import WorkerSettings
from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from shared.contracts.codec import decode_any, encode
from shared.contracts.messages import (
    CallOutcome,
    DeadLetter,
    InstanceState,
    Message,
    RecoveryProbe,
    StageRequest,
)
from shared.ports import TopicPartition
from shared.runtime.settings import KafkaSettings, MeshSettings, RedisSettings, TopicSettings
from tests.support.servers import KafkaServer, RedisServer
from tests.support.worker_bench import bound_call, reply_to, until

INSTANCE = "a100-0"
WORKER = WorkerSettings(instance_id=INSTANCE, heartbeat_s=0.2, linger_s=0.1)


class RealMesh:
    """A mesh's topics on real servers."""

    def __init__(self, mesh: MeshSettings, broker: KafkaBroker) -> None:
        self.settings = mesh
        self.topics = mesh.topics.topics()
        self.broker = broker

    async def send(self, names: list[str], *, output_tokens: int = 5) -> None:
        for name in names:
            call = bound_call(name, output_tokens=output_tokens)
            await self.broker.publish(self.topics.instance(INSTANCE), encode(call))

    async def messages(self, topic: str, *classes: type[Message]) -> list[Message]:
        name = self.topics.name(topic)
        tps = [TopicPartition(name, i) for i in range(await self.broker.partitions_of(name))]
        found: list[Message] = []
        async with self.broker.partition_consumer(tps, start="beginning") as reader:
            ends = await reader.end_offsets()
            while any([await reader.position(tp) < ends[tp] for tp in tps]):
                found += [decode_any(r.value, *classes) for r in await reader.fetch() if r.value]
        return found

    async def outcomes(self) -> list[str]:
        found = await self.messages("stage-results", CallOutcome)
        return sorted(m.request_id for m in found if isinstance(m, CallOutcome))

    async def handed_back(self) -> list[str]:
        found = await self.messages("stage-requests", StageRequest)
        return sorted(m.request_id for m in found if isinstance(m, StageRequest))

    async def buried(self) -> list[str]:
        found = await self.messages("dead-letters", DeadLetter)
        return [m.error for m in found if isinstance(m, DeadLetter)]

    async def phase(self) -> str:
        found = await self.messages("instance-states", InstanceState, RecoveryProbe)
        states = [m for m in found if isinstance(m, InstanceState)]
        return states[-1].phase if states else ""

    @asynccontextmanager
    async def worker(self) -> AsyncIterator["tuple[asyncio.Task[None], asyncio.Event]"]:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run(self.settings, WORKER, stop), name="worker")
            await until(self.phase, lambda phase: phase == "serving")
            yield task, stop
            stop.set()


@pytest.fixture
async def mesh(kafka_server: KafkaServer, redis_server: RedisServer) -> AsyncIterator[RealMesh]:
    """Return a mesh of its own on the shared servers."""
    prefix = f"w-{uuid.uuid4().hex[:10]}."
    settings = MeshSettings(
        kafka=KafkaSettings(bootstrap_servers=kafka_server.bootstrap),
        redis=RedisSettings(url=redis_server.url),
        topics=TopicSettings(
            prefix=prefix, request_partitions=2, result_partitions=2, state_partitions=1
        ),
        time_scale=100.0,
        drain_s=20.0,
    )
    async with KafkaBroker.open(KafkaParams(bootstrap_servers=kafka_server.bootstrap)) as broker:
        await broker.create_topics(settings.topics.topics().specs())
        yield RealMesh(settings, broker)


async def test_calls_complete_once_over_a_restart(mesh: RealMesh) -> None:
    """Two lives of a worker answer every call exactly once between them."""
    names = sorted(f"c{i:02}" for i in range(20))
    async with mesh.worker() as (task, stop):
        await mesh.send(names[:10])
        await until(mesh.outcomes, lambda found: len(found) == 10)
        stop.set()
        await task
    assert await mesh.phase() == "gone"
    async with mesh.worker():
        await mesh.send(names[10:])
        await until(mesh.outcomes, lambda found: len(found) == 20)
    assert await mesh.outcomes() == names


async def test_crashed_worker_repeats_only_what_was_unfinished(mesh: RealMesh) -> None:
    """After a crash the next life runs what had no outcome, from the committed position."""
    async with mesh.worker() as (task, _):
        await mesh.send(["done-1", "done-2"])
        await until(mesh.outcomes, lambda found: len(found) == 2)
        await asyncio.sleep(0.7)  # one commit
        await mesh.send(["long-1", "long-2"], output_tokens=3_000)
        await asyncio.sleep(0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert await mesh.outcomes() == ["done-1", "done-2"]
    async with mesh.worker():
        await until(mesh.outcomes, lambda found: len(found) == 4)
    assert await mesh.outcomes() == ["done-1", "done-2", "long-1", "long-2"]


async def test_answer_for_an_impossible_topic_is_buried(mesh: RealMesh) -> None:
    """Reply addresses that Kafka refuses cost a dead letter each, not the worker."""
    addresses = [reply_to("nowhere"), reply_to("not a topic!"), reply_to("stage-results", 99)]
    async with mesh.worker():
        for index, address in enumerate(addresses):
            call = bound_call(f"c{index}", reply_to=address)
            await mesh.broker.publish(mesh.topics.instance(INSTANCE), encode(call))
        await mesh.send(["good"])
        await until(mesh.buried, lambda found: len(found) == 3)
        await until(mesh.outcomes, lambda found: len(found) == 1)
    assert await mesh.outcomes() == ["good"]


async def test_process_drains_on_sigterm(mesh: RealMesh) -> None:
    """SIGTERM: running calls finish, the instance says gone, the exit code is 0."""
    topics = mesh.settings.topics
    environment = {
        "HEXFLOW_KAFKA__BOOTSTRAP_SERVERS": mesh.settings.kafka.bootstrap_servers,
        "HEXFLOW_REDIS__URL": mesh.settings.redis.url,
        "HEXFLOW_TOPICS__PREFIX": topics.prefix,
        "HEXFLOW_TOPICS__STATE_PARTITIONS": "1",
        "HEXFLOW_TIME_SCALE": "100",
        "WORKER_INSTANCE_ID": INSTANCE,
        "WORKER_LINGER_S": "0.1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.worker", env=environment
    )
    try:
        await until(mesh.phase, lambda phase: phase == "serving")
        await mesh.send(["a", "b"], output_tokens=300)
        await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert sorted(await mesh.outcomes() + await mesh.handed_back()) == ["a", "b"]
    assert await mesh.phase() == "gone"


async def test_wrong_settings_exit_with_two() -> None:
    """A missing instance id ends the process with code 2 and says which variable is missing."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.worker",
        env={"WORKER_INSTANCE": "a100-0"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"WORKER_INSTANCE_ID" in stderr
