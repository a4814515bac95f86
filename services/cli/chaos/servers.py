"""The Kafka and the Redis of a chaos run, where it may stop them."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shared.adapters.embedded_redis import EmbeddedRedis, EmbeddedRedisParams
from shared.adapters.local_kafka import LocalKafka, LocalKafkaParams, default_cache_dir
from shared.adapters.local_process import LOOPBACK, LocalProcess, connect, free_port

START_TIMEOUT_S = 30.0


class Server(Protocol):
    """A server that can be stopped and started again with its data; both block."""

    def start(self) -> None:
        """Start it; returns when it answers."""
        ...

    def stop(self) -> None:
        """Shut it down in order."""
        ...


class OwnRedis:
    """`redis-server` from the path, with an append-only file.

    Args:
        program: The server.
        folder: Where its data is.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self._port = free_port()
        options = {
            "bind": LOOPBACK,
            "port": str(self._port),
            "dir": str(folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "loglevel": "warning",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        self._process = LocalProcess("Redis", [program, *words], folder / "redis.log")

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://{LOOPBACK}:{self._port}/0"

    def start(self) -> None:
        """Start it, with the data it had."""
        self._process.start()
        self._process.wait_until(self._answers, START_TIMEOUT_S)

    def stop(self) -> None:
        """Shut it down in order."""
        self._process.stop()

    def _answers(self) -> bool:
        with connect(LOOPBACK, self._port) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(64).startswith(b"+PONG")


@dataclass(frozen=True, kw_only=True)
class Servers:
    """What a run has to do with; None where it belongs to somebody else."""

    bootstrap: str
    redis_url: str
    kafka: Server | None = None
    redis: Server | None = None


@asynccontextmanager
async def own_servers(folder: Path, report: Callable[[str], None]) -> AsyncIterator[Servers]:
    """Run a Kafka and a Redis for as long as the block lasts.

    Args:
        folder: Where their data and logs are.
        report: Told of each step that takes longer than a second.

    Raises:
        ConfigError: One of them cannot be started here; says what is missing.
    """
    kafka = LocalKafka(
        LocalKafkaParams(
            data_dir=folder / "kafka",
            cache_dir=default_cache_dir(os.environ),
            # Compiling less pays off in a broker that lives for minutes and starts twice.
            java_options=("-XX:TieredStopAtLevel=1",),
        ),
        report,
    )
    redis_dir = folder / "redis"
    redis_dir.mkdir(parents=True, exist_ok=True)
    program = shutil.which("redis-server")
    redis = (
        OwnRedis(program, redis_dir)
        if program
        else EmbeddedRedis(EmbeddedRedisParams(data_dir=redis_dir, port=0))
    )
    try:
        await asyncio.to_thread(kafka.start)
        await asyncio.to_thread(redis.start)
        yield Servers(bootstrap=kafka.bootstrap, redis_url=redis.url, kafka=kafka, redis=redis)
    finally:
        await asyncio.to_thread(redis.stop)
        await asyncio.to_thread(kafka.stop)
        if isinstance(redis, EmbeddedRedis):
            await asyncio.to_thread(redis.close)
