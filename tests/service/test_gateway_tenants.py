"""API keys and tenants on a running gateway."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from services.cli.embedded import EmbeddedMesh
from services.gateway.tenants import new_key
from tests.support.gateway import gateway_mesh, gateway_of, quick_fleet, until

HELLO = [{"role": "user", "content": "hello"}]


class Keys:
    """A keys file, and the keys in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.acme, self._acme = new_key()
        self.zeta, self._zeta = new_key()
        self.write()

    def write(self, acme: str = "slo_s = 60", zeta: str = "admin = true") -> None:
        """Write the file as an editor does: a new file takes the old one's place."""
        text = f'[tenants.acme]\nkeys = ["{self._acme}"]\n{acme}\n'
        text += f'[tenants.zeta]\nkeys = ["{self._zeta}"]\n{zeta}\n'
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.path)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Return a keys file with two tenants."""
    return Keys(tmp_path / "keys.toml")


@pytest.fixture
async def mesh(keys: Keys) -> AsyncIterator[EmbeddedMesh]:
    """Return a mesh whose gateway wants keys."""
    async with gateway_mesh(quick_fleet(1), keys_file=keys.path, keys_check_s=0.05) as opened:
        yield opened


def client_of(mesh: EmbeddedMesh, key: str) -> AsyncOpenAI:
    """Return a client with a key."""
    return AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key=key, max_retries=0)


async def test_only_known_keys_get_in(mesh: EmbeddedMesh, keys: Keys):
    """No key and a wrong key are 401; a right one is its tenant, whatever the request claims."""
    seen = []
    engine = mesh.engines["quick-0"]
    generate = engine.generate

    def spy(call, engine_id):
        seen.append(call.request)
        return generate(call, engine_id)

    engine.generate = spy
    for key in ("nonsense", keys.acme[:-1]):
        async with client_of(mesh, key) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="default", messages=HELLO)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
    async with client_of(mesh, keys.acme) as client:
        fields = {"query_id": "q"}
        await client.chat.completions.create(
            model="default", messages=HELLO, max_tokens=2, extra_body={"hexflow": fields}
        )
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(
                model="default", messages=HELLO, extra_headers={"x-hexflow-tenant": "zeta"}
            )
    (request,) = seen
    assert (request.tenant, request.slo_s, request.query_id) == ("acme", 60.0, "acme/q")


async def test_a_rate_limit_answers_429_with_retry_after(mesh: EmbeddedMesh, keys: Keys):
    """Above its rate a tenant is told when to come back; another tenant is not touched."""
    keys.write(acme="requests_per_s = 0.01\nburst = 2")
    gateway = gateway_of(mesh)
    await until(
        lambda: (
            "acme" in gateway.access.tenants.names()
            and (found := gateway.access.tenants.recognise(keys.acme)) is not None
            and found.burst == 2
        ),
        "the keys file was not read again",
    )
    async with client_of(mesh, keys.acme) as client, client_of(mesh, keys.zeta) as other:
        for _ in range(2):
            await client.chat.completions.create(model="default", messages=HELLO, max_tokens=2)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="default", messages=HELLO, max_tokens=2)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 100
        await other.chat.completions.create(model="default", messages=HELLO, max_tokens=2)


async def test_keys_are_taken_away_without_a_restart(mesh: EmbeddedMesh, keys: Keys):
    """A removed key stops working; a broken file changes nothing."""
    gateway = gateway_of(mesh)
    keys.path.write_text("not toml")
    await until(
        lambda: (
            gateway.metrics.totals().get("hexflow_gateway_key_reloads_total{result=refused}") == 1.0
        ),
        "the broken file was not looked at",
    )
    async with client_of(mesh, keys.acme) as client:
        await client.models.list()
        _, stored = new_key()
        keys.path.write_text(f'[tenants.other]\nkeys = ["{stored}"]\n')
        await until(lambda: gateway.access.tenants.names() == ["other"], "not read")
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_query_id_that_was_told_is_the_querys(mesh: EmbeddedMesh, keys: Keys):
    """The id in the answer names the same query again; its owner also finds it by its own name."""
    asked = {"model": "default", "messages": HELLO, "max_tokens": 2}
    headers = {"authorization": f"Bearer {keys.acme}"}
    told = set()
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=60.0) as http:
        await until(gateway_of(mesh).fleet.has_any, "no instance is live")
        for name in ("mine", "acme/mine"):
            body = {**asked, "hexflow": {"query_id": name}}
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            told.add(answer.headers["x-hexflow-query-id"])
        assert told == {"acme/mine"}
        for name in ("mine", "acme/mine"):
            async with asyncio.timeout(60):
                while (await http.get(f"/api/queries/{name}", headers=headers)).status_code != 200:
                    await asyncio.sleep(0.02)
            other = {"authorization": f"Bearer {keys.zeta}"}
            answer = await http.get(f"/api/queries/{name}", headers=other)
            assert answer.status_code == (404 if name == "mine" else 200)  # zeta may see all
