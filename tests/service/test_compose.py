"""Every service of docker-compose.yml as a native process, with the file's command and environment.

Only what a machine without containers cannot have differs: host names, and ports that containers
may share and processes may not.
"""

import json
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.compose import ROOT, ComposeProcess, compose_file, own_services
from tests.support.servers import KafkaServer, RedisServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
TIME_SCALE = "15"
WITHIN_S = 90.0
SAMPLE = re.compile(
    r"^(hexflow_\w+?)(?:_total|_bucket|_count|_sum)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE
)


def free_port() -> str:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


class Cluster:
    """The services of the file as processes.

    Args:
        kafka: In place of the file's.
        redis: In place of the file's.
        folder: For the processes' outputs.
    """

    def __init__(self, kafka: KafkaServer, redis: RedisServer, folder: Path) -> None:
        address = redis.url.removeprefix("redis://").partition("/")[0]
        hosts = {"kafka:9092": kafka.bootstrap, "redis:6379": address}
        services = own_services(compose_file({"HEXFLOW_TIME_SCALE": TIME_SCALE}))
        self.once: dict[str, ComposeProcess] = {}
        self.running: dict[str, ComposeProcess] = {}
        for name, service in services.items():
            replicas = service.get("deploy", {}).get("replicas", 1)
            for number in range(replicas):
                full = f"{name}-{number}" if replicas > 1 else name
                changes = {
                    "HEXFLOW_PROBES__HOST": "127.0.0.1",
                    "HEXFLOW_PROBES__PORT": free_port(),
                    "HEXFLOW_TOPICS__PREFIX": f"compose-{folder.name}.",
                }
                if "GATEWAY_PORT" in service["environment"]:
                    changes |= {"GATEWAY_HOST": "127.0.0.1", "GATEWAY_PORT": free_port()}
                process = ComposeProcess(full, service, hosts, folder, changes)
                is_service = "test" in service["healthcheck"]
                (self.running if is_service else self.once)[full] = process

    def start(self) -> None:
        """Start everything and wait until all of it is ready."""
        self.once["topics"].start()
        assert self.once["topics"].wait(WITHIN_S) == 0, self.once["topics"].tail()
        for process in self.running.values():
            process.start()
        for process in self.running.values():
            self.await_ready(process)

    def await_ready(self, process: ComposeProcess) -> None:
        """Wait until a process says that it is ready."""
        give_up_s = time.monotonic() + WITHIN_S
        while not self.answers(process, "ready"):
            assert not process.has_ended(), process.tail()
            assert time.monotonic() < give_up_s, f"{process.name}: {process.tail()}"
            time.sleep(0.1)

    def answers(self, process: ComposeProcess, path: str) -> bool:
        """Return whether a probe says yes."""
        url = f"http://127.0.0.1:{process.port}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def values(self) -> dict[str, float]:
        """Return the sum of every metric's samples, over all services."""
        found: dict[str, float] = {}
        for process in self.running.values():
            if process.has_ended():
                continue
            url = f"http://127.0.0.1:{process.port}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                for name, value in SAMPLE.findall(answer.read().decode()):
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def stop(self) -> None:
        """End everything."""
        for process in [*self.running.values(), *self.once.values()]:
            if process.is_started:
                process.stop(limit_s=60.0)


def ask_gateway(gateway: ComposeProcess) -> int:
    """Send the gateway a call as an OpenAI client would; returns the tokens of the answer."""
    body = {"model": "default", "messages": [{"role": "user", "content": "Which team won?"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{gateway.environment['GATEWAY_PORT']}/v1/chat/completions",
        data=json.dumps(body | {"max_tokens": 20}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:  # noqa: S310 - loopback
        tokens: int = json.loads(answer.read())["usage"]["completion_tokens"]
        return tokens


@pytest.fixture
def cluster(
    kafka_server: KafkaServer, redis_server: RedisServer, tmp_path: Path
) -> Iterator[Cluster]:
    """Return the running cluster."""
    found = Cluster(kafka_server, redis_server, tmp_path)
    try:
        found.start()
        yield found
    finally:
        found.stop()


def test_the_cluster_completes_a_workload_and_stops_in_order(cluster: Cluster):
    """All services start, the file's own producer gets every answer, SIGTERM ends each with 0."""
    before = cluster.values()
    replay = cluster.once["replay"]
    replay.start()
    assert replay.wait(WITHIN_S * 3) == 0, replay.tail()
    after = cluster.values()
    shown = re.search(r"queries +│ submitted 40, ([^│]*)│", replay.tail())
    assert shown, replay.tail()
    ended = {kind: int(n) for kind, n in re.findall(r"(\w+) (\d+)", shown[1])}
    # A machine too slow for the time scale has calls turned away, never lost.
    assert sum(ended.values()) == 40, shown[0]
    assert set(ended) <= {"completed", "rejected"}, shown[0]
    assert ended["completed"] > 0, shown[0]
    moved = {name for name, value in after.items() if value != before.get(name)}
    assert {
        "hexflow_messages_read",
        "hexflow_calls_dispatched",
        "hexflow_calls_started",
        "hexflow_call_outcomes",
        "hexflow_call_queue_seconds",
        "hexflow_window_attainment",
        "hexflow_window_latency_seconds",
        "hexflow_loop_silence_ratio",
    } <= moved
    assert ask_gateway(cluster.running["gateway"]) > 0
    assert after["hexflow_ready"] == len(cluster.running)
    codes = {name: process.stop(signal.SIGTERM) for name, process in cluster.running.items()}
    assert set(codes.values()) == {0}, codes


def test_health_checks_of_the_file_are_the_probes():
    """The health check asks the very probe that the test above waits for."""
    for service in own_services(compose_file({})).values():
        if "test" in service["healthcheck"]:
            assert ":8080/ready" in service["healthcheck"]["test"][-1]


def test_grafana_finds_prometheus_and_the_dashboard():
    """Provisioning names the data source's container and the folder that is mounted."""
    folder = ROOT / "deploy/grafana/provisioning"
    source = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    boards = yaml.safe_load((folder / "dashboards/hexflow.yaml").read_text())
    path = boards["providers"][0]["options"]["path"]
    assert any(v.endswith(f"{path}:ro") for v in compose_file({})["services"]["grafana"]["volumes"])
