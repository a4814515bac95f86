"""What careless and hostile clients do to a gateway: right statuses, bounded memory, no leaks."""

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from services.cli.embedded import EmbeddedMesh
from services.gateway.calls import CallDesk
from services.gateway.tenants import new_key
from shared.domain.instance import LatencyModel
from tests.support.gateway import gateway_mesh, gateway_of, quick_fleet, until

CHAT: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 3,
}
MIB = 1024 * 1024
NUM_EVENT_CLIENTS = 2_000
NUM_LEAVERS = 500
AT_ONCE = 50


@pytest.fixture
async def mesh() -> AsyncIterator[EmbeddedMesh]:
    """Return a mesh whose gateway is impatient with slow clients."""
    async with gateway_mesh(
        quick_fleet(1), header_timeout_s=0.5, body_timeout_s=0.5, event_period_s=0.2
    ) as opened:
        yield opened


@pytest.fixture
async def http(mesh: EmbeddedMesh) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of its gateway."""
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=60.0) as client:
        yield client


def desk_of(mesh: EmbeddedMesh) -> CallDesk:
    """Return the gateway's desk."""
    desk = gateway_of(mesh).desk
    assert desk is not None
    return desk


def rss_bytes() -> int:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def connect(mesh: EmbeddedMesh) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a bare connection to the gateway."""
    address = urlsplit(mesh.gateway_url)
    return await asyncio.open_connection(address.hostname, address.port)


def head(path: str, body: bytes, method: str = "POST") -> bytes:
    """Return a request's head."""
    lines = (f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode()


async def test_slow_heads_are_cut_off(mesh: EmbeddedMesh, http: httpx.AsyncClient):
    """Clients that send a byte now and then lose their connection; others are served meanwhile."""

    async def drip() -> bytes:
        reader, writer = await connect(mesh)
        try:
            for byte in b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost" * 50:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.1)
                if reader.at_eof():
                    break
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async with asyncio.TaskGroup() as group:
        drips = [group.create_task(drip()) for _ in range(100)]
        answer = await http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert {task.result() for task in drips} == {b""}


async def test_a_slow_second_head_is_cut_off_too(mesh: EmbeddedMesh):
    """A kept-alive connection may idle, but once a head has begun it has to come."""
    reader, writer = await connect(mesh)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(1.0)
    writer.write(b"GET /v1/mo")
    rest = await reader.read()
    assert rest.count(b"HTTP/1.1") == 0
    writer.close()


async def test_an_endless_head_is_cut_off(mesh: EmbeddedMesh):
    """A head of more than 64 KiB ends the connection."""
    reader, writer = await connect(mesh)
    writer.write(b"GET / HTTP/1.1\r\n")
    try:
        for _ in range(1_000):
            writer.write(b"x-fill: " + b"y" * 1_000 + b"\r\n")
            await writer.drain()
        assert await reader.read() == b""
    except ConnectionError:
        pass
    writer.close()


async def test_a_slow_body_is_a_408(mesh: EmbeddedMesh):
    """A body that stops half way is answered, and nothing of it stays open."""
    reader, writer = await connect(mesh)
    body = json.dumps(CHAT).encode()
    writer.write(head("/v1/chat/completions", body) + body[:10])
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 408")
    writer.close()
    assert desk_of(mesh).counts["submitted"] == 0


async def test_bodies_of_ten_megabytes_are_a_413():
    """However it is sent, it is refused and its memory is not kept."""
    async with gateway_mesh(quick_fleet(1)) as mesh:
        before = rss_bytes()
        body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * 10 * MIB}]})

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(body), MIB):
                yield body[start : start + MIB].encode()

        async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=60.0) as http:
            for _ in range(10):
                answers = await asyncio.gather(
                    http.post("/v1/chat/completions", content=body.encode()),
                    http.post("/v1/chat/completions", content=parts()),
                )
                assert [answer.status_code for answer in answers] == [413, 413]
                assert answers[0].json()["error"]["code"] == "too_large"
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert rss_bytes() - before < 200 * MIB


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{}", 400, "invalid_value"),
        (b'{"model": "default"}', 400, "invalid_value"),
        (json.dumps({**CHAT, "model": "absent"}).encode(), 404, "model_not_found"),
        (
            b'{"model": "default", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
            400,
            "invalid_utf8",
        ),
        (json.dumps({**CHAT, "hexflow": {"slo_s": -1}}).encode(), 400, "invalid_value"),
        (json.dumps({**CHAT, "seed": 10**40}).encode(), 400, "invalid_value"),
        (b'{"model": "default", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
        (json.dumps({**CHAT, "tools": [{}] * 50_000}).encode(), 200, None),
    ],
)
async def test_wrong_requests(http: httpx.AsyncClient, body: bytes, status: int, code: str | None):
    """Each kind of wrong request has its status and its word."""
    answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == status
    if code is not None:
        assert answer.json()["error"]["code"] == code


async def test_other_sites_get_nothing(http: httpx.AsyncClient):
    """A page of another site can neither change anything here nor read under a name of its own."""
    for headers in ({"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}):
        answer = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")
    for host in ("evil.example", "evil.example:8080", "10.0.0.1", "127.0.0.1.evil.example"):
        answer = await http.get("/api/mesh", headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host")
    for host in ("localhost", "127.0.0.1:8080", "[::1]:8080", "hexflow.localhost"):
        assert (await http.get("/api/mesh", headers={"host": host})).status_code == 200


async def test_bytes_that_are_no_http(mesh: EmbeddedMesh, http: httpx.AsyncClient):
    """Garbage ends its own connection and nothing else."""
    for garbage in (b"\x16\x03\x01" + b"\x00" * 200, b"\r\n\r\n\r\n", b"GET\r\n\r\n", b"\xff" * 99):
        reader, writer = await connect(mesh)
        writer.write(garbage)
        answer = await reader.read(100)
        assert answer == b"" or b" 400 " in answer
        writer.close()
    assert (await http.get("/v1/models")).status_code == 200


async def test_wrong_keys_are_401_however_many(tmp_path: Path):
    """Guessing costs the guesser a request each and tells nothing."""
    key, stored = new_key()
    file = tmp_path / "keys.toml"
    file.write_text(f'[tenants.a]\nkeys = ["{stored}"]\n')
    async with gateway_mesh(quick_fleet(1), keys_file=file) as mesh:  # noqa: SIM117 - its address
        async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=60.0) as http:
            guesses = [f"Bearer {key[:-1]}{one}" for one in "abcdefghij" if key[-1] != one]
            guesses += ["", "Bearer", f"Basic {key}", f"Bearer {key}x", "Bearer " + "x" * 5_000]
            for path in ("/v1/models", "/api/mesh", "/api/events", "/api/queries"):
                for guess in guesses:
                    answer = await http.get(path, headers={"authorization": guess})
                    assert answer.status_code == 401, (path, guess)
            # the body of somebody without a key is never read
            answer = await http.post("/v1/chat/completions", content=b"x" * 5 * MIB)
            assert answer.status_code == 401
            assert (
                await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            ).status_code == 200


@pytest.mark.slow
async def test_two_thousand_idle_event_clients():
    """All of them are told, memory stays bounded, calls are served, and none is left behind."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    async with gateway_mesh(quick_fleet(1), event_period_s=0.5) as mesh:
        live = gateway_of(mesh).live
        before = rss_bytes()
        connections = []
        for _ in range(NUM_EVENT_CLIENTS):
            reader, writer = await connect(mesh)
            writer.write(head("/api/events", b"", "GET"))
            connections.append((reader, writer))
        await until(lambda: live.num_clients == NUM_EVENT_CLIENTS, "not all were let in")
        async with asyncio.timeout(60):
            for reader, _ in connections:
                await reader.readuntil(b"event: mesh")
        async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=60.0) as http:
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert rss_bytes() - before < 400 * MIB
        for _, writer in connections:
            writer.transport.abort()
        await until(lambda: live.num_clients == 0, "clients that left are still counted")


async def test_event_clients_are_bounded():
    """Beyond the bound a client is told to come back later."""
    async with gateway_mesh(quick_fleet(1), max_event_clients=2) as mesh:
        live = gateway_of(mesh).live
        opened = [await connect(mesh) for _ in range(2)]
        for _, writer in opened:
            writer.write(head("/api/events", b"", "GET"))
        await until(lambda: live.num_clients == 2, "not let in")
        async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=60.0) as http:
            answer = await http.get("/api/events")
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        for _, writer in opened:
            writer.close()


@pytest.mark.slow
async def test_five_hundred_clients_that_leave_in_the_middle_of_their_stream():
    """Every call ends on the mesh and is counted; engines, streams and places are free again."""
    slow = LatencyModel(prefill_s_per_token=1e-7, weights_s=0.02)
    async with gateway_mesh(quick_fleet(2, latency=slow)) as mesh:
        desk = desk_of(mesh)
        body = json.dumps({**CHAT, "max_tokens": 256, "stream": True}).encode()

        async def leave() -> None:
            reader, writer = await connect(mesh)
            writer.write(head("/v1/chat/completions", body) + body)
            await reader.readuntil(b'"content":"')
            writer.transport.abort()

        for _ in range(NUM_LEAVERS // AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(leave())
        await until(lambda: desk.num_open == 0, "clients that left are still counted")
        counts = desk.counts
        assert counts["submitted"] == NUM_LEAVERS == counts["ended"] + counts["abandoned"]
        assert counts["abandoned"] > NUM_LEAVERS / 2
        await until(lambda: counts["abandoned_ended"] == counts["abandoned"], "a call leaked")
        assert counts["cancels_sent"] == counts["abandoned"]
        for engine in mesh.engines.values():
            await until(lambda engine=engine: engine.kv_used_tokens() == 0, "memory is held")
        assert desk.num_reading == 0
