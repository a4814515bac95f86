"""Every service of docker-compose.yml as a native process, with the file's command and environment.

Only what a machine without containers cannot have differs: host names, and ports that containers
may share and processes may not.
"""

import asyncio
import json
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.text2sql.samples.writing import write_sample
from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from tests.support.collector import CollectedSpan, Collector, open_collector
from tests.support.compose import ROOT, ComposeProcess, compose_file, own_services
from tests.support.monitoring import looked_at
from tests.support.servers import KafkaServer, RedisServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
TIME_SCALE = "15"
WITHIN_S = 120.0
MAX_RESTARTS = 3
ENOUGH_CALLS = 30.0
MAY_REST = {"hexflow_alpha", "hexflow_calls_demoted", "hexflow_duplicates_dropped"}
"""What only a better α, overload or redelivery move."""
QUESTION = "How many points did the teams of Arsenal win at home?"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SLACK_NS = 1_000_000_000
"""Clocks of the mesh and of the tracer differ by what the broker's clock is learned with."""
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
        collector: Where traces go.
    """

    def __init__(
        self, kafka: KafkaServer, redis: RedisServer, folder: Path, collector: Collector
    ) -> None:
        database = f"sqlite:///{folder}/league.db"
        write_sample("league", database)
        address = redis.url.removeprefix("redis://").partition("/")[0]
        hosts = {"kafka:9092": kafka.bootstrap, "redis:6379": address}
        ours = own_services(compose_file({"HEXFLOW_TIME_SCALE": TIME_SCALE}))
        services = {
            name: one for name, one in ours.items() if "small-model" not in one.get("profiles", ())
        }
        self.prefix = f"compose-{folder.name}."
        self.seen: dict[str, set[float]] = {}
        self.once: dict[str, ComposeProcess] = {}
        self.running: dict[str, ComposeProcess] = {}
        for name, service in services.items():
            replicas = service.get("deploy", {}).get("replicas", 1)
            for number in range(replicas):
                full = f"{name}-{number}" if replicas > 1 else name
                changes = {
                    "HEXFLOW_PROBES__HOST": "127.0.0.1",
                    "HEXFLOW_PROBES__PORT": free_port(),
                    "HEXFLOW_TOPICS__PREFIX": self.prefix,
                }
                changes["HEXFLOW_TRACES__ENDPOINT"] = collector.url
                if name == "tuner":  # so that it decides within this test's few queries
                    changes["TUNER_MIN_QUERIES"] = "20"
                if name == "text2sql":
                    changes["TEXT2SQL_DATABASES"] = json.dumps({"league": database})
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
        restarts = 0
        while not self.answers(process, "ready"):
            if process.has_ended():  # `restart: unless-stopped`, e.g. Redis is slow to answer
                restarts += 1
                assert restarts <= MAX_RESTARTS, process.tail()
                process.start()
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
        for name in self.seen.keys() | found.keys():
            self.seen.setdefault(name, {0.0}).add(found.get(name, 0.0))
        return found

    def moved(self) -> set[str]:
        """Return the metrics that had more than one value, nothing counting as zero."""
        return {name for name, values in self.seen.items() if len(values) > 1}

    def lose_and_restart(self, name: str) -> None:
        """Kill a worker that has calls, wait until it is declared dead, and start it again."""
        self.until("hexflow_calls_started", ENOUGH_CALLS)
        self.running[name].stop(signal.SIGKILL)
        self.until("hexflow_instances_fenced", 1.0)
        self.running[name].start()
        self.await_ready(self.running[name])

    def until(self, metric: str, value: float) -> None:
        """Wait until a metric's sum over all services has reached a value."""
        give_up_s = time.monotonic() + WITHIN_S
        while self.values().get(metric, 0.0) < value:
            assert time.monotonic() < give_up_s, metric
            time.sleep(0.5)

    def stop(self) -> None:
        """End everything."""
        for process in [*self.running.values(), *self.once.values()]:
            if process.is_started:
                process.stop(limit_s=60.0)


def post(
    gateway: ComposeProcess, path: str, body: dict[str, Any], traceparent: str
) -> dict[str, Any]:
    """Send the gateway a request, as a part of a trace of the client's; returns the answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{gateway.environment['GATEWAY_PORT']}{path}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "traceparent": traceparent},
    )
    with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:  # noqa: S310 - loopback
        found: dict[str, Any] = json.loads(answer.read())
        return found


def check_trace(spans: list[CollectedSpan]) -> None:
    """Check that a question's spans are one tree from HTTP to engine and database, in order."""
    by_id = {span.span_id: span for span in spans}
    parents = {
        (span.service.removeprefix("hexflow-"), span.name): by_id[span.parent_id].name
        for span in spans
        if span.parent_id in by_id
    }
    assert parents == {
        ("text2sql", "question text2sql"): "POST /v1/queries",
        ("text2sql", "SELECT"): "question text2sql",
        ("dispatcher", "dispatch"): "question text2sql",
        ("worker", "queue"): "dispatch",
        ("worker", "chat default"): "queue",
    }
    (first,) = [span for span in spans if span.parent_id not in by_id]
    assert (first.service, first.name) == ("hexflow-gateway", "POST /v1/queries")
    assert first.parent_id == TRACEPARENT.split("-")[2]
    for span in spans:
        assert span.began_ns <= span.ended_ns
        if span.parent_id in by_id:
            assert span.began_ns >= by_id[span.parent_id].began_ns - SLACK_NS, span
    texts = " ".join(str(span.attributes) for span in spans)
    assert QUESTION not in texts
    assert "gen_ai.usage.output_tokens" in texts


async def send_nonsense(kafka: KafkaServer, prefix: str) -> None:
    """Send what is no message to the calls' topic and to one that only services write."""
    async with KafkaBroker.open(KafkaParams(bootstrap_servers=kafka.bootstrap)) as broker:
        for topic in ("stage-requests", "control"):
            await broker.publish(prefix + topic, b"no message", key=b"k")


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Return what collects traces."""
    with open_collector() as found:
        yield found


@pytest.fixture
def cluster(
    kafka_server: KafkaServer, redis_server: RedisServer, tmp_path: Path, collector: Collector
) -> Iterator[Cluster]:
    """Return the running cluster."""
    found = Cluster(kafka_server, redis_server, tmp_path, collector)
    try:
        found.start()
        yield found
    finally:
        found.stop()


async def test_the_cluster_completes_a_workload_and_stops_in_order(
    cluster: Cluster, collector: Collector, kafka_server: KafkaServer
):
    """All services start, the file's own producer gets every answer, SIGTERM ends each with 0.

    A worker is killed and records that nobody can read are sent meanwhile, so that every metric
    that a rule or a panel looks at moves, but for what only other mishaps move.
    A question over HTTP leaves one trace with the spans of all four services that it went through.
    """
    replay = cluster.once["replay"]
    await send_nonsense(kafka_server, cluster.prefix)
    replay.start()
    await asyncio.to_thread(cluster.lose_and_restart, "worker-l40s")
    assert await asyncio.to_thread(replay.wait, WITHIN_S * 3) == 0, replay.tail()
    shown = re.search(r"queries +│ submitted 40, ([^│]*)│", replay.tail())
    assert shown, replay.tail()
    ended = {kind: int(n) for kind, n in re.findall(r"(\w+) (\d+)", shown[1])}
    # A machine too slow for the time scale has calls turned away, never lost.
    assert sum(ended.values()) == 40, shown[0]
    assert set(ended) <= {"completed", "rejected"}, shown[0]
    assert ended["completed"] > 0, shown[0]
    gateway = cluster.running["gateway"]
    chat = {"model": "default", "messages": [{"role": "user", "content": QUESTION}]}
    answer = post(gateway, "/v1/chat/completions", chat | {"max_tokens": 20}, "")
    assert answer["usage"]["completion_tokens"] > 0
    asked = {"question": QUESTION, "database": "league", "stream": False, "slo_s": 600.0}
    asking = asyncio.create_task(
        asyncio.to_thread(post, gateway, "/v1/queries", asked, TRACEPARENT), name="ask"
    )
    while not asking.done():
        cluster.values()
        await asyncio.sleep(0.2)
    assert (await asking)["result"]["kind"] in ("completed", "unanswered")
    cluster.until("hexflow_tuning_decisions", 1.0)
    assert looked_at() - cluster.moved() <= MAY_REST
    assert cluster.values()["hexflow_ready"] == len(cluster.running)
    codes = {name: process.stop(signal.SIGTERM) for name, process in cluster.running.items()}
    assert set(codes.values()) == {0}, codes
    trace_id = TRACEPARENT.split("-")[1]
    check_trace([span for span in collector.spans if span.trace_id == trace_id])
    of_tuner = {span.name for span in collector.spans if span.service == "hexflow-tuner"}
    assert of_tuner == {"tune", "decide"}


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
