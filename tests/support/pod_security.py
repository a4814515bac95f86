"""Kubernetes' Pod Security Standard `restricted`, and what CIS asks of workloads besides.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ - every control of the profile.
"""

from typing import Any

VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}
WORKLOADS = {"Deployment", "StatefulSet", "DaemonSet", "Job"}


def violations(manifest: dict[str, Any]) -> list[str]:
    """Return in which points a manifest falls short; nothing is asked of what runs no pods."""
    found = _of_rights(manifest)
    if manifest["kind"] not in WORKLOADS:
        return found
    pod = manifest["spec"]["template"]["spec"]
    found += _of_pod(pod)
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in pod.get(kind, []):
            found += [f"{container['name']}: {text}" for text in _of_container(container, pod)]
    return found


def _of_rights(manifest: dict[str, Any]) -> list[str]:
    if manifest["kind"] in {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}:
        return ["rights in the Kubernetes API (CIS 5.1)"]
    if manifest["kind"] == "ServiceAccount" and manifest.get("automountServiceAccountToken", True):
        return ["its token is mounted by default (CIS 5.1.6)"]
    if manifest["kind"] == "Secret":
        return ["a secret among the manifests (CIS 5.4)"]
    if manifest["metadata"].get("namespace", "default") == "default":
        return ["namespace default (CIS 5.7.4)"]
    return []


def _of_pod(pod: dict[str, Any]) -> list[str]:
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    for volume in pod.get("volumes", []):
        (kind,) = set(volume) - {"name"}
        if kind not in VOLUMES:
            found.append(f"volume of kind {kind}")
    security = pod.get("securityContext", {})
    if security.get("sysctls"):
        found.append("sysctls")
    if security.get("runAsUser") == 0 or security.get("runAsGroup") == 0:
        found.append("root")
    if security.get("windowsOptions", {}).get("hostProcess"):
        found.append("hostProcess")
    if pod.get("automountServiceAccountToken", True):
        found.append("the API's token is mounted (CIS 5.1.6)")
    return found


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> list[str]:
    own, of_pod = container.get("securityContext", {}), pod.get("securityContext", {})
    found = []
    if own.get("privileged"):
        found.append("privileged")
    if own.get("procMount", "Default") != "Default":
        found.append("procMount")
    if own.get("allowPrivilegeEscalation", True):
        found.append("may gain rights")
    if not own.get("runAsNonRoot", of_pod.get("runAsNonRoot")) or own.get("runAsUser") == 0:
        found.append("may be root")
    profile = own.get("seccompProfile", of_pod.get("seccompProfile", {})).get("type")
    if profile not in {"RuntimeDefault", "Localhost"}:
        found.append("no seccomp profile")
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        found.append("capabilities are not dropped")
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        found.append("capabilities are added")
    if not own.get("readOnlyRootFilesystem"):
        found.append("may write to its image (CIS 5.7.3)")
    found += [
        f"host port {port['hostPort']}" for port in container.get("ports", []) if "hostPort" in port
    ]
    return found
