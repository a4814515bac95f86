"""Finds or starts the real servers that tests marked `real` need.

An address in the environment wins: `HEXFLOW_TEST_KAFKA` (`host:port`) and `HEXFLOW_TEST_REDIS`
(`redis://...`). Such a server belongs to its owner: tests may use it but never stop or kill it.
Otherwise Apache Kafka is started from its jars and Redis from the `redis-server` on `PATH`, on
loopback ports of their own, with their data in a temporary folder.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest

from shared.adapters.local_kafka import (
    LocalKafka,
    LocalKafkaParams,
    answers,
    default_cache_dir,
    fetch_jars,
    find_java,
)
from shared.adapters.local_process import LOOPBACK, LocalProcess, connect, free_port
from shared.errors import ConfigError

KAFKA_VARIABLE = "HEXFLOW_TEST_KAFKA"
REDIS_VARIABLE = "HEXFLOW_TEST_REDIS"
REQUIRE_VARIABLE = "HEXFLOW_REQUIRE_SERVERS"
NOT_RUN = "not run: "

_REPO = Path(__file__).resolve().parents[2]

Report = Callable[[str], None]


class MissingServerError(Exception):
    """A real server is neither named nor startable here; the message says how to get it."""


class NotOursError(Exception):
    """A test wanted to stop or kill a server that somebody else runs."""


@dataclass(kw_only=True)
class KafkaServer:
    """A broker to test against; `local` is None when somebody else runs it."""

    bootstrap: str
    local: LocalKafka | None = None

    @property
    def pid(self) -> int | None:
        """Process id while our broker runs, else None."""
        return None if self.local is None else self.local.pid

    def address(self, listener: str) -> str:
        """Return `host:port` of one of the extra listeners."""
        return self._owned().address(listener)

    def start(self) -> None:
        """Start it again, with the same address and data."""
        self._owned().start()

    def stop(self) -> None:
        """Shut it down in order."""
        self._owned().stop()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._owned().kill()

    def _owned(self) -> LocalKafka:
        if self.local is None:
            raise NotOursError(f"Kafka at {self.bootstrap} was not started by the tests")
        return self.local


@dataclass(kw_only=True)
class RedisServer:
    """A Redis to test against; `process` is None when somebody else runs it."""

    url: str
    process: LocalProcess | None = None
    data_dir: Path | None = None
    start_timeout_s: float = field(default=30.0, repr=False)

    @property
    def pid(self) -> int | None:
        """Process id while our server runs, else None."""
        return None if self.process is None else self.process.pid

    def start(self) -> None:
        """Start it, or start it again with the same address and data."""
        process = self._owned()
        process.start()
        process.wait_until(lambda: redis_answers(self.url), self.start_timeout_s)

    def stop(self) -> None:
        """Shut it down in order."""
        self._owned().stop()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._owned().kill()

    def _owned(self) -> LocalProcess:
        if self.process is None:
            raise NotOursError(f"Redis at {self.url} was not started by the tests")
        return self.process


def is_required(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a missing server is a failure rather than a test not run."""
    return environ.get(REQUIRE_VARIABLE, "").lower() not in ("", "0", "false", "no")


def do_without(missing: MissingServerError) -> NoReturn:
    """Leave a test out, or fail it where what is missing is required."""
    if is_required():
        pytest.fail(f"HEXFLOW_REQUIRE_SERVERS is set, and {missing}", pytrace=False)
    pytest.skip(f"{NOT_RUN}{missing}")


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where jars are kept: `$HEXFLOW_CACHE_DIR`, else `.cache/` of the repository."""
    return default_cache_dir(environ) if environ.get("HEXFLOW_CACHE_DIR") else _REPO / ".cache"


def kafka_home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the unpacked Kafka distribution named by `HEXFLOW_KAFKA_HOME`, if any."""
    named = environ.get("HEXFLOW_KAFKA_HOME")
    return Path(named) if named else None


def prepare_kafka(report: Report, environ: Mapping[str, str] = os.environ) -> None:
    """Fetch what a local broker needs, ahead of the first test's time limit.

    Raises:
        MissingServerError: Java, Maven or the jars are not to be had.
    """
    if environ.get(KAFKA_VARIABLE):
        return
    try:
        find_java()
        if kafka_home(environ) is None:
            fetch_jars(cache_dir(environ), report)
    except ConfigError as exc:
        raise MissingServerError(_no_kafka(exc)) from exc


def start_kafka(
    data_dir: Path,
    *,
    properties: Mapping[str, str] | None = None,
    extra_listeners: Mapping[str, str] | None = None,
    format_options: tuple[str, ...] = (),
) -> KafkaServer:
    """Start a broker of the tests' own.

    Args:
        data_dir: Where it keeps its data.
        properties: Broker properties that win over the defaults.
        extra_listeners: Name of a further listener to its security protocol.
        format_options: Further arguments of the storage formatter.

    Raises:
        MissingServerError: It cannot be started here.
    """
    params = LocalKafkaParams(
        data_dir=data_dir,
        cache_dir=cache_dir(),
        kafka_home=kafka_home(),
        # Compiling less pays off in a broker that lives for a minute.
        java_options=("-XX:TieredStopAtLevel=1",),
        properties=properties or {},
        extra_listeners=extra_listeners or {},
        format_options=format_options,
    )
    kafka = LocalKafka(params)
    try:
        kafka.start()
    except ConfigError as exc:
        raise MissingServerError(_no_kafka(exc)) from exc
    return KafkaServer(bootstrap=kafka.bootstrap, local=kafka)


def start_redis(data_dir: Path) -> RedisServer:
    """Start a Redis of the tests' own, with an append-only file.

    Raises:
        MissingServerError: It cannot be started here.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise MissingServerError(_no_redis("there is no redis-server on PATH"))
    data_dir.mkdir(parents=True, exist_ok=True)
    port = free_port()
    options = {
        "bind": LOOPBACK,
        "port": str(port),
        "dir": str(data_dir),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "loglevel": "warning",
    }
    command = [program, *(word for key, value in options.items() for word in (f"--{key}", value))]
    server = RedisServer(
        url=f"redis://{LOOPBACK}:{port}/0",
        process=LocalProcess("Redis", command, data_dir / "redis.log"),
        data_dir=data_dir,
    )
    try:
        server.start()
    except ConfigError as exc:
        raise MissingServerError(_no_redis(exc)) from exc
    return server


@contextmanager
def kafka_for_tests(environ: Mapping[str, str] = os.environ) -> Iterator[KafkaServer]:
    """Yield the broker named in the environment, else one started for as long as this lasts.

    Raises:
        MissingServerError: There is none, and none can be started.
        ConnectionError: The one named does not answer.
    """
    if named := environ.get(KAFKA_VARIABLE):
        host, _, port = named.split(",")[0].rpartition(":")
        _expect_answer(f"{KAFKA_VARIABLE}={named}", lambda: answers(host, int(port)))
        yield KafkaServer(bootstrap=named)
        return
    with tempfile.TemporaryDirectory(prefix="hexflow-kafka-") as folder:
        server = start_kafka(Path(folder))
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def redis_for_tests(environ: Mapping[str, str] = os.environ) -> Iterator[RedisServer]:
    """Yield the Redis named in the environment, else one started for as long as this lasts.

    Raises:
        MissingServerError: There is none, and none can be started.
        ConnectionError: The one named does not answer.
    """
    if named := environ.get(REDIS_VARIABLE):
        _expect_answer(f"{REDIS_VARIABLE}={named}", lambda: redis_answers(named))
        yield RedisServer(url=named)
        return
    with tempfile.TemporaryDirectory(prefix="hexflow-redis-") as folder:
        server = start_redis(Path(folder))
        try:
            yield server
        finally:
            server.stop()


def redis_answers(url: str) -> bool:
    """Return whether a Redis that has loaded its data answers at an address.

    Raises:
        OSError: It cannot be reached.
    """
    parts = urlsplit(url)
    with connect(parts.hostname or LOOPBACK, parts.port or 6379) as sock:
        if parts.scheme != "redis":
            return True
        sock.sendall(b"PING\r\n")
        reply = sock.recv(64)
    return reply.startswith((b"+PONG", b"-NOAUTH"))


def _expect_answer(named: str, is_ready: Callable[[], bool]) -> None:
    try:
        ready = is_ready()
    except (OSError, ValueError) as exc:
        raise ConnectionError(f"{named} does not answer: {exc}") from exc
    if not ready:
        raise ConnectionError(f"{named} answers, but is not ready")


def _no_kafka(cause: object) -> str:
    return (
        f"no real Apache Kafka: {cause}\n"
        f"To get it: install Java 17 or later and Maven (Debian: apt-get install "
        f"default-jre-headless maven), or set {KAFKA_VARIABLE}=host:port"
    )


def _no_redis(cause: object) -> str:
    return (
        f"no real Redis: {cause}\n"
        f"To get it: install redis-server (Debian: apt-get install redis-server), "
        f"or set {REDIS_VARIABLE}=redis://host:port/0"
    )
