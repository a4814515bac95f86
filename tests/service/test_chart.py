"""The Helm chart, rendered by Helm itself."""

import os
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from services.dispatcher.settings import DispatcherSettings
from services.gateway.settings import GatewaySettings
from services.text2sql.settings import AgentSettings
from services.tuner.settings import TunerSettings
from services.worker.settings import WorkerSettings
from shared.runtime.settings import MESH_PREFIX, MeshSettings, variable_names
from shared.simulation.fleets import parse_fleet
from tests.support.helm import CHART, EXAMPLES, Helm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]
GOLDEN = Path(__file__).parents[1] / "data" / "chart"
KUBERNETES = ("1.35", "1.36", "1.37")
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
FOREIGN = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
"""Kinds of other projects, which Kubernetes' own schemas do not know."""
OPEN = "--set=gateway.allowAnonymous=true"
EVERYTHING = [
    OPEN,
    "--set=text2sql.enabled=true,text2sql.databases.secretName=databases",
    "--set=gateway.ingress.enabled=true,gateway.ingress.host=llm.example.com",
    "--set=monitoring.serviceMonitor.enabled=true",
    "--set=monitoring.rules.enabled=true",
    "--set=monitoring.dashboards.enabled=true",
    "--set=workerDefaults.autoscaling.enabled=true",
]
SETTINGS = (
    variable_names(MeshSettings, MESH_PREFIX)
    | variable_names(DispatcherSettings, "DISPATCHER_")
    | variable_names(WorkerSettings, "WORKER_")
    | variable_names(TunerSettings, "TUNER_")
    | variable_names(GatewaySettings, "GATEWAY_")
    | variable_names(AgentSettings, "TEXT2SQL_")
)
NOT_IN_A_POD = {"HEXFLOW_KAFKA__CLIENT_ID", "HEXFLOW_REDIS__KEY_PREFIX"}
VALUES = {example.stem: [f"--values={example}"] for example in EXAMPLES} | {
    "defaults": [OPEN],
    "everything": EVERYTHING,
}


def containers(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every container of every workload."""
    return [
        container
        for one in manifests
        if one["kind"] in {"Deployment", "StatefulSet", "Job"}
        for container in one["spec"]["template"]["spec"]["containers"]
    ]


def worker_sets(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sets of the worker pools."""
    return [
        one
        for one in manifests
        if one["kind"] == "StatefulSet" and "hexflow/pool" in one["metadata"]["labels"]
    ]


def test_lint_finds_nothing(helm: Helm):
    """`helm lint` is silent about the chart with every example."""
    for example in EXAMPLES:
        done = helm.run("lint", "--strict", str(CHART), f"--values={example}")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", VALUES)
def test_manifests_fit_the_schemas_of_three_kubernetes_versions(helm: Helm, values: str):
    """Every manifest is valid, strictly, in three versions of Kubernetes."""
    manifests = helm.manifests(*VALUES[values])
    checked = [one for one in manifests if one["kind"] not in FOREIGN]
    assert len(checked) > 8
    for version in KUBERNETES:
        for one in checked:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("values", VALUES)
def test_pods_are_confined(helm: Helm, values: str):
    """No pod is root, may gain rights, write to its image or talk to the Kubernetes API."""
    for one in helm.manifests(*VALUES[values]):
        if one["kind"] not in {"Deployment", "StatefulSet", "Job"}:
            continue
        pod = one["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            allowed = container["securityContext"]
            assert allowed["readOnlyRootFilesystem"]
            assert not allowed["allowPrivilegeEscalation"]
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert {"requests", "limits"} <= set(container["resources"])
            assert not container["image"].endswith(":latest")


@pytest.mark.parametrize("values", VALUES)
def test_pods_get_longer_than_a_drain_takes(helm: Helm, values: str):
    """A pod's grace period is strictly above the bound of its service's drain."""
    for one in helm.manifests(*VALUES[values]):
        if one["kind"] in {"Deployment", "StatefulSet"}:
            pod = one["spec"]["template"]["spec"]
            (drain_s,) = [
                float(variable["value"])
                for variable in pod["containers"][0]["env"]
                if variable["name"] == "HEXFLOW_DRAIN_S"
            ]
            assert pod["terminationGracePeriodSeconds"] > drain_s


def test_probes_ask_for_progress(helm: Helm):
    """Every service's pod is restarted by `/live` and gets work by `/ready`."""
    for container in containers(helm.manifests(OPEN)):
        if container["name"] != "topics":
            assert container["livenessProbe"]["httpGet"]["path"] == "/live"
            assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
            assert container["startupProbe"]["httpGet"]["path"] == "/ready"


def test_variables_are_settings_and_the_other_way_round(helm: Helm):
    """Every variable of a pod is a setting; every mesh-wide setting can be set by values."""
    used = {
        variable["name"]
        for values in VALUES.values()
        for container in containers(helm.manifests(*values))
        for variable in container["env"]
    }
    assert used <= SETTINGS
    secured = [
        OPEN,
        "--set=kafka.securityProtocol=SASL_SSL,kafka.credentials.secretName=a",
        "--set=kafka.tls.secretName=b,kafka.tls.certKey=c,kafka.tls.keyKey=d",
        "--set=redis.credentials.secretName=e,redis.credentials.usernameKey=f",
        "--set=redis.tls.secretName=g,redis.tls.certKey=h,redis.tls.keyKey=i",
    ]
    set_by_values = {
        variable["name"]
        for container in containers(helm.manifests(*secured))
        for variable in container["env"]
    }
    tuned_elsewhere = {
        name
        for name in variable_names(MeshSettings, MESH_PREFIX)
        if name.endswith(("TIMEOUT_S", "MAX_CONNECTIONS"))
    } - {"HEXFLOW_KAFKA__SESSION_TIMEOUT_S"}
    missing = {n for n in variable_names(MeshSettings, MESH_PREFIX) if "__" in n} - set_by_values
    assert missing == tuned_elsewhere | NOT_IN_A_POD


def test_passwords_come_from_secrets(helm: Helm):
    """No manifest holds a password: they are read from Secrets by reference."""
    (example,) = [path for path in EXAMPLES if path.stem == "managed-kafka"]
    for container in containers(helm.manifests(f"--values={example}")):
        for variable in container["env"]:
            if "PASSWORD" in variable["name"] or "USERNAME" in variable["name"]:
                assert set(variable) == {"name", "valueFrom"}
                assert "secretKeyRef" in variable["valueFrom"]


def test_images_can_be_pinned(helm: Helm):
    """A digest follows every image's tag, that of pools with an image of their own too."""
    own = f"--set=workerDefaults.image.repository=own,workerDefaults.image.digest={DIGEST}"
    found = containers(helm.manifests(OPEN, f"--set=image.digest={DIGEST}", own))
    images = {container["name"]: container["image"] for container in found}
    assert images.pop("worker") == f"own:0.1.0@{DIGEST}"
    assert set(images.values()) == {f"hexflow:0.1.0@{DIGEST}"}
    assert {"dispatcher", "tuner", "gateway", "topics"} <= set(images)


def test_every_pod_of_a_pool_finds_itself_in_its_fleet(helm: Helm):
    """The fleet file of a pool names each pod that it may ever have, with the pool's numbers."""
    (example,) = [path for path in EXAMPLES if path.stem == "mixed-gpu"]
    manifests = helm.manifests(f"--values={example}")
    fleets = {
        one["metadata"]["name"]: parse_fleet(one["data"]["fleet.toml"].encode(), "fleet.toml")
        for one in manifests
        if one["kind"] == "ConfigMap" and "fleet.toml" in one["data"]
    }
    ids = {name: [spec.instance_id for spec in specs] for name, specs in fleets.items()}
    assert ids == {
        "prod-hexflow-worker-a100": [f"prod-hexflow-worker-a100-{n}" for n in range(2)],
        "prod-hexflow-worker-l40s": [f"prod-hexflow-worker-l40s-{n}" for n in range(4)],
    }
    (first, _) = fleets["prod-hexflow-worker-a100"]
    assert (first.model, first.max_num_seqs, first.gpu) == ("llama-3.1-70b", 128, "A100")
    sets = {one["metadata"]["name"] for one in worker_sets(manifests)}
    assert sets == set(ids)


def test_a_pool_can_describe_its_instances_in_full(helm: Helm):
    """Numbers of an instance arrive in the fleet file as they were given."""
    told = (
        '--set-json=workerPools=[{"name":"own","replicas":1,"instance":{"gpu":"H200",'
        '"kv_tokens":1900000,"features":["tools"],"prefix_caching":false,'
        '"latency":{"prefill_s_per_token":8e-5,"weights_s":0.021}}}]'
    )
    (fleet,) = [one for one in helm.manifests(OPEN, told) if one["kind"] == "ConfigMap"]
    (spec,) = parse_fleet(fleet["data"]["fleet.toml"].encode(), "fleet.toml")
    assert (spec.kv_tokens, spec.prefix_caching) == (1_900_000, False)
    assert (spec.latency.prefill_s_per_token, spec.latency.weights_s) == (8e-5, 0.021)


def test_autoscaling_goes_by_seconds_of_work(helm: Helm):
    """No autoscaler looks at processor time; a scaled set names no number of replicas."""
    manifests = helm.manifests(*EVERYTHING)
    scalers = [one for one in manifests if one["kind"] == "HorizontalPodAutoscaler"]
    assert scalers
    for one in scalers:
        (metric,) = one["spec"]["metrics"]
        assert metric["pods"]["metric"]["name"] == "hexflow_backlog_seconds"
    assert all("replicas" not in one["spec"] for one in worker_sets(manifests))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_manifests_are_as_reviewed(helm: Helm, example: Path):
    """What an example renders changes only on purpose: `WRITE_GOLDEN=1` writes it anew."""
    off = "--set=monitoring.rules.enabled=false,monitoring.dashboards.enabled=false"
    golden = GOLDEN / example.name
    text = helm.text(f"--values={example}", off)
    if os.environ.get("WRITE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


WRONG = {
    "a misspelt key": ("--set=dispacher.replicas=3", "dispacher"),
    "a negative number": ("--set=tuner.replicas=-1", "/tuner/replicas"),
    "no dispatcher at all": ("--set=dispatcher.replicas=0", "/dispatcher/replicas"),
    "a moving tag": ("--set=image.tag=latest", "/image/tag"),
    "a moving tag of a pool": (
        "--set=workerDefaults.image.tag=latest",
        "/workerDefaults/image/tag",
    ),
    "a digest that is none": ("--set=image.digest=sha256:abc", "/image/digest"),
    "a digest of no image": (
        f"--set=gateway.allowAnonymous=true,workerDefaults.image.digest={DIGEST}",
        "image.digest needs image.repository",
    ),
    "an address without a port": ("--set=kafka.bootstrapServers=kafka", "/kafka/bootstrapServers"),
    "an unknown protocol": ("--set=kafka.securityProtocol=TLS", "/kafka/securityProtocol"),
    "a password in an address": (
        "--set=redis.url=redis://user:secret@redis:6379/0",
        "/redis/url",
    ),
    "no pool": ("--set-json=workerPools=[]", "/workerPools"),
    "a pool without a name": (
        '--set-json=workerPools=[{"replicas":1,"instance":{"gpu":"A100"}}]',
        "name",
    ),
    "a misspelt number of an instance": (
        '--set-json=workerPools=[{"name":"a","instance":{"gpu":"A100","max_seqs":4}}]',
        "max_seqs",
    ),
    "another service's setting": (
        "--set=dispatcher.env.WORKER_ENGINE=vllm",
        "WORKER_ENGINE",
    ),
    "an unknown level": ("--set=log.level=LOUD", "/log/level"),
    "a drain of no time": ("--set=drainSeconds=0", "/drainSeconds"),
    "SASL without a Secret": (
        "--set=kafka.securityProtocol=SASL_SSL",
        "a Secret with the SASL user and password",
    ),
    "a gateway for everybody by accident": (
        "--set=gateway.replicas=1",
        "gateway.keys.secretName",
    ),
    "an agent without databases": (
        "--set=text2sql.enabled=true,gateway.allowAnonymous=true",
        "text2sql.databases.secretName",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_by_name(helm: Helm, case: str):
    """A wrong value is refused, and the message says where it is."""
    argument, place = WRONG[case]
    assert place in helm.refusal(argument)


def test_the_fleet_is_valid_toml_for_every_example(helm: Helm):
    """Whatever values render, workers can read their fleet."""
    for values in VALUES.values():
        for one in helm.manifests(*values):
            if one["kind"] == "ConfigMap" and "fleet.toml" in one["data"]:
                assert tomllib.loads(one["data"]["fleet.toml"])["instance"]
