"""The Kafka and the Redis of a chaos run, where it may stop them."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from services.cli.chaos.proxy import Proxy
from shared.adapters.embedded_redis import EmbeddedRedis, EmbeddedRedisParams
from shared.adapters.local_kafka import LocalKafka, LocalKafkaParams, default_cache_dir
from shared.adapters.local_process import LOOPBACK, LocalProcess, connect, free_port
from shared.errors import ConfigError

START_TIMEOUT_S = 30.0
FAR = "FAR"
"""Kafka's listener for the far worker: its address is the proxy's."""
AOF = "appendonlydir"


class Server(Protocol):
    """A server that can be stopped and started again with its data; both block."""

    def start(self) -> None:
        """Start it; returns when it answers."""
        ...

    def stop(self) -> None:
        """Shut it down in order."""
        ...

    def kill(self) -> None:
        """End it with SIGKILL."""
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

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()

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
    redis_dir: Path | None = None
    """Where the append-only file of our own Redis is."""
    proxies: tuple[Proxy, ...] = ()
    """What stands between the far worker and Kafka and Redis."""
    far_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of the far worker: it reaches both through the proxies."""

    def rewind(self, copy: Path) -> None:
        """Put the append-only file back as it was when `copy` was made; blocks."""
        if self.redis_dir is not None:
            shutil.rmtree(self.redis_dir / AOF)
            shutil.move(copy, self.redis_dir / AOF)


@asynccontextmanager
async def own_servers(folder: Path, report: Callable[[str], None]) -> AsyncIterator[Servers]:
    """Run a Kafka and a Redis for as long as the block lasts.

    Args:
        folder: Where their data and logs are.
        report: Told of each step that takes longer than a second.

    Raises:
        ConfigError: One of them cannot be started here; says what is missing.
    """
    properties: dict[str, str] = {}
    kafka = LocalKafka(
        LocalKafkaParams(
            extra_listeners={FAR: "PLAINTEXT"},
            properties=properties,
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
        await asyncio.to_thread(redis.start)
        async with (
            Proxy.open(_port_of(kafka.address(FAR))) as far_kafka,
            Proxy.open(_port_of(redis.url)) as far_redis,
        ):
            far = f"{LOOPBACK}:{far_kafka.port}"
            properties["advertised.listeners"] = f"PLAINTEXT://{kafka.bootstrap},{FAR}://{far}"
            await asyncio.to_thread(kafka.start)
            yield Servers(
                bootstrap=kafka.bootstrap,
                redis_url=redis.url,
                kafka=kafka,
                redis=redis,
                redis_dir=redis_dir,
                proxies=(far_kafka, far_redis),
                far_variables={
                    "HEXFLOW_KAFKA__BOOTSTRAP_SERVERS": far,
                    "HEXFLOW_REDIS__URL": f"redis://{LOOPBACK}:{far_redis.port}/0",
                },
            )
    finally:
        await asyncio.to_thread(redis.stop)
        await asyncio.to_thread(kafka.stop)
        if isinstance(redis, EmbeddedRedis):
            await asyncio.to_thread(redis.close)


def _port_of(address: str) -> int:
    """Return the port of `host:port` or of a URL."""
    port = urlsplit(address if "//" in address else f"//{address}").port
    if port is None:
        raise ConfigError(f"{address} names no port")
    return port
