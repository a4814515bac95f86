"""A real Apache Kafka on this machine: one KRaft node, loopback only.

The jars come from Maven Central through `local_kafka_pom.xml`, once, into a cache folder; an
unpacked Kafka distribution serves as well. Needed on the machine: a Java runtime, 17 or later,
and Maven unless a distribution is named. For development, tests and `hexflow up --with-kafka`; a
production cluster is someone else's.

Invariants: the address and the data folder stay the same over `stop`, `kill` and `start`, so
clients may outlive the broker; acknowledged records survive `kill` (they are in the page cache);
the broker never outlives the process that started it (`local_process.py`).

All calls block; from a coroutine use `asyncio.to_thread`.
"""

import fcntl
import hashlib
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.adapters.local_process import LOOPBACK, LocalProcess, connect, free_port
from shared.errors import ConfigError

MIN_JAVA = 17
MAX_MESSAGE_BYTES = 5 * 1024 * 1024

_CLUSTER_ID = "aGV4Zmxvdy1sb2NhbC1rYQ"
_POM = "local_kafka_pom.xml"
_LOG4J = """\
status = error
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %m (%c{1})%n
"""

Report = Callable[[str], None]


def _say_nothing(_: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class LocalKafkaParams:
    """How to run a local Kafka.

    `extra_listeners` maps a listener's name to its security protocol, e.g.
    `{"SECURE": "SASL_SSL"}`; each gets a port of its own beside the plaintext one, which the
    broker itself and the readiness probe keep using. `properties` are broker properties that win
    over the ones set here.
    """

    data_dir: Path
    """Logs, configuration and the broker's output; created when missing."""
    cache_dir: Path
    """Where fetched jars are kept, shared by all brokers of this user."""
    kafka_home: Path | None = None
    """An unpacked Kafka distribution to use instead of fetching jars."""
    heap_mb: int = 384
    java_options: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    extra_listeners: Mapping[str, str] = field(default_factory=dict)
    format_options: tuple[str, ...] = ()
    """Arguments of the storage formatter, e.g. `("--add-scram", "SCRAM-SHA-256=[...]")`."""
    start_timeout_s: float = 90.0


class LocalKafka:
    """One broker that can be started, stopped, killed and started again.

    Args:
        params: How to run it.
        report: Told, in a few words, of each step that takes longer than a second.
    """

    def __init__(self, params: LocalKafkaParams, report: Report = _say_nothing) -> None:
        self.params = params
        self._report = report
        self._ports = {name: free_port() for name in ("PLAINTEXT", *params.extra_listeners)}
        self._controller_port = free_port()
        self._process: LocalProcess | None = None

    @property
    def bootstrap(self) -> str:
        """Address of the plaintext listener, `host:port`."""
        return self.address("PLAINTEXT")

    @property
    def pid(self) -> int | None:
        """Process id of the broker while it runs, else None."""
        return None if self._process is None else self._process.pid

    @property
    def log_path(self) -> Path:
        """Where the broker writes its warnings and errors."""
        return self.params.data_dir / "kafka.log"

    def address(self, listener: str) -> str:
        """Return `host:port` of a listener; KeyError when there is none of that name."""
        return f"{LOOPBACK}:{self._ports[listener]}"

    def start(self) -> None:
        """Start the broker and return when it answers requests; does nothing while it runs.

        Raises:
            ConfigError: Java or the jars are missing, or the broker did not start.
        """
        if self.pid is not None:
            return
        command = self._java_command()
        self._write_configuration()
        if not (self._log_dir / "meta.properties").exists():
            self._format_storage(command)
        self._report("starting Apache Kafka")
        self._process = LocalProcess(
            "Apache Kafka",
            [*command, "kafka.Kafka", str(self._config_path)],
            self.log_path,
        )
        self._process.start()
        port = self._ports["PLAINTEXT"]
        self._process.wait_until(lambda: answers(LOOPBACK, port), self.params.start_timeout_s)

    def stop(self, grace_s: float = 15.0) -> None:
        """Shut the broker down in order; data and address stay for the next `start`."""
        if self._process is not None:
            self._process.stop(grace_s)

    def kill(self) -> None:
        """End the broker with SIGKILL; data and address stay for the next `start`."""
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Self:
        """Start the broker."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the broker."""
        self.stop()

    @property
    def _log_dir(self) -> Path:
        return self.params.data_dir / "log"

    @property
    def _config_path(self) -> Path:
        return self.params.data_dir / "server.properties"

    def _java_command(self) -> list[str]:
        java = find_java()
        if self.params.kafka_home is not None:
            jars = self.params.kafka_home / "libs"
            if not jars.is_dir():
                raise ConfigError(f"{self.params.kafka_home} holds no Kafka: no folder {jars}")
        else:
            jars = fetch_jars(self.params.cache_dir, self._report)
        return [
            java,
            f"-Xmx{self.params.heap_mb}m",
            "-Xms64m",
            "-XX:+UseSerialGC",
            "-XX:+ExitOnOutOfMemoryError",
            "-Djava.awt.headless=true",
            f"-Dlog4j2.configurationFile={self.params.data_dir / 'log4j2.properties'}",
            *self.params.java_options,
            "-cp",
            str(jars / "*"),
        ]

    def _write_configuration(self) -> None:
        self.params.data_dir.mkdir(parents=True, exist_ok=True)
        (self.params.data_dir / "log4j2.properties").write_text(_LOG4J)
        lines = [f"{key}={value}\n" for key, value in self._properties().items()]
        self._config_path.write_text("".join(lines))

    def _properties(self) -> dict[str, str]:
        protocols = {"PLAINTEXT": "PLAINTEXT", **self.params.extra_listeners}
        clients = ",".join(f"{name}://{self.address(name)}" for name in protocols)
        controller = f"{LOOPBACK}:{self._controller_port}"
        protocols["CONTROLLER"] = "PLAINTEXT"
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{controller}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": f"{clients},CONTROLLER://{controller}",
            "advertised.listeners": clients,
            "listener.security.protocol.map": ",".join(f"{n}:{p}" for n, p in protocols.items()),
            "log.dirs": str(self._log_dir),
            **_SINGLE_NODE,
            **self.params.properties,
        }

    def _format_storage(self, command: list[str]) -> None:
        config = ["--cluster-id", _CLUSTER_ID, "--config", str(self._config_path)]
        done = subprocess.run(  # noqa: S603 - our own command line
            [*command, "kafka.tools.StorageTool", "format", *config, *self.params.format_options],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ConfigError(f"Kafka's storage was not formatted:\n{done.stdout}{done.stderr}")


_SINGLE_NODE = {
    "auto.create.topics.enable": "false",
    "message.max.bytes": str(MAX_MESSAGE_BYTES),
    "replica.fetch.max.bytes": str(MAX_MESSAGE_BYTES),
    "group.initial.rebalance.delay.ms": "0",
    # Lets a mesh on this machine notice a dead dispatcher sooner than after 6 s, the default.
    "group.min.session.timeout.ms": "1000",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "8",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "8",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "8",
    # After a SIGKILL the node may register again only when its former session has expired: with
    # the default of 9 s a restart takes 12 s, with 3 s it takes 5.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # The default buffer alone is a third of the heap.
    "log.cleaner.dedupe.buffer.size": str(8 * 1024 * 1024),
}


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return `$HEXFLOW_CACHE_DIR`, else `hexflow` in the user's cache folder."""
    if chosen := environ.get("HEXFLOW_CACHE_DIR"):
        return Path(chosen).expanduser().resolve()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hexflow"


def find_java() -> str:
    """Return the path of the Java launcher on `PATH`.

    Raises:
        ConfigError: There is none, or it is older than Kafka can run on.
    """
    java = shutil.which("java")
    how = f"install a Java runtime, version {MIN_JAVA} or later (Debian: default-jre-headless)"
    if java is None:
        raise ConfigError(f"Apache Kafka needs Java, and there is none on PATH: {how}")
    done = subprocess.run(  # noqa: S603 - a fixed argument
        [java, "-version"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r'version "(\d+)', done.stderr)
    if found is None:
        raise ConfigError(f"{java} does not tell its version ({done.stderr.strip()}): {how}")
    if int(found[1]) < MIN_JAVA:
        raise ConfigError(f"{java} is version {found[1]}, too old for Apache Kafka: {how}")
    return java


def fetch_jars(cache_dir: Path, report: Report = _say_nothing) -> Path:
    """Return the folder of Kafka's jars, fetching them (about 45 MB) when they are not cached.

    Safe to call from several processes at once; a half-done fetch leaves nothing behind.

    Raises:
        ConfigError: They are not cached, and Maven is missing or cannot fetch them.
    """
    pom = resources.files(__package__).joinpath(_POM).read_bytes()
    jars = cache_dir / f"kafka-{hashlib.sha256(pom).hexdigest()[:12]}"
    if jars.is_dir():
        return jars
    maven = shutil.which("mvn")
    if maven is None:
        raise ConfigError(
            "Apache Kafka's jars are fetched by Maven, and there is no mvn on PATH: install it "
            "(Debian: maven), or name an unpacked Kafka distribution in HEXFLOW_KAFKA_HOME",
        )
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / "kafka.lock"):
        if not jars.is_dir():
            report("fetching Apache Kafka's jars, about 45 MB, once")
            _copy_dependencies(maven, pom, jars)
    return jars


def _copy_dependencies(maven: str, pom: bytes, jars: Path) -> None:
    with tempfile.TemporaryDirectory(dir=jars.parent, prefix="kafka-") as staging:
        pom_path = Path(staging) / "pom.xml"
        pom_path.write_bytes(pom)
        fetched = Path(staging) / "jars"
        done = subprocess.run(  # noqa: S603 - our own command line
            [
                maven,
                "--quiet",
                "--batch-mode",
                f"--file={pom_path}",
                "dependency:copy-dependencies",
                f"-DoutputDirectory={fetched}",
                "-DincludeScope=runtime",
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[:8])
            raise ConfigError(f"Maven could not fetch Apache Kafka's jars:\n{said}")
        fetched.rename(jars)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def answers(host: str, port: int) -> bool:
    """Ask the broker for its metadata, and return whether it names a live broker.

    An open port is not enough: a node listens, and even answers, before the controller lets it
    serve.

    Raises:
        OSError: It cannot be reached.
    """
    with connect(host, port) as sock:
        body = _response(sock, _METADATA_REQUEST)
    correlation_id: int
    num_brokers: int
    correlation_id, num_brokers = struct.unpack_from(">ii", body)
    return correlation_id == _CORRELATION_ID and num_brokers > 0


# Metadata, version 1, for no topics: api key, version, correlation id, client id, empty array.
_CORRELATION_ID = 7
_METADATA_REQUEST = struct.pack(">hhih5si", 3, 1, _CORRELATION_ID, 5, b"probe", 0)


def _response(sock: socket.socket, request: bytes) -> bytes:
    sock.sendall(struct.pack(">i", len(request)) + request)
    with sock.makefile("rb") as stream:
        header = stream.read(4)
        if len(header) < 4:
            raise ConnectionResetError("the broker closed the connection")
        body = stream.read(struct.unpack(">i", header)[0])
    if len(body) < 8:
        raise ConnectionResetError("the broker answered with too little")
    return body
