"""Profile `small-model` of docker-compose.yml as native processes: a real model answers."""

import json
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.adapters.local_process import LOOPBACK, free_port
from shared.adapters.small_model import gguf_path
from tests.support.compose import ROOT, ComposeProcess, await_answer, compose_file
from tests.support.engines import small_model
from tests.support.servers import KafkaServer, RedisServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600)]
NAMES = ("topics", "llamacpp", "dispatcher", "worker-cpu", "gateway")
WITHIN_S = 180.0


@pytest.fixture
def processes(
    kafka_server: KafkaServer, redis_server: RedisServer, tmp_path: Path
) -> Iterator[dict[str, ComposeProcess]]:
    """Return the profile's services, not started yet."""
    services, port = compose_file({})["services"], free_port()
    there = {
        "kafka:9092": kafka_server.bootstrap,
        "redis:6379": redis_server.url.removeprefix("redis://").partition("/")[0],
        "llamacpp:8000": f"{LOOPBACK}:{port}",
        str(gguf_path(Path("/opt/small-model"))): str(small_model()),
        '"0.0.0.0", "port": 8000': f'"{LOOPBACK}", "port": {port}',
        "/etc/hexflow/cpu.toml": str(ROOT / "deploy/fleets/cpu.toml"),
    }
    prefix = f"small-{secrets.token_hex(4)}."
    found = {}
    for name in NAMES:
        changes = {
            "HEXFLOW_PROBES__HOST": LOOPBACK,
            "HEXFLOW_PROBES__PORT": str(port if name == "llamacpp" else free_port()),
            "HEXFLOW_TOPICS__PREFIX": prefix,
        }
        if name == "gateway":
            changes |= {"GATEWAY_HOST": LOOPBACK, "GATEWAY_PORT": str(free_port())}
        found[name] = ComposeProcess(name, services[name], there, tmp_path, changes)
    yield found
    for process in found.values():
        if process.is_started:
            process.stop()


def test_the_small_model_answers_over_http(processes: dict[str, ComposeProcess]):
    """The file's llama.cpp, worker, dispatcher and gateway turn a question into real tokens."""
    processes["topics"].start()
    assert processes["topics"].wait(WITHIN_S) == 0, processes["topics"].tail()
    for name in NAMES[1:]:
        process = processes[name]
        process.start()
        path = "v1/models" if name == "llamacpp" else "ready"
        await_answer(process, f"http://{LOOPBACK}:{process.port}/{path}", WITHIN_S)
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{processes['gateway'].environment['GATEWAY_PORT']}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "x-hexflow-slo-s": "300"},
    )
    with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:  # noqa: S310 - loopback
        found = json.loads(answer.read())
    assert found["choices"][0]["message"]["content"].strip()
    assert 0 < found["usage"]["completion_tokens"] <= 8
