"""A mesh whose only engine is a server that takes no calls: deadlines decide how long it waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from services.cli.embedded import EmbeddedParams, open_embedded
from services.gateway.params import GatewayParams
from shared.adapters.openai_engine import OpenAIEngine
from shared.adapters.openai_params import OpenAIParams
from shared.domain.instance import InstanceSpec
from shared.ports import Clock, Engine
from shared.runtime.settings import MAX_ATTEMPTS
from tests.support.gateway import quick_fleet
from tests.support.openai_server import FakeServer, answers_status, fake_server

NUM_CALLS = 12
FOR_EVER = 100_000
WITHIN_S = 60.0


@asynccontextmanager
async def mesh_before(server: FakeServer) -> AsyncIterator[httpx.AsyncClient]:
    """Run a mesh with a gateway in front of one server, and give a client of it."""
    params = OpenAIParams(
        url=server.url,
        retries=0,
        failure_threshold=2,
        failure_pause_s=0.05,
        longest_failure_pause_s=0.1,
    )

    @asynccontextmanager
    async def opened(spec: InstanceSpec, clock: Clock) -> AsyncIterator[Engine]:
        async with OpenAIEngine.open(spec, params, clock) as engine:
            yield engine

    mesh_params = EmbeddedParams(
        fleet=quick_fleet(1), tunes=False, drain_s=1.0, open_engine=opened, gateway=GatewayParams()
    )
    async with (
        open_embedded(mesh_params) as mesh,
        httpx.AsyncClient(base_url=mesh.gateway_url, timeout=WITHIN_S) as http,
    ):
        yield http


async def ask_all(http: httpx.AsyncClient, slo_s: float) -> list[httpx.Response]:
    """Send calls at one instant; return their answers."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "how many"}],
        "max_tokens": 2,
        "hexflow": {"slo_s": slo_s},
    }
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(http.post("/v1/chat/completions", json=body), name=f"call-{index}")
            for index in range(NUM_CALLS)
        ]
    return [task.result() for task in tasks]


@pytest.mark.parametrize("status", [500, 429])
async def test_late_calls_are_told_together(status: int):
    """Each try takes a pause: nobody is tried call by call once its deadline has passed."""
    server = FakeServer(faults=[answers_status(status)] * FOR_EVER)
    async with fake_server(server), mesh_before(server) as http:
        answers = await ask_all(http, slo_s=0.5)
    errors = [answer.json()["error"] for answer in answers]
    assert {answer.status_code for answer in answers} == {503}
    assert {error["code"] for error in errors} == {"engine_unavailable"}
    assert all("retry-after" in answer.headers for answer in answers)
    assert all(f"HTTP {status}" in error["message"] for error in errors)


async def test_calls_wait_for_a_server_that_comes_back_in_time():
    """What the server never took is no attempt of a call: after many tries all are answered."""
    faults = [answers_status(503)] * (4 * MAX_ATTEMPTS)
    server = FakeServer(faults=list(faults))
    async with fake_server(server), mesh_before(server) as http:
        answers = await ask_all(http, slo_s=600.0)
    assert {answer.status_code for answer in answers} == {200}
    assert len(server.bodies) == len(faults) + NUM_CALLS
