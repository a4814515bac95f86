"""Helm, from the PATH or built from its source by the Go toolchain (once, then cached)."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.support.servers import MissingServerError, cache_dir

HELM = "helm.sh/helm/v3/cmd/helm@v3.19.5"
BUILD_WITHIN_S = 1_500
CHART = Path(__file__).parents[2] / "k8s" / "hexflow"
EXAMPLES = sorted((CHART.parent / "examples").glob("*.yaml"))


def helm_program() -> Path:
    """Return the program; builds it where there is none.

    Raises:
        MissingServerError: It is not there and cannot be built; says how to get it.
    """
    if found := shutil.which("helm"):
        return Path(found)
    folder = cache_dir() / HELM.rpartition("@")[2].join(["helm-", ""])
    program = folder / "helm"
    if program.exists():
        return program
    if shutil.which("go") is None:
        raise MissingServerError("helm: install Helm 3, or Go 1.24 or later to build it")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["go", "install", HELM],
        env={**os.environ, "GOBIN": str(folder.resolve()), "GOFLAGS": "-mod=mod"},
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_WITHIN_S,
    )
    if done.returncode:
        raise MissingServerError(f"helm: building it failed: {done.stderr[-500:]}")
    return program


class Helm:
    """Renders and checks the chart.

    Args:
        program: Helm itself.
    """

    def __init__(self, program: Path) -> None:
        self._program = str(program)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Helm and return what it said."""
        # A Helm built from source takes itself for the oldest Kubernetes there is.
        return subprocess.run(
            [self._program, *arguments, "--kube-version=1.35.0"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def text(self, *arguments: str) -> str:
        """Return all manifests of the chart as Helm prints them."""
        done = self.run("template", "prod", str(CHART), "--namespace", "llm", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def manifests(self, *arguments: str) -> list[dict[str, Any]]:
        """Return all manifests of the chart, parsed."""
        return [one for one in yaml.safe_load_all(self.text(*arguments)) if one]

    def refusal(self, *arguments: str) -> str:
        """Return what Helm says against values that it must refuse."""
        done = self.run("template", "prod", str(CHART), *arguments)
        assert done.returncode != 0, "Helm took values that are wrong"
        return done.stderr
