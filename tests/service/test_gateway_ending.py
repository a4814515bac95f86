"""A gateway that has to go while requests are open."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from services.cli.embedded import EmbeddedMesh, serving_gateway
from services.gateway.params import GatewayParams
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.contracts.agents import AgentNotice
from shared.contracts.codec import encode
from shared.contracts.messages import QueryResult
from shared.contracts.topics import QUERY_RESULTS
from shared.domain.instance import LatencyModel
from shared.sdk import announce_agent
from tests.support.gateway import gateway_mesh, quick_fleet, until

LONG = {
    "model": "default",
    "messages": [{"role": "user", "content": "tell me everything"}],
}
DRAIN_S = 0.2


@asynccontextmanager
async def second_gateway(
    mesh: EmbeddedMesh, ending: AsyncExitStack, drain_s: float = DRAIN_S
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a gateway that ends with `ending`, whatever is open."""
    store = await ending.enter_async_context(RedisStore.open(RedisParams(url=mesh.state_url)))
    params = GatewayParams(gateway_id="second", reply_partition=1)
    address = ("127.0.0.1", 0)
    await ending.enter_async_context(serving_gateway(mesh, store, params, address, drain_s))
    async with httpx.AsyncClient(base_url=list(mesh.gateways)[1], timeout=60.0) as client:
        yield client


async def announce(mesh: EmbeddedMesh) -> None:
    """Say that there is an agent."""
    async with RedisStore.open(RedisParams(url=mesh.state_url)) as store:
        notice = AgentNotice(workflows={"text2sql": True}, databases=None, lease_s=600.0)
        await announce_agent(store, "agent", notice)


@pytest.fixture
async def mesh() -> AsyncIterator[EmbeddedMesh]:
    """Return a mesh whose calls take a minute or so."""
    slow = LatencyModel(prefill_s_per_token=1e-7, weights_s=0.3)
    async with gateway_mesh(quick_fleet(1, latency=slow)) as opened:
        yield opened


async def test_open_requests_are_told_that_the_gateway_stops(
    mesh: EmbeddedMesh, caplog: pytest.LogCaptureFixture
):
    """503 to come back where nothing was sent, an error event where a stream had begun."""
    with caplog.at_level(logging.WARNING):
        async with AsyncExitStack() as ending, second_gateway(mesh, ending) as client:
            whole = asyncio.create_task(client.post("/v1/chat/completions", json=LONG))
            body = {**LONG, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                await until(lambda: not whole.done(), "it was answered")
                await ending.aclose()
                last = [line async for line in lines if line][-1]
            refused = await whole
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
    assert int(refused.headers["retry-after"]) == 1
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
    assert [one for one in caplog.records if one.name.startswith("uvicorn")] == []


async def test_a_question_that_is_followed_is_told_too(mesh: EmbeddedMesh):
    """Its stream ends with an error; the question itself goes on."""
    async with AsyncExitStack() as ending, second_gateway(mesh, ending) as client:
        await announce(mesh)
        asked = {"question": "?", "query_id": "mine", "slo_s": 600}
        async with client.stream("POST", "/v1/queries", json=asked) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: query"
            await ending.aclose()
            last = [line async for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
    async with httpx.AsyncClient(base_url=mesh.gateway_url) as first:
        assert (await first.get("/v1/queries/mine")).json()["state"] == "running"


async def test_a_question_that_nobody_follows_is_waited_for(mesh: EmbeddedMesh):
    """Its result comes while the gateway drains: any other one can tell it afterwards."""
    async with AsyncExitStack() as ending, second_gateway(mesh, ending, drain_s=60.0) as client:
        await announce(mesh)
        asked = {"question": "?", "query_id": "left", "slo_s": 600}
        async with client.stream("POST", "/v1/queries", json=asked) as answer:
            assert await anext(answer.aiter_lines()) == "event: query"
        closing = asyncio.create_task(ending.aclose())
        ended, _ = await asyncio.wait({closing}, timeout=1.0)
        assert not ended
        async with httpx.AsyncClient(base_url=mesh.gateway_url) as first:
            assert (await first.get("/v1/queries/left")).json()["state"] == "running"
            result = QueryResult(query_id="left", kind="completed", answer="7")
            await mesh.broker.publish(
                mesh.topics.name(QUERY_RESULTS), encode(result), key=b"left", partition=1
            )
            await closing
            found = (await first.get("/v1/queries/left")).json()
    assert (found["state"], found["result"]["answer"]) == ("ended", "7")
