"""docker-compose.yml, read as Docker would, and its services as processes of this machine."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
OURS = re.compile(r"^hexflow:")


def compose_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the file with `${NAME:-default}` filled in from an environment."""

    def value(match: re.Match[str]) -> str:
        return environ.get(match["name"]) or match["default"] or ""

    text = re.sub(r"\$\{(?P<name>\w+)(:-(?P<default>[^}]*))?\}", value, FILE.read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def own_services(compose: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the services that run hexflow's own image."""
    return {
        name: service
        for name, service in compose["services"].items()
        if OURS.match(service.get("image", ""))
    }


class ComposeProcess:
    """A container's command as a process of this machine.

    Args:
        name: The service's.
        service: What the file says about it.
        hosts: Host and port in the file -> host and port here.
        folder: For the process' output.
        changes: Variables that must differ here, e.g. a port that several would share.
    """

    def __init__(
        self,
        name: str,
        service: Mapping[str, Any],
        hosts: Mapping[str, str],
        folder: Path,
        changes: Mapping[str, str],
    ) -> None:
        self.name = name
        self.environment = {
            key: self._here(str(value), hosts)
            for key, value in service.get("environment", {}).items()
        } | dict(changes)
        self._command = [self._here(word, hosts) for word in service["command"]]
        self._output = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def _here(text: str, hosts: Mapping[str, str]) -> str:
        for there, here in hosts.items():
            text = text.replace(there, here)
        return text

    def start(self) -> None:
        """Start it, with exactly the environment of the file."""
        programs = str(Path(sys.executable).parent)
        inherited = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=inherited | self.environment,
                cwd=self._output.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(self, limit_s: float) -> int:
        """Return the exit code once the process has ended."""
        assert self._process is not None
        return self._process.wait(limit_s)

    def stop(self, number: signal.Signals = signal.SIGTERM, limit_s: float = 45.0) -> int:
        """Send a signal and return the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    @property
    def is_started(self) -> bool:
        """Whether the process was ever started."""
        return self._process is not None

    @property
    def port(self) -> int:
        """Port of the probes."""
        return int(self.environment["HEXFLOW_PROBES__PORT"])

    def has_ended(self) -> bool:
        """Return whether the process is gone."""
        return self._process is not None and self._process.poll() is not None

    def tail(self) -> str:
        """Return the end of the output."""
        return self._output.read_text()[-3_000:]


def answers(url: str) -> bool:
    """Return whether an address answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - loopback
            return bool(answer.status == 200)
    except OSError:
        return False


def await_answer(process: ComposeProcess, url: str, within_s: float) -> None:
    """Wait until a process answers; fails with the end of its output."""
    give_up_s = time.monotonic() + within_s
    while not answers(url):
        assert not process.has_ended(), f"{process.name}: {process.tail()}"
        assert time.monotonic() < give_up_s, f"{process.name}: {process.tail()}"
        time.sleep(0.1)
