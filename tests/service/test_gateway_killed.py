"""Questions whose gateway is gone before their result comes: any other one tells it.

The gateways here end with open questions and no patience, which loses what a SIGKILL loses; the
last test kills a process on real servers.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from services.cli.embedded import EmbeddedMesh, EmbeddedParams, open_embedded, serving_gateway
from services.cli.options import mesh_settings
from services.cli.processes import ProcessesParams, ProcessMesh, open_processes
from services.gateway.params import GatewayParams
from services.gateway.result_recorder import GROUP
from services.gateway.tenants import new_key
from shared.adapters.local_process import free_port
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.contracts.codec import encode
from shared.contracts.messages import QueryResult
from shared.contracts.topics import QUERIES, QUERY_RESULTS
from shared.errors import StateUnavailable
from shared.ports import TopicPartition
from tests.support.gateway import quick_fleet, until
from tests.support.servers import KafkaServer, RedisServer

PATIENCE_S = 60.0
ASK = {"question": "?", "query_id": "mine", "slo_s": 600}


class Faltering(RedisStore):
    """A store that is away at times, and counts the looks at questions meanwhile."""

    is_away = False
    num_looks = 0

    async def append_chunk(self, request_id: str, attempt: int, index: int, text: str) -> None:
        """Append, unless it is away."""
        self._check()
        await super().append_chunk(request_id, attempt, index, text)

    async def read_chunks(
        self, after: Mapping[str, str], *, wait_s: float
    ) -> dict[str, list[tuple[str, int, int, str]]]:
        """Read, unless it is away."""
        self.num_looks += self.is_away and "query-state/mine" in after
        self._check()
        return await super().read_chunks(after, wait_s=wait_s)

    def _check(self) -> None:
        if self.is_away:
            raise StateUnavailable("the test says so")


class Place:
    """A mesh whose gateways come and go.

    Args:
        mesh: The rest of the mesh.
    """

    def __init__(self, mesh: EmbeddedMesh) -> None:
        self.mesh = mesh
        self.topic = mesh.topics.name(QUERY_RESULTS)

    @asynccontextmanager
    async def gateway(
        self, partition: int, store: RedisStore | None = None, **params: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        """Yield a client of a gateway, which ends with the block whatever is open."""
        async with AsyncExitStack() as stack:
            if store is None:
                opened = RedisStore.open(RedisParams(url=self.mesh.state_url))
                store = await stack.enter_async_context(opened)
            own = GatewayParams(
                gateway_id=f"gateway-{partition}",
                reply_partition=partition,
                asks_unannounced=True,
                **params,
            )
            address = ("127.0.0.1", 0)
            await stack.enter_async_context(serving_gateway(self.mesh, store, own, address, 0.2))
            url = list(self.mesh.gateways)[-1]
            yield await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60.0))

    async def tell(self, partition: int, value: bytes, query_id: str = "mine") -> None:
        """Publish a record as the result of a question."""
        key = query_id.encode()
        await self.mesh.broker.publish(self.topic, value, key=key, partition=partition)

    async def committed(self, partition: int) -> int:
        """Return up to where the gateways have recorded a partition's results."""
        tp, group = TopicPartition(self.topic, partition), self.mesh.topics.group(GROUP)
        reading = self.mesh.broker.partition_consumer([tp], start="end", group=group)
        async with reading as consumer:
            found = await consumer.committed(tp)
        return found.offset if found is not None else 0

    async def all_committed(self, partition: int, end: int) -> None:
        """Return when everything before an offset is done."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.committed(partition) < end:
                await asyncio.sleep(0.01)

    async def num_asked(self) -> int:
        """Return how many questions agents got."""
        name = self.mesh.topics.name(QUERIES)
        count = await self.mesh.broker.partitions_of(name)
        tps = [TopicPartition(name, index) for index in range(count)]
        async with self.mesh.broker.partition_consumer(tps, start="end") as consumer:
            return sum((await consumer.end_offsets()).values())


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    """Return a mesh without gateways."""
    params = EmbeddedParams(fleet=quick_fleet(1), tunes=False, drain_s=5.0)
    async with open_embedded(params) as mesh:
        yield Place(mesh)


def answer(text: str, query_id: str = "mine") -> bytes:
    """Return a result."""
    return encode(QueryResult(query_id=query_id, kind="completed", answer=text))


async def ask(client: httpx.AsyncClient, query_id: str = "mine", **headers: str) -> None:
    """Ask, and leave when the question is on its way."""
    asked = {**ASK, "query_id": query_id}
    async with client.stream("POST", "/v1/queries", json=asked, headers=headers) as told:
        assert await anext(told.aiter_lines()) == "event: query"


async def ended(
    client: httpx.AsyncClient, query_id: str = "mine", **headers: str
) -> dict[str, Any]:
    """Return what a gateway says of a question once it says that it has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = (await client.get(f"/v1/queries/{query_id}", headers=headers)).json()
            if found.get("state") == "ended":
                return found
            assert found.get("state") == "running", found
            await asyncio.sleep(0.01)


async def test_another_gateway_tells_the_answer_once(place: Place):
    """The first result is told and stays, and the question is asked once."""
    async with place.gateway(0) as other:
        async with place.gateway(1) as first:
            await ask(first)
        assert (await other.get("/v1/queries/mine")).json()["state"] == "running"
        await place.tell(1, answer("7"))
        assert (await ended(other))["result"]["answer"] == "7"
        await place.tell(1, answer("8"))
        await place.all_committed(1, 2)
        assert (await ended(other))["result"]["answer"] == "7"
    assert await place.num_asked() == 1


async def test_its_next_life_tells_what_came_while_there_was_none(place: Place):
    """A gateway that comes back, with no other one meanwhile, begins where results were left."""
    async with place.gateway(1) as first:
        await ask(first)
    await place.tell(1, answer("7"))
    async with place.gateway(1) as again:
        assert (await ended(again))["result"]["answer"] == "7"


async def test_a_gateway_takes_over_from_the_one_that_recorded_for_all(place: Place):
    """It is there already when that one goes, and tells what comes from then on."""
    async with AsyncExitStack() as ending:
        first = await ending.enter_async_context(place.gateway(1))
        async with place.gateway(0) as other:
            await ask(first)
            await ending.aclose()
            await place.tell(1, answer("7"))
            assert (await ended(other))["result"]["answer"] == "7"


async def test_nothing_is_committed_while_the_state_store_is_away(place: Place):
    """A result that comes meanwhile is recorded when the store is back."""
    async with (
        Faltering.open(RedisParams(url=place.mesh.state_url)) as store,
        place.gateway(0, store) as other,
    ):
        async with place.gateway(1) as first:
            await ask(first)
        store.is_away = True
        await place.tell(1, answer("7"))
        await until(lambda: store.num_looks > 1, "nobody tried again")
        assert await place.committed(1) == 0
        store.is_away = False
        assert (await ended(other))["result"]["answer"] == "7"
        await place.all_committed(1, 1)


async def test_an_owner_whose_record_was_lost_is_helped(place: Place):
    """A gateway lives, but the store was away for it when the result came: others tell it."""
    async with (
        Faltering.open(RedisParams(url=place.mesh.state_url)) as store,
        place.gateway(0) as other,
        place.gateway(1, store) as first,
    ):
        await ask(first)
        store.is_away = True
        await place.tell(1, answer("7"))
        assert (await ended(other))["result"]["answer"] == "7"
        assert (await ended(first))["result"]["answer"] == "7"


async def test_what_is_no_result_of_a_question_of_a_gateway_is_passed_over(place: Place):
    """Results that other producers wait for, unreadable ones, and such under another's name."""
    async with place.gateway(0) as other:
        async with place.gateway(1) as first:
            await ask(first)
        await place.tell(2, answer("another partition's"))
        await place.all_committed(2, 1)
        await place.tell(1, answer("theirs", "theirs"), "theirs")
        await place.tell(1, b"\xff")
        await place.tell(1, answer("not mine", "theirs"))
        await place.mesh.broker.publish(place.topic, answer("7"), key=b"\xff", partition=1)
        await place.all_committed(1, 4)
        assert (await other.get("/v1/queries/mine")).json()["state"] == "running"
        assert (await other.get("/v1/queries/theirs")).status_code == 404
        await place.tell(1, answer("7"))
        assert (await ended(other))["result"]["answer"] == "7"


async def test_only_its_tenant_is_told(place: Place, tmp_path: Path):
    """Whatever tenant the result names."""
    keys = {name: new_key() for name in ("acme", "globex")}
    lines = [f'[tenants.{name}]\nkeys = ["{line}"]' for name, (_, line) in keys.items()]
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(lines))
    bearers = {name: f"Bearer {key}" for name, (key, _) in keys.items()}
    async with place.gateway(0, keys_file=path) as other:
        async with place.gateway(1, keys_file=path) as first:
            await ask(first, authorization=bearers["acme"])
        result = QueryResult(query_id="acme/mine", kind="completed", answer="7", tenant="globex")
        await place.tell(1, encode(result), "acme/mine")
        found = await ended(other, authorization=bearers["acme"])
        assert found["result"]["answer"] == "7"
        for name in ("mine", "acme%2Fmine"):
            headers = {"authorization": bearers["globex"]}
            assert (await other.get(f"/v1/queries/{name}", headers=headers)).status_code == 404


class Pair(NamedTuple):
    """Two gateways as processes.

    Attributes:
        mesh: They, and a mesh behind them that nobody asks.
        urls: Where they are served.
    """

    mesh: ProcessMesh
    urls: tuple[str, ...]


@pytest.fixture
async def pair(
    kafka_server: KafkaServer, redis_server: RedisServer, tmp_path: Path
) -> AsyncIterator[Pair]:
    """Return two gateways."""
    base = mesh_settings(kafka=kafka_server.bootstrap, redis=redis_server.url, time_scale=1.0)
    prefix = f"killed-{secrets.token_hex(4)}."
    settings = base.model_copy(update={"topics": base.topics.model_copy(update={"prefix": prefix})})
    ports = (free_port(), free_port())
    params = ProcessesParams(
        fleet=quick_fleet(1),
        dispatchers=1,
        tunes=False,
        gateway_ports=ports,
        extra={"GATEWAY_ASKS_UNANNOUNCED": "true"},
    )
    async with open_processes(settings, params, tmp_path) as mesh:
        yield Pair(mesh, tuple(f"http://127.0.0.1:{port}" for port in ports))


@pytest.mark.real
@pytest.mark.slow
async def test_a_killed_gateways_question_is_told_by_another(pair: Pair):
    """On Kafka and Redis, by SIGKILL, whichever of them recorded the results of that partition.

    The question of the one that is killed second is told by the other one's next life.
    """
    mesh, name = pair.mesh, pair.mesh.topics.name(QUERY_RESULTS)
    for victim, witness in ((1, 0), (0, 1)):
        killed = mesh.processes[f"gateway-{victim}"]
        query_id = f"asked-{victim}"
        async with httpx.AsyncClient(base_url=pair.urls[victim]) as client:
            await ask(client, query_id)
        await asyncio.to_thread(killed.kill)
        key = query_id.encode()
        await mesh.broker.publish(name, answer("7", query_id), key=key, partition=victim)
        async with httpx.AsyncClient(base_url=pair.urls[witness]) as client:
            assert (await ended(client, query_id))["result"]["answer"] == "7"
        await asyncio.to_thread(killed.start)
        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(mesh.is_ready, killed.name):
                await asyncio.sleep(0.1)
