"""One disciplined client for Redis or Valkey: bounded, timed, cancellable, errors translated.

How redis-py (8.1 and before) behaves, and what is done about it here:

- A command cancelled between its request and its reply would leave that reply for the next
  command. redis-py drops the connection then, but only where the cancellation reaches its own
  `await`: nothing here shields or detaches a command, and idle connections that hold unread
  bytes are refused by its pool (only with RESP2, hence `protocol=2`).
- With a socket time-out it sends through `asyncio.wait_for`, which on Python 3.11 swallows a
  cancellation that meets the end of the send (measured). So there is none;
  `asyncio.timeout` bounds each command as a whole.
- Its default pool raises when it is exhausted. A semaphore in front of it makes commands wait,
  within the same time-out; a cancelled waiter holds nothing.
- A repeated command may have run already, its reply lost. Every script here is safe to repeat,
  except a claim, which therefore is not repeated behind the caller's back.
"""

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import msgspec
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from redis import exceptions as rx
from redis.asyncio import Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)

from shared.errors import AccessRefused, ConfigError, Fenced, MeshError, StateUnavailable

_FIRST_BACKOFF_S = 0.02
_LARGEST_BACKOFF_S = 0.5
# What scripts answer where a command of theirs is denied: Redis 6, 7 and later, Valkey.
_NO_RIGHT = ("NOPERM", "can't run this command", "ACL failure in script")
ALERTS = ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR")
_SCHEMES = ("redis", "rediss", "unix")
_EXAMPLE = "for example redis://127.0.0.1:6379/0"

Argument = str | int | float | bytes
_Execute = Callable[..., Awaitable[Any]]


class RedisParams(BaseModel):
    """Where Redis is and how it is used.

    Attributes:
        url: `redis://host:port/db`, `rediss://...` (TLS) or `unix:///path?db=0`. Credentials in
            it move to `username` and `password`, so that they are never shown.
        username: ACL user.
        password: Its password.
        ssl_ca: File with the certificate authorities to trust; None: the system's.
        ssl_cert: Client certificate file, for mutual TLS.
        ssl_key: Its key file.
        ssl_check_hostname: Whether the server's certificate must name its host.
        prefix: Put before every key.
        max_connections: Most connections for commands.
        stream_connections: Most further connections that wait for streamed chunks.
        connect_timeout_s: Longest time to open a connection, wall seconds.
        timeout_s: Longest time for one command with its retries and the wait for a free
            connection, wall seconds.
        health_check_s: A connection idle for longer is probed before use, wall seconds.
        chunk_entries: About how many chunks of a call's streamed text are kept.
        chunk_ttl_s: A call's chunks vanish this long after the last one, wall seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: str = "redis://127.0.0.1:6379/0"
    username: SecretStr | None = None
    password: SecretStr | None = None
    ssl_ca: Path | None = None
    ssl_cert: Path | None = None
    ssl_key: Path | None = None
    ssl_check_hostname: bool = True
    prefix: str = Field(default="hexflow:", max_length=256, pattern=r"^[^{}]*$")
    max_connections: int = Field(default=16, ge=1, le=1_000)
    stream_connections: int = Field(default=64, ge=1, le=10_000)
    connect_timeout_s: float = Field(default=2.0, gt=0, le=60)
    timeout_s: float = Field(default=2.0, gt=0, le=60)
    health_check_s: float = Field(default=15.0, gt=0, le=600)
    chunk_entries: int = Field(default=4_096, ge=1, le=1_000_000)
    chunk_ttl_s: int = Field(default=600, ge=1, le=86_400)

    @model_validator(mode="before")
    @classmethod
    def _hide_credentials(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("url"), str):
            return data
        parts = urlsplit(data["url"])
        if "@" not in parts.netloc:
            return data
        credentials, _, host = parts.netloc.rpartition("@")
        username, _, password = credentials.partition(":")
        found = {"username": unquote(username), "password": unquote(password)}
        clean = urlunsplit(parts._replace(netloc=host))
        return {**{k: v for k, v in found.items() if v}, **data, "url": clean}

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        # A ConfigError passes through pydantic as it is, without quoting its input.
        parts = _split(self.url)
        if parts.scheme not in _SCHEMES:
            raise ConfigError("a Redis URL must begin with redis://, rediss:// or unix://")
        place = parts.path if parts.scheme == "unix" else parts.hostname
        if not place:
            raise ConfigError(f"the Redis URL names no host or socket; {_EXAMPLE}")
        _database(parts)
        return self

    @property
    def address(self) -> str:
        """Where the server is, without credentials."""
        return self.url


def _split(url: str) -> SplitResult:
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError as exc:
        raise ConfigError(f"the port in the Redis URL is no port; {_EXAMPLE}") from exc
    return parts


def _database(parts: SplitResult) -> int:
    text = parts.query.removeprefix("db=") if parts.scheme == "unix" else parts.path.strip("/")
    if text and not text.isdecimal():
        raise ConfigError(f"the database in the Redis URL must be a number; {_EXAMPLE}")
    return int(text or 0)


class Script(msgspec.Struct, frozen=True):
    """A Lua script and the digest Redis knows it by."""

    text: str
    sha: str


@cache
def load_script(name: str, *, with_prelude: bool = True) -> Script:
    """Return a script of `shared/adapters/lua`, with the urgency set's prelude before it."""
    folder = resources.files("shared.adapters") / "lua"
    names = ("prelude", name) if with_prelude else (name,)
    text = "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in names)
    # SHA-1 is what EVALSHA takes; it names the script and protects nothing.
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


class RedisClient:
    """Runs commands on one server.

    Args:
        params: Where and how.
    """

    def __init__(self, params: RedisParams) -> None:
        self.params = params
        self._lanes = (
            _Lane(params, params.max_connections),
            _Lane(params, params.stream_connections),
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, params: RedisParams) -> AsyncIterator[Self]:
        """Connect, check that the server answers, and close at the end.

        Raises:
            ConfigError: The server refuses the credentials, or a TLS file cannot be read.
            StateUnavailable: It does not answer.
        """
        client = cls(params)
        try:
            await client.ping()
            yield client
        finally:
            await client.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        for lane in self._lanes:
            await lane.pool.disconnect()

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument] = (),
        *,
        repeat: bool = True,
    ) -> Any:
        """Run a script atomically; a server that does not know it learns it on the way.

        Args:
            script: What to run.
            keys: Every key it touches.
            args: Its arguments.
            repeat: Whether it may be sent again when its reply was lost.

        Raises:
            Fenced: The script refused the caller's epoch.
            StateUnavailable: No reply; the script may have run.
            ConfigError: The server refuses the command or the credentials.
        """

        async def send(execute: _Execute) -> Any:
            try:
                return await execute("EVALSHA", script.sha, len(keys), *keys, *args)
            except rx.NoScriptError:
                # Restarted, failed over or flushed since; EVAL teaches it in one round trip.
                return await execute("EVAL", script.text, len(keys), *keys, *args)

        return await self._call(self._lanes[0], send, repeat=repeat)

    async def command(self, *args: Argument) -> Any:
        """Run one command that is safe to repeat; raises what `run` raises."""
        return await self._call(self._lanes[0], lambda execute: execute(*args))

    async def blocking(self, *args: Argument, wait_s: float) -> Any:
        """Run a command that waits up to `wait_s` on the server, on a connection of its own kind.

        Raises what `run` raises.
        """
        return await self._call(self._lanes[1], lambda execute: execute(*args), extra_s=wait_s)

    async def ping(self) -> float:
        """Return the round-trip time, wall seconds; raises what `run` raises."""
        started_s = time.monotonic()
        await self.command("PING")
        return time.monotonic() - started_s

    async def _call(
        self,
        lane: "_Lane",
        send: Callable[[_Execute], Awaitable[Any]],
        *,
        repeat: bool = True,
        extra_s: float = 0.0,
    ) -> Any:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self.params.timeout_s + extra_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                async with asyncio.timeout_at(give_up_s), lane.slots:
                    return await send(lane.execute)
            except TimeoutError as exc:
                raise self._unavailable("no reply in time") from exc
            except (rx.RedisError, OSError) as exc:
                error = self._translate(exc)
                is_late = loop.time() + backoff_s >= give_up_s
                if not repeat or is_late or not isinstance(error, StateUnavailable):
                    raise error from exc
            # Spread the clients that return to a restarted server.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311
            backoff_s = min(2 * backoff_s, _LARGEST_BACKOFF_S)

    def _translate(self, exc: Exception) -> MeshError:
        detail = str(exc)
        epoch = detail.removeprefix("FENCED ")
        if isinstance(exc, rx.ResponseError) and epoch != detail and epoch.isdecimal():
            return Fenced(f"epoch {int(epoch)} has begun")
        # Redis before 7 wraps what a script's command answered, so codes are looked for anywhere.
        is_refused = isinstance(exc, rx.AuthenticationError | rx.AuthorizationError)
        is_refused |= isinstance(exc, rx.NoPermissionError)
        if is_refused or any(words in detail for words in _NO_RIGHT):
            return AccessRefused(
                f"Redis at {self.params.address} refuses access: {detail}; "
                "check the user name, the password and the user's ACL (docs/deploy.md, Rights)"
            )
        if "CERTIFICATE_VERIFY_FAILED" in detail:
            return AccessRefused(
                f"the certificate of Redis at {self.params.address} is not trusted: {detail}; "
                "check the certificate authority and the host name in the URL"
            )
        if "ALERT" in detail and any(word in detail for word in ALERTS):
            return AccessRefused(
                f"Redis at {self.params.address} does not accept this client's certificate: "
                f"{detail}; it is expired, missing, or of an authority that Redis does not trust"
            )
        if "WRONGTYPE" in detail or epoch != detail:
            return ConfigError(
                f"Redis at {self.params.address}: another application uses keys that begin with "
                f"{self.params.prefix!r}; set another prefix"
            )
        return self._unavailable(detail)

    def _unavailable(self, detail: str) -> StateUnavailable:
        return StateUnavailable(
            f"Redis at {self.params.address}: {detail}; "
            "check that it runs and that this host reaches it"
        )


class _Lane:
    """Connections of one kind, bounded; waiting for a command must not starve the others."""

    def __init__(self, params: RedisParams, num_connections: int) -> None:
        kind, options = _connection_options(params)
        self.pool = ConnectionPool(
            connection_class=kind, max_connections=num_connections, **options
        )
        self.execute: _Execute = Redis(connection_pool=self.pool).execute_command
        self.slots = asyncio.Semaphore(num_connections)


def _connection_options(params: RedisParams) -> tuple[type[AbstractConnection], dict[str, Any]]:
    parts = _split(params.url)
    options: dict[str, Any] = {
        "db": _database(parts),
        "username": params.username.get_secret_value() if params.username else None,
        "password": params.password.get_secret_value() if params.password else None,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": params.connect_timeout_s,
        "health_check_interval": params.health_check_s,
        "client_name": "hexflow",
    }
    if parts.scheme == "unix":
        return UnixDomainSocketConnection, {**options, "path": unquote(parts.path)}
    options |= {
        "host": parts.hostname,
        "port": parts.port or 6379,
        "socket_keepalive": True,
    }
    if parts.scheme == "redis":
        return Connection, options
    return SSLConnection, {
        **options,
        "ssl_ca_certs": _file(params.ssl_ca),
        "ssl_certfile": _file(params.ssl_cert),
        "ssl_keyfile": _file(params.ssl_key),
        "ssl_check_hostname": params.ssl_check_hostname,
    }


def _file(path: Path | None) -> str | None:
    if path is not None and not path.is_file():
        raise ConfigError(f"{path} is no readable file (a TLS setting of Redis names it)")
    return str(path) if path is not None else None
