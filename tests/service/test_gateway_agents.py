"""Questions that nobody could answer, as the gateway refuses them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.embedded import EmbeddedMesh, EmbeddedParams, open_embedded
from services.gateway.agents import Agents
from services.gateway.params import GatewayParams
from services.gateway.problems import Problem
from services.text2sql.params import AgentParams
from services.text2sql.samples.writing import sample_file
from shared.adapters.clock import ManualClock
from shared.adapters.memory_store import MemoryStore
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.contracts.agents import AgentNotice
from shared.contracts.messages import QueryRequest
from shared.errors import StateUnavailable
from shared.sdk import agents_of, announce_agent
from tests.support.gateway import gateway_mesh, quick_fleet

ASK = {"question": "How many teams play in the league?", "stream": False, "slo_s": 600}
LEAGUE = AgentNotice(workflows={"text2sql": True}, databases=("league",), lease_s=60.0)
QUESTION = QueryRequest(query_id="q", question="?", database="league")
REFUSED_WITHIN_S = 60.0  # far below the questions' own deadline


@pytest.fixture
async def mesh() -> AsyncIterator[EmbeddedMesh]:
    """Return a mesh with a gateway and no agent."""
    async with gateway_mesh(quick_fleet(1)) as opened:
        yield opened


async def asked(mesh: EmbeddedMesh, **named: Any) -> httpx.Response:
    """Return what a gateway says to a question."""
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=REFUSED_WITHIN_S) as client:
        return await client.post("/v1/queries", json={**ASK, **named})


async def test_without_an_agent_a_question_is_refused_at_once(mesh: EmbeddedMesh):
    """503 with what to start, streamed or not, and nothing on the mesh is left behind."""
    for stream in (False, True):
        answer = await asked(mesh, stream=stream, query_id="mine")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (
            503,
            "no_agent",
            "server_error",
        )
        assert "hexflow up --db" in error["message"]
        assert "python -m services.text2sql" in error["message"]
        assert int(answer.headers["retry-after"]) > 0
    async with httpx.AsyncClient(base_url=mesh.gateway_url) as client:
        assert (await client.get("/v1/queries/mine")).status_code == 404


@pytest.mark.parametrize(
    ("wrong", "code", "told"),
    [
        ({"database": "leage"}, "unknown_database", "did you mean league?"),
        ({"database": "league", "workflow": "text2sq"}, "unknown_workflow", "mean text2sql?"),
    ],
)
async def test_an_unknown_name_is_refused_with_the_nearest(
    mesh: EmbeddedMesh, wrong: dict[str, str], code: str, told: str
):
    """400 at once, with the field in `param`."""
    async with RedisStore.open(RedisParams(url=mesh.state_url)) as store:
        await announce_agent(store, "agent", LEAGUE)
    answer = await asked(mesh, **wrong)
    async with httpx.AsyncClient(base_url=mesh.gateway_url) as client:
        shown = (await client.get("/api/mesh")).json()["agents"]
    assert shown == [{"agent_id": "agent", "databases": ["league"], "workflows": ["text2sql"]}]
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert error["param"] == code.removeprefix("unknown_")
    assert told in error["message"]


async def test_agents_that_say_nothing_can_be_asked_all_the_same():
    """With the setting for agents of one's own a question goes out as it did before."""
    async with gateway_mesh(quick_fleet(1), asks_unannounced=True, late_s=0.0) as mesh:
        answer = await asked(mesh, slo_s=0.2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_passed")


async def test_a_real_agent_announces_its_names(tmp_path: Path):
    """A mesh with an agent takes its database's name, and refuses one that is near."""
    database = sample_file("league", tmp_path)
    params = EmbeddedParams(
        fleet=quick_fleet(1),
        tunes=False,
        drain_s=1.0,
        agent=AgentParams(agent_id="agent", databases={"league": database}, drain_s=0.0),
        gateway=GatewayParams(),
    )
    async with open_embedded(params) as mesh:
        async with RedisStore.open(RedisParams(url=mesh.state_url)) as store:
            (notice,) = (await agents_of(store)).values()
        assert notice.databases == ("league",)
        assert notice.workflows["text2sql"]
        assert not notice.workflows["code-review"]
        assert (await asked(mesh, database="leage")).status_code == 400
        assert (await asked(mesh, database="league", slo_s=30)).status_code == 200


class Bench:
    """The gateway's view of agents, on clocks that a test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = FlakyStore(self.clock.monotonic_s)
        self.agents = Agents(self.store, self.clock)

    async def is_asked(self, request: QueryRequest = QUESTION) -> bool:
        """Return whether a question is let through."""
        try:
            await self.agents.check(request)
        except Problem:
            return False
        return True


class FlakyStore(MemoryStore):
    """A state store that may be away, or lose its memory."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        super().__init__(monotonic)
        self.is_away = False

    async def announced(self, kind: str) -> dict[str, str]:
        """Return who is there."""
        if self.is_away:
            raise StateUnavailable("away")
        return await super().announced(kind)

    def wipe(self) -> None:
        """Forget everything."""
        self._announced.clear()


async def test_a_killed_agent_counts_for_its_lease_and_no_longer():
    """What is asked while it restarts is taken; after its lease it is refused."""
    bench = Bench()
    await announce_agent(bench.store, "agent", LEAGUE)
    assert await bench.is_asked()
    await bench.clock.advance(LEAGUE.lease_s - 1.0)
    await bench.agents.look()
    assert await bench.is_asked()
    await bench.clock.advance(2.0)
    await bench.agents.look()
    assert not await bench.is_asked()


async def test_a_store_that_lost_its_memory_refuses_nobody():
    """What an agent said is remembered for its lease; what it says again counts at once."""
    bench = Bench()
    await announce_agent(bench.store, "agent", LEAGUE)
    await bench.agents.look()
    bench.store.wipe()
    await bench.agents.look()
    assert await bench.is_asked()


async def test_a_store_that_is_away_refuses_nobody():
    """Nobody can say then that there is no agent; back again, it is asked."""
    bench = Bench()
    bench.store.is_away = True
    assert await bench.is_asked()
    bench.store.is_away = False
    assert not await bench.is_asked()


async def test_an_agent_that_has_just_started_is_found_without_waiting():
    """A refusal looks once more before it is given."""
    bench = Bench()
    await bench.agents.look()
    await announce_agent(bench.store, "agent", LEAGUE)
    assert await bench.is_asked()


async def test_agents_are_looked_at_without_any_question():
    """What they say is known here before the store loses it."""
    bench = Bench()
    await announce_agent(bench.store, "agent", LEAGUE)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(bench.agents.run(), name="agents")
        await bench.clock.advance(0.0)
        bench.store.wipe()
        assert await bench.is_asked()
        watching.cancel()
