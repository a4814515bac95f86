"""`/v1/queries`, with an agent that does what the test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.embedded import EmbeddedMesh, serving_gateway
from services.gateway.params import GatewayParams
from services.gateway.tenants import new_key
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.contracts.agents import AgentNotice
from shared.contracts.codec import decode, encode
from shared.contracts.messages import CancelQuery, QueryRequest, QueryResult
from shared.contracts.query_events import QueryEvent, encode_event, event_stream
from shared.contracts.topics import CANCELLATIONS, QUERIES, QUERY_RESULTS
from shared.ports import TopicPartition
from shared.sdk import announce_agent
from tests.support.gateway import gateway_mesh, gateway_of, quick_fleet, until

ASK = {"question": "how many orders were late?", "database": "shop"}


class Agent:
    """Answers questions; holds them back while `holds` is set."""

    def __init__(self, mesh: EmbeddedMesh, store: RedisStore) -> None:
        self.asked: list[QueryRequest] = []
        self.cancelled: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self._mesh = mesh
        self._store = store

    async def answer(self, request: QueryRequest) -> None:
        """Work on a question."""
        at_s = self._mesh.clock.now_s()
        events = (
            QueryEvent(kind="began", at_s=at_s),
            QueryEvent(kind="stage_began", at_s=at_s, stage="generate_candidate", siblings=2),
        )
        for index, event in enumerate(events):
            name = event_stream(request.query_id)
            await self._store.append_chunk(name, 0, index, encode_event(event))
        await self.go.wait()
        result = QueryResult(
            query_id=request.query_id, kind="completed", answer="7", sql="select 7", rows=((7,),)
        )
        await self._mesh.broker.publish(
            self._mesh.topics.name(QUERY_RESULTS),
            encode(result),
            key=request.query_id.encode(),
            partition=request.reply_to.partition,
        )


async def _read(mesh: EmbeddedMesh, topic: str, take: Callable[[bytes], Any]) -> None:
    name = mesh.topics.name(topic)
    count = await mesh.broker.partitions_of(name)
    partitions = [TopicPartition(name, index) for index in range(count)]
    async with mesh.broker.partition_consumer(partitions, start="beginning") as consumer:
        while True:
            for record in await consumer.fetch(timeout_s=0.1):
                take(record.value or b"")


@asynccontextmanager
async def working(mesh: EmbeddedMesh) -> AsyncIterator[Agent]:
    """Run an agent."""
    async with (
        RedisStore.open(RedisParams(url=mesh.state_url)) as store,
        asyncio.TaskGroup() as group,
    ):
        agent = Agent(mesh, store)
        notice = AgentNotice(workflows={"text2sql": True}, databases=("shop",), lease_s=600.0)
        await announce_agent(store, "agent", notice)

        def take(value: bytes) -> None:
            request = decode(value, QueryRequest)
            agent.asked.append(request)
            group.create_task(agent.answer(request))

        def see(value: bytes) -> None:
            agent.cancelled.append(decode(value, CancelQuery).query_id)

        readers = [
            group.create_task(_read(mesh, QUERIES, take)),
            group.create_task(_read(mesh, CANCELLATIONS, see)),
        ]
        yield agent
        agent.go.set()
        for reader in readers:
            reader.cancel()


@pytest.fixture
async def mesh() -> AsyncIterator[EmbeddedMesh]:
    """Return a mesh with a gateway."""
    async with gateway_mesh(quick_fleet(1)) as opened:
        yield opened


@pytest.fixture
async def http(mesh: EmbeddedMesh) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of its gateway."""
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=60.0) as client:
        yield client


def events_of(text: str) -> list[tuple[str, Any]]:
    """Return the (name, data) of every event in a stream."""
    found = []
    for part in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.splitlines() if ": " in line)
        if "data" in lines:
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


async def test_a_question_is_answered_with_its_stages_on_the_way(
    mesh: EmbeddedMesh, http: httpx.AsyncClient
):
    """The stream tells the id, then what the agent does, then the result."""
    async with working(mesh) as agent:
        agent.go.clear()
        async with http.stream("POST", "/v1/queries", json={**ASK, "slo_s": 60}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            text = ""
            async for part in answer.aiter_text():
                text += part
                if "stage_began" in text:
                    agent.go.set()
        names = [name for name, _ in events_of(text)]
        assert names == ["query", "began", "stage_began", "result"]
        result = events_of(text)[-1][1]
        assert (result["kind"], result["answer"], result["rows"]) == ("completed", "7", [[7]])
        (asked,) = agent.asked
        assert (asked.question, asked.database, asked.slo_s) == (ASK["question"], "shop", 60.0)


async def test_the_result_alone(mesh: EmbeddedMesh, http: httpx.AsyncClient):
    """Without a stream the answer is one JSON object, and can be looked at again."""
    async with working(mesh):
        answer = await http.post("/v1/queries", json={**ASK, "stream": False, "query_id": "mine"})
        assert answer.status_code == 200
        assert answer.json()["result"]["answer"] == "7"
        again = await http.get("/v1/queries/mine")
        assert (again.json()["state"], again.json()["result"]["sql"]) == ("ended", "select 7")
        assert (await http.get("/v1/queries/other")).status_code == 404


async def test_a_question_asked_twice_is_asked_once(mesh: EmbeddedMesh, http: httpx.AsyncClient):
    """The same idempotency key attaches to the same question; another question under it is 409."""
    async with working(mesh) as agent:
        headers = {"idempotency-key": "k1"}
        answers = await asyncio.gather(
            *(
                http.post("/v1/queries", json={**ASK, "stream": False}, headers=headers)
                for _ in range(3)
            )
        )
        assert len({answer.json()["query_id"] for answer in answers}) == 1
        assert len(agent.asked) == 1
        other = await http.post("/v1/queries", json={"question": "other"}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")


async def test_a_client_that_leaves_leaves_its_question_running(
    mesh: EmbeddedMesh, http: httpx.AsyncClient
):
    """It can come back to the stream; `DELETE` cancels, and only while the question runs."""
    async with working(mesh) as agent:
        agent.go.clear()
        body = {**ASK, "query_id": "long"}
        async with http.stream("POST", "/v1/queries", json=body) as answer:
            async for _ in answer.aiter_text():
                break
        assert (await http.get("/v1/queries/long")).json()["state"] == "running"
        assert (await http.delete("/v1/queries/long")).status_code == 202
        await until(lambda: agent.cancelled == ["long"], "no tombstone")
        agent.go.set()
        back = await http.get("/v1/queries/long", params={"stream": "true"})
        assert [name for name, _ in events_of(back.text)][-1] == "result"
        assert (await http.delete("/v1/queries/long")).status_code == 409


async def test_a_question_that_nobody_answers_ends_in_time():
    """Without an agent the client gets 504, and the question is cancelled."""
    async with gateway_mesh(quick_fleet(1), late_s=0.0) as other, working(other) as agent:
        agent.go.clear()
        async with httpx.AsyncClient(base_url=other.gateway_url, timeout=60.0) as client:
            answer = await client.post("/v1/queries", json={**ASK, "stream": False, "slo_s": 0.3})
        assert answer.status_code == 504
        assert answer.json()["result"]["reason"] == "deadline_passed"
        await until(lambda: len(agent.cancelled) == 1, "no tombstone")


async def test_another_replica_knows_the_result(mesh: EmbeddedMesh, http: httpx.AsyncClient):
    """What one gateway asked can be looked at through another one."""
    async with (
        working(mesh),
        RedisStore.open(RedisParams(url=mesh.state_url)) as store,
        serving_gateway(
            mesh,
            store,
            GatewayParams(gateway_id="second", reply_partition=1),
            ("127.0.0.1", 0),
            2.0,
        ),
        httpx.AsyncClient(base_url=list(mesh.gateways)[1], timeout=60.0) as second,
    ):
        await http.post("/v1/queries", json={**ASK, "stream": False, "query_id": "shared"})
        found = await second.get("/v1/queries/shared")
        assert (found.json()["state"], found.json()["result"]["answer"]) == ("ended", "7")
        assert (await second.delete("/v1/queries/shared")).status_code == 409


async def test_tenants_cannot_see_or_cancel_each_others_questions(tmp_path: Path):
    """A query id of another tenant is not known, whatever key an ordinary tenant has."""
    (acme, acme_stored), (zeta, zeta_stored) = new_key(), new_key()
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[tenants.acme]\nkeys = ["{acme_stored}"]\n[tenants.zeta]\nkeys = ["{zeta_stored}"]\n'
    )
    async with (  # noqa: SIM117 - the client needs the mesh's address
        gateway_mesh(quick_fleet(1), keys_file=file) as mesh,
        working(mesh),
    ):
        async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=60.0) as client:
            own = {"authorization": f"Bearer {acme}"}
            other = {"authorization": f"Bearer {zeta}"}
            body = {**ASK, "stream": False, "query_id": "q"}
            assert (await client.post("/v1/queries", json=body, headers=own)).status_code == 200
            told = (await client.get("/v1/queries/q", headers=own)).json()["query_id"]
            assert told == "acme/q"
            assert (await client.get(f"/v1/queries/{told}", headers=own)).status_code == 200
            for name in ("q", "acme/q"):
                assert (await client.get(f"/v1/queries/{name}", headers=other)).status_code == 404
                gone = await client.delete(f"/v1/queries/{name}", headers=other)
                assert gone.status_code == 404
            assert (await client.get("/v1/queries/q")).status_code == 401


async def test_a_model_that_nobody_offers_is_told_at_once(
    mesh: EmbeddedMesh, http: httpx.AsyncClient
):
    """As for chats: 404 with the nearest name, and no query begins."""
    await until(gateway_of(mesh).fleet.has_any, "no instance is live")
    async with working(mesh):
        answer = await http.post("/v1/queries", json={**ASK, "model": "defalt"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "default" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        (b"{}", "question", "missing"),
        (b'{"question": ""}', "question", "length"),
        (b'{"question": " \\n"}', "question", "no question"),
        (b'{"question": "x", "databse": "y"}', "databse", "did you mean database?"),
        (b'{"question": "x", "slo_s": "soon"}', "slo_s", "float"),
        (b"[]", None, "object"),
        (b"\xff", None, "UTF-8"),
    ],
)
async def test_a_wrong_question_is_a_400(
    http: httpx.AsyncClient, body: bytes, param: str | None, told: str
):
    """A missing, empty or misspelt field is told at once, by its name."""
    answer = await http.post("/v1/queries", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert told in error["message"]
