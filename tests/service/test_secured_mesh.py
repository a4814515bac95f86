"""A mesh whose Kafka wants SASL over TLS and whose Redis wants TLS and an ACL user."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from services.cli.options import mesh_settings
from services.cli.processes import ProcessesParams, ProcessMesh, open_processes
from services.cli.replay import ReplayPlan, replay
from services.cli.workload import WorkloadParams, load_fleet
from shared.adapters.local_process import LOOPBACK, LocalProcess, connect, free_port
from shared.runtime.settings import MeshSettings
from tests.support.servers import KafkaServer, is_required

pytestmark = [pytest.mark.real, pytest.mark.slow]
KAFKA_PASSWORD = "correct-horse"  # noqa: S105 - the test's own broker
REDIS_PASSWORD = "battery-staple"  # noqa: S105
LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
RIGHTS = "~hexflow:* &* +@all -@admin -@dangerous +info +client +config|get"


def certificate(folder: Path, name: str) -> Path:
    """Make a self-signed certificate for loopback; returns a PEM file with key and certificate."""
    key, public, both = (folder / f"{name}.{end}" for end in ("key", "crt", "pem"))
    names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{LOOPBACK}")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names),
            *("-keyout", str(key), "-out", str(public)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_text(key.read_text() + public.read_text())
    return both


@pytest.fixture
def kafka(kafka_factory: Callable[..., KafkaServer], tmp_path: Path) -> KafkaServer:
    """Return a broker with a listener that wants TLS and a password."""
    return kafka_factory(
        extra_listeners={"SECURE": "SASL_SSL"},
        properties={
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.secure.plain.sasl.jaas.config": (
                f'{LOGIN} required user_mesh="{KAFKA_PASSWORD}";'
            ),
            "listener.name.secure.ssl.keystore.type": "PEM",
            "listener.name.secure.ssl.keystore.location": str(certificate(tmp_path, "kafka")),
        },
    )


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    """Return the port of a Redis that wants TLS and knows one user with few rights."""
    if shutil.which("redis-server") is None:
        (pytest.fail if is_required() else pytest.skip)("not run: there is no redis-server on PATH")
    port = free_port()
    both = certificate(tmp_path, "redis")
    options = {
        "port": "0",
        "tls-port": str(port),
        "bind": LOOPBACK,
        "dir": str(tmp_path),
        "save": "",
        "tls-auth-clients": "no",
        "tls-cert-file": str(both),
        "tls-key-file": str(both),
        "tls-ca-cert-file": str(tmp_path / "redis.crt"),
    }
    rules = tmp_path / "redis.conf"
    rules.write_text(f"user default off\nuser mesh on >{REDIS_PASSWORD} {RIGHTS}\n")
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    server = LocalProcess("Redis", ["redis-server", str(rules), *words], tmp_path / "redis.log")
    server.start()

    def listens() -> bool:
        connect(LOOPBACK, port).close()
        return True

    server.wait_until(listens, 20)
    yield port
    server.kill()


@pytest.fixture
def environment(kafka: KafkaServer, redis_port: int, tmp_path: Path) -> dict[str, str]:
    """Return the settings of a mesh that is let in."""
    return {
        "HEXFLOW_KAFKA__BOOTSTRAP_SERVERS": kafka.address("SECURE"),
        "HEXFLOW_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
        "HEXFLOW_KAFKA__SASL_USERNAME": "mesh",
        "HEXFLOW_KAFKA__SASL_PASSWORD": KAFKA_PASSWORD,
        "HEXFLOW_KAFKA__SSL_CAFILE": str(tmp_path / "kafka.crt"),
        "HEXFLOW_REDIS__URL": f"rediss://{LOOPBACK}:{redis_port}/0",
        "HEXFLOW_REDIS__USERNAME": "mesh",
        "HEXFLOW_REDIS__PASSWORD": REDIS_PASSWORD,
        "HEXFLOW_REDIS__SSL_CAFILE": str(tmp_path / "redis.crt"),
        "HEXFLOW_TIME_SCALE": "10",
    }


@pytest.fixture
def settings(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> MeshSettings:
    """Return them as the services read them."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return mesh_settings()


@pytest.fixture
async def mesh(settings: MeshSettings, tmp_path: Path) -> AsyncIterator[ProcessMesh]:
    """Return a dispatcher, two workers and a tuner as processes."""
    params = ProcessesParams(fleet=load_fleet("homogeneous")[:2], dispatchers=1)
    async with open_processes(settings, params, tmp_path) as running:
        yield running


async def test_a_secured_mesh_completes_a_workload_and_tells_no_secret(
    mesh: ProcessMesh, settings: MeshSettings
):
    """Every query is answered over TLS with passwords, and no log holds one of them."""
    workload = WorkloadParams(mode="natural", limit=5, rate_qps=0.1, seed=1)
    result = await replay(ReplayPlan(workload=workload, kafka=settings), asyncio.Event())
    queries = result.tally.queries
    assert queries["submitted"] == 5
    assert queries["completed"] == 5
    logs = "".join(path.read_text() for path in mesh.log_dir.glob("*.log"))
    assert "dispatcher" in logs
    assert KAFKA_PASSWORD not in logs
    assert REDIS_PASSWORD not in logs


REFUSED = {
    "Kafka's password": ({"HEXFLOW_KAFKA__SASL_PASSWORD": "wr0ng"}, "uthentication failed"),
    "Redis' password": ({"HEXFLOW_REDIS__PASSWORD": "wr0ng"}, "refuses access"),
    "Kafka's certificate": (
        {"HEXFLOW_KAFKA__SSL_CAFILE": "redis.crt"},
        "certificate verify failed",
    ),
    "Redis' certificate": ({"HEXFLOW_REDIS__SSL_CAFILE": "kafka.crt"}, "certificate"),
}


def test_what_is_wrong_is_said_once_and_ends_the_service(
    environment: dict[str, str], tmp_path: Path
):
    """A worker with wrong credentials ends by itself, with an exit code, a reason and no secret."""
    own = {"WORKER_INSTANCE_ID": "a100-0", "PATH": os.environ["PATH"]}
    for what, (changes, reason) in REFUSED.items():
        paths = {name: str(tmp_path / value) for name, value in changes.items() if ".crt" in value}
        done = subprocess.run(
            [sys.executable, "-m", "services.worker"],
            env={**own, **environment, **changes, **paths},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 2, (what, said)
        assert reason in said, what
        assert "Traceback" not in said, what
        assert "wr0ng" not in said, what
        assert KAFKA_PASSWORD not in said, what
