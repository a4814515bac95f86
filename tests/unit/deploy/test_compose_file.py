"""What docker-compose.yml says, without running it."""

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from services.dispatcher.settings import DispatcherSettings
from services.gateway.settings import GatewaySettings
from services.text2sql.settings import AgentSettings
from services.tuner.settings import TunerSettings
from services.worker.settings import WorkerSettings
from shared.adapters import llamacpp_server
from shared.adapters.small_model import MODEL_NAME, gguf_path
from shared.runtime.settings import MESH_PREFIX, MeshSettings, variable_names
from shared.simulation.fleets import builtin_fleet, parse_fleet
from tests.support.compose import ROOT, compose_file, own_services

COMPOSE = compose_file({})
OURS = own_services(COMPOSE)
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SETTINGS = (
    variable_names(MeshSettings, MESH_PREFIX)
    | variable_names(DispatcherSettings, "DISPATCHER_")
    | variable_names(WorkerSettings, "WORKER_")
    | variable_names(TunerSettings, "TUNER_")
    | variable_names(GatewaySettings, "GATEWAY_")
    | variable_names(AgentSettings, "TEXT2SQL_")
)
SERVERS = {"kafka", "redis", "prometheus", "grafana"}


def test_services_of_the_design_are_there():
    """Kafka, Redis, two dispatchers, three different workers, the tuner and monitoring."""
    assert set(COMPOSE["services"]) >= SERVERS
    assert OURS["dispatcher"]["deploy"]["replicas"] == 2
    usual = {name: one for name, one in OURS.items() if "profiles" not in one}
    workers = [one["environment"] for name, one in usual.items() if name.startswith("worker")]
    specs = {spec.instance_id: spec.gpu for spec in builtin_fleet("hetero-1")}
    assert len({specs[one["WORKER_INSTANCE_ID"]] for one in workers}) == 3
    assert {"tuner", "text2sql", "gateway"} <= set(OURS)


@pytest.mark.parametrize("name", sorted(set(COMPOSE["services"]) - SERVERS))
def test_variables_are_settings(name: str):
    """Every variable that the file gives to a service is one of its settings."""
    assert set(COMPOSE["services"][name]["environment"]) <= SETTINGS


@pytest.mark.parametrize(("name", "fleet"), [("worker-vllm", "gpu"), ("worker-cpu", "cpu")])
def test_a_real_engine_is_described(name: str, fleet: str):
    """The worker of a real engine finds itself in the fleet file that it is given, in real time."""
    environment = COMPOSE["services"][name]["environment"]
    (spec,) = parse_fleet((ROOT / f"deploy/fleets/{fleet}.toml").read_bytes(), f"{fleet}.toml")
    assert spec.instance_id == environment["WORKER_INSTANCE_ID"]
    assert environment["WORKER_FLEET_FILE"] == f"/etc/hexflow/{fleet}.toml"
    assert environment["HEXFLOW_TIME_SCALE"] == "1"


def test_the_small_model_is_served_where_its_worker_asks():
    """Profile `small-model`: the server's command fits the worker's settings and the image."""
    server, worker = COMPOSE["services"]["llamacpp"], OURS["worker-cpu"]
    *command, given = server["command"]
    assert command == ["python", "-m", llamacpp_server.__name__]
    params = msgspec.json.decode(given, type=llamacpp_server.LlamaCppParams, strict=True)
    settings = worker["environment"]
    assert settings["WORKER_OPENAI__URL"] == f"http://llamacpp:{params.port}"
    assert settings["WORKER_OPENAI__MODEL"] == params.model_name == MODEL_NAME
    assert Path(params.model_path) == gguf_path(Path("/opt/small-model"))
    (spec,) = parse_fleet((ROOT / "deploy/fleets/cpu.toml").read_bytes(), "cpu.toml")
    assert (spec.model, spec.max_num_seqs) == (params.model_name, params.num_slots)
    assert spec.kv_tokens == params.num_slots * params.slot_tokens
    assert spec.max_context_tokens == params.slot_tokens
    assert server["build"]["target"] in re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {service["profiles"][0] for service in (server, worker)} == {"small-model"}


def test_the_small_models_image_takes_one_package_of_the_lock_file():
    """What the image's build picks out of the lock file is llama.cpp's version with its hashes."""
    (program,) = re.findall(r"RUN awk '([^']+)' requirements/dev.txt", DOCKERFILE)
    picked = subprocess.run(
        ["awk", program, "requirements/dev.txt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pins = [line for line in picked.splitlines() if line and not line.startswith(" ")]
    assert len(pins) == 1
    assert pins[0].startswith("xllamacpp==")
    assert picked.count("--hash=sha256:") >= 2


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_images_are_pinned(name: str):
    """No image moves under a cluster that is running."""
    image = COMPOSE["services"][name]["image"]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", image)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_nothing_listens_beyond_this_machine(name: str):
    """Ports are published on loopback only."""
    for port in COMPOSE["services"][name].get("ports", []):
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", sorted(set(OURS) | SERVERS | {"llamacpp"}))
def test_services_are_checked_and_bounded(name: str):
    """What goes on running has a health check; everything of it has bounds and few rights."""
    service = COMPOSE["services"][name]
    runs_on = service.get("restart") == "unless-stopped"
    assert "test" in service["healthcheck"] or (not runs_on and service["healthcheck"]["disable"])
    if name in OURS:
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    if runs_on:
        assert service["deploy"]["resources"]["limits"]


@pytest.mark.parametrize("name", OURS)
def test_a_drain_is_never_cut_short(name: str):
    """Containers are killed later than their services give up draining."""
    grace_s = float(OURS[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > float(OURS[name]["environment"]["HEXFLOW_DRAIN_S"])


def test_services_start_after_what_they_need():
    """Every service waits for Kafka, Redis and the topics."""
    for name, service in OURS.items():
        needs = service["depends_on"]
        assert needs["kafka"]["condition"] == "service_healthy"
        if name != "topics":
            assert needs["redis"]["condition"] == "service_healthy"
            assert needs["topics"]["condition"] == "service_completed_successfully"


def test_kafka_takes_the_largest_message():
    """The broker's limit is that of the settings."""
    largest = MeshSettings.model_fields["topics"].default.max_message_bytes
    assert COMPOSE["services"]["kafka"]["environment"]["KAFKA_MESSAGE_MAX_BYTES"] == str(largest)


def test_mounted_files_exist():
    """What the file mounts from the project is in the project."""
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            if volume.startswith("./") and volume != "./model:/model:ro":  # the user's own
                assert (ROOT / volume.split(":")[0]).exists(), volume


def test_prometheus_asks_every_service():
    """No service with a probe port is forgotten by the scrape configuration."""
    asked = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    for name, service in OURS.items():
        if "test" in service["healthcheck"]:
            assert re.search(rf"[\[ ]{name}[,\]]", asked), name
