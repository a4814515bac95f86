"""Every service of a mesh is restarted under load over HTTP, and no client notices.

The load: chat completions, whole and streamed, and questions to agents, through two gateways. What
every answer has to be is known beforehand, so an answer that is cut, or another's, shows.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.cli.chaos.servers import own_servers
from services.cli.options import mesh_settings
from services.cli.processes import ProcessesParams, ProcessMesh, open_processes
from services.text2sql.samples.writing import sample_file, sample_questions
from services.text2sql.scripted.model import ScriptedModel
from shared.adapters.local_process import free_port
from shared.contracts.codec import decode
from shared.contracts.messages import QueryResult
from shared.contracts.topics import LATENCY_EVENTS, QUERY_RESULTS, STAGE_REQUESTS
from shared.ports import TopicPartition
from shared.runtime.settings import MeshSettings
from tests.support.gateway import quick_fleet
from tests.support.gateway_clients import Front, Load
from tests.support.openai_server import FakeServer, fake_server
from tests.support.scripted_server import ScriptedServer

pytestmark = [pytest.mark.chaos, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_CHATS, NUM_QUESTIONS = 8, 6
NUM_KNOWN = 16
ROUNDS = 2
LAST_ROUND_BEGINS_S = 150.0
"""On a slow machine one round has to do."""
CAPACITY = 6
"""Calls at a time in an engine: fewer than there are, so that some wait."""
GRACE_S = 60.0
"""Well above the services' own bound: whoever needs it hangs."""
WITHIN_S = 120.0
POLL_S = 0.02
TAKES = {"dispatcher": STAGE_REQUESTS, "tuner": LATENCY_EVENTS}
"""Services whose work is over in a moment -> what they take."""
WAYS = {
    *("chat", "stream"),
    *("followed", "whole", "left"),
    *("on a kept connection", "on a new connection"),
}
ALARMS = ("Traceback", "drain_overrun", "request_failed", "answer_broken", "question_raised")


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """One process stopped and started.

    Attributes:
        name: Which.
        work: Calls, requests or questions that it had when it was told to stop.
        pids: Before and after.
        stop_s: How long it took to end, wall seconds.
    """

    name: str
    work: int
    pids: tuple[int, int]
    stop_s: float


class Mesh:
    """All that runs.

    Args:
        processes: The services.
        front: What chooses a gateway.
        servers: Instance -> the server that its worker stands before.
    """

    def __init__(
        self, processes: ProcessMesh, front: Front, servers: dict[str, FakeServer]
    ) -> None:
        self.processes = processes
        self.front = front
        self._servers = servers

    async def roll(self) -> list[Restart]:
        """Restart every process, one after the other."""
        return [await self._restart(name) for name in self.processes.processes]

    async def _restart(self, name: str) -> Restart:
        process = self.processes.processes[name]
        work = await self._work_of(name)
        before, began_s = self.processes.pids[name], time.monotonic()
        await asyncio.to_thread(process.stop, GRACE_S)
        stop_s = time.monotonic() - began_s
        await asyncio.to_thread(process.start)
        async with asyncio.timeout(WITHIN_S):
            while not await asyncio.to_thread(self.processes.is_ready, name):
                assert process.is_running, process.log_tail(30)
                await asyncio.sleep(POLL_S)
        pids = (before, self.processes.pids[name])
        return Restart(name=name, work=work, pids=pids, stop_s=stop_s)

    async def _work_of(self, name: str) -> int:
        """Return how much a process has to do, once that is something."""
        taken = await self._taken(name)
        async with asyncio.timeout(WITHIN_S):
            while not (work := await self._at_work(name, taken)):
                await asyncio.sleep(POLL_S)
        return work

    async def _at_work(self, name: str, taken: int) -> int:
        service, _, rest = name.partition("-")
        if service == "worker":
            return self._servers[rest].active
        if service == "gateway":
            return self.front.num_open[name]
        if service == "text2sql":
            return await self._metric(name, "hexflow_queries_open", {})
        return await self._taken(name) - taken

    async def _taken(self, name: str) -> int:
        """Return how much a service that holds nothing for long has taken so far."""
        topic = TAKES.get(name.partition("-")[0])
        if topic is None:
            return 0
        return await self._metric(name, "hexflow_messages_read_total", {"topic": topic})

    async def _metric(self, name: str, metric: str, labels: dict[str, str]) -> int:
        text = await asyncio.to_thread(self.processes.metrics, name)
        return int(
            sum(
                sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == metric and labels.items() <= sample.labels.items()
            )
        )

    async def results(self) -> Counter[str]:
        """Return how many results each question has, from the raw topic."""
        name = self.processes.topics.name(QUERY_RESULTS)
        count = await self.processes.broker.partitions_of(name)
        tps = [TopicPartition(name, index) for index in range(count)]
        found: Counter[str] = Counter()
        async with self.processes.broker.partition_consumer(tps, start="beginning") as consumer:
            for tp, end in (await consumer.end_offsets()).items():
                while await consumer.position(tp) < end:
                    for record in await consumer.fetch(timeout_s=1.0):
                        found[decode(record.value or b"", QueryResult).query_id] += 1
        return found


@asynccontextmanager
async def open_mesh(folder: Path, model: ScriptedModel) -> AsyncIterator[Mesh]:
    """Run two of everything (and a tuner) on a Kafka and a Redis of its own."""
    fleet = quick_fleet(2)
    ports = (free_port(), free_port())
    async with AsyncExitStack() as stack:
        servers = {
            spec.instance_id: await stack.enter_async_context(fake_server(ScriptedServer(model)))
            for spec in fleet
        }
        own = await stack.enter_async_context(own_servers(folder, _quiet))
        params = ProcessesParams(
            fleet=fleet,
            worker_variables={
                instance_id: {
                    "WORKER_ENGINE": "openai",
                    "WORKER_OPENAI__URL": server.url,
                    "WORKER_CAPACITY": str(CAPACITY),
                }
                for instance_id, server in servers.items()
            },
            agents=2,
            databases={"league": sample_file("league", folder)},
            gateway_ports=ports,
        )
        processes = await stack.enter_async_context(
            open_processes(_settings(own.bootstrap, own.redis_url), params, folder)
        )
        names = dict(zip(("gateway-0", "gateway-1"), ports, strict=True))
        probes = {name: processes.ports[name] for name in names}
        front = await stack.enter_async_context(Front.open(names, probes))
        yield Mesh(processes, front, servers)


def _settings(kafka: str, redis: str) -> MeshSettings:
    settings = mesh_settings(kafka=kafka, redis=redis, time_scale=1.0)
    topics = settings.topics.model_copy(update={"prefix": f"roll-{secrets.token_hex(3)}."})
    return settings.model_copy(update={"topics": topics})


def _quiet(_: str) -> None:
    """Say nothing."""


def alarms(folder: Path) -> list[str]:
    """Return what should not be in the services' logs."""
    return [
        f"{path.name}: {line}"
        for path in sorted(folder.glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if any(word in line for word in ALARMS)
    ]


async def test_no_client_notices_that_every_service_is_restarted(
    tmp_path: Path, record_property: Callable[[str, object], None]
):
    """Each process ends with work in hand and comes back; every answer is whole, right and one."""
    known = sample_questions("league").questions[:NUM_KNOWN]
    stop, restarts = asyncio.Event(), list[Restart]()
    async with open_mesh(tmp_path, ScriptedModel(known)) as mesh:
        load = Load(mesh.front, known)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(load.run(NUM_CHATS, NUM_QUESTIONS, stop), name="load")
            began_s = time.monotonic()
            for _ in range(ROUNDS):
                restarts += await mesh.roll()
                if time.monotonic() - began_s > LAST_ROUND_BEGINS_S:
                    break
            rolled_s = time.monotonic() - began_s
            stop.set()
            async with asyncio.timeout(WITHIN_S):
                await asking
        results = await mesh.results()
        pids, ended = mesh.processes.pids, mesh.processes.ended()
    figures = {
        "rolled_s": round(rolled_s, 1),
        "restarts": [(one.name, one.work, round(one.stop_s, 1)) for one in restarts],
        "answered": dict(load.num_ended),
        "refused": mesh.front.num_refused,
    }
    print(figures)  # noqa: T201 - what a run came to, with -s
    for name, value in figures.items():
        record_property(name, value)
    assert load.failures == []
    assert results == dict.fromkeys(load.query_ids, 1)
    assert ended == {}
    assert pids == {one.name: one.pids[1] for one in restarts}  # the last of each: nobody else's
    assert all(one.pids[0] != one.pids[1] for one in restarts)
    assert {one.name for one in restarts if not one.work} == set()
    assert {one.name for one in restarts if one.stop_s >= GRACE_S} == set()
    assert set(load.num_ended) == WAYS
    assert alarms(tmp_path) == []
