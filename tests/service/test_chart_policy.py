"""The chart's manifests against policies: checkov's, and the Pod Security Standard `restricted`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.checkov import checkov_program, findings
from tests.support.helm import EXAMPLES, Helm
from tests.support.pod_security import WORKLOADS, violations
from tests.support.servers import MissingServerError, do_without

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]
OPEN = "--set=gateway.allowAnonymous=true"
VALUES = {example.stem: [f"--values={example}"] for example in EXAMPLES} | {
    "defaults": [OPEN],
    "everything": [
        OPEN,
        "--set=text2sql.enabled=true,text2sql.databases.secretName=databases",
        "--set=gateway.ingress.enabled=true,gateway.ingress.host=llm.example.com",
        "--set=monitoring.serviceMonitor.enabled=true,monitoring.rules.enabled=true",
        "--set=workerDefaults.autoscaling.enabled=true",
    ],
}
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
PINNED = [f"--set=image.digest={DIGEST},image.pullPolicy=Always"]
LOW = {
    # No CPU limit, on purpose: a throttled service that only forwards makes calls late. Requests
    # share the processor out, and memory is bounded.
    "CKV_K8S_11": "CPU limits should be set",
    # `image.pullPolicy` is the user's: a tag that does not move, or a digest, needs no `Always`.
    "CKV_K8S_15": "Image Pull Policy should be Always",
    # Passwords reach a pod as variables by reference to Secrets: settings come from the environment
    # alone, and no log shows them (tests/service/test_secured_mesh.py).
    "CKV_K8S_35": "Prefer using secrets as files over secrets as environment variables",
    # `image.digest` is the user's: only the registry that was pushed to can name it.
    "CKV_K8S_43": "Image should use digest",
}
"""Checks of low severity that the chart leaves to its user, and why; every other one is high."""


@pytest.fixture(scope="module")
def checkov() -> Path:
    """Return checkov, or do without."""
    try:
        return checkov_program()
    except MissingServerError as missing:
        do_without(missing)


@pytest.mark.parametrize("values", VALUES)
def test_checkov_finds_nothing_high(helm: Helm, checkov: Path, values: str, tmp_path: Path):
    """With every example, nothing fails but the few low checks that the user decides about."""
    found = findings(checkov, helm.text(*VALUES[values]), tmp_path)
    assert [one for one in found if LOW.get(one.check) != one.name] == []


def test_every_low_check_is_one(helm: Helm, checkov: Path, tmp_path: Path):
    """The list of what is let pass is no longer than needed; a pinned image passes two more."""
    found = {one.check for one in findings(checkov, helm.text(*VALUES["managed-kafka"]), tmp_path)}
    unpinned = {one.check for one in findings(checkov, helm.text(OPEN), tmp_path)}
    pinned = {one.check for one in findings(checkov, helm.text(OPEN, *PINNED), tmp_path)}
    assert found | unpinned == set(LOW)
    assert pinned == {"CKV_K8S_11"}


def test_checkov_would_notice(helm: Helm, checkov: Path, tmp_path: Path):
    """A privileged container is found, and is not among the low ones."""
    manifests = helm.manifests(OPEN)
    (dispatcher,) = [one for one in manifests if one["kind"] == "Deployment"][:1]
    (container,) = dispatcher["spec"]["template"]["spec"]["containers"]
    container["securityContext"] = {"privileged": True}
    found = {one.check for one in findings(checkov, yaml.safe_dump(dispatcher), tmp_path)}
    assert "CKV_K8S_16" in found - set(LOW)


@pytest.mark.parametrize("values", VALUES)
def test_pods_keep_to_the_restricted_profile(helm: Helm, values: str):
    """Every control of the Pod Security Standard `restricted`, and what CIS asks besides."""
    for one in helm.manifests(*VALUES[values]):
        assert violations(one) == [], one["metadata"]["name"]


def _set(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(pod: dict[str, Any], _: dict[str, Any]) -> None:
        pod.update(changes)

    return change


def _set_security(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(_: dict[str, Any], container: dict[str, Any]) -> None:
        container["securityContext"].update(changes)

    return change


WRONG = {
    "hostNetwork": _set(hostNetwork=True),
    "hostPID": _set(hostPID=True),
    "volume of kind hostPath": _set(volumes=[{"name": "x", "hostPath": {"path": "/"}}]),
    "token": _set(automountServiceAccountToken=True),
    "privileged": _set_security(privileged=True),
    "may gain rights": _set_security(allowPrivilegeEscalation=True),
    "may be root": _set_security(runAsUser=0),
    "capabilities are not dropped": _set_security(capabilities={}),
    "capabilities are added": _set_security(capabilities={"drop": ["ALL"], "add": ["NET_ADMIN"]}),
    "may write to its image": _set_security(readOnlyRootFilesystem=False),
    "no seccomp profile": _set_security(seccompProfile={"type": "Unconfined"}),
    "host port 80": lambda _, container: container.update(ports=[{"hostPort": 80}]),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_profile_would_notice(helm: Helm, what: str):
    """Each point that a pod could fall short in is found."""
    workload = next(one for one in helm.manifests(OPEN) if one["kind"] in WORKLOADS)
    changed = copy.deepcopy(workload)
    pod = changed["spec"]["template"]["spec"]
    WRONG[what](pod, pod["containers"][0])
    (found,) = violations(changed)
    assert what in found
