"""Services that a server refuses: run to their end, with an eye on their ready probe."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from shared.adapters.local_process import LOOPBACK, free_port

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_S = 150.0


class Case(NamedTuple):
    """A service that is refused.

    Attributes:
        service: Which.
        changes: Its environment, besides what lets it in.
        said: What the message has to hold.
    """

    service: str
    changes: dict[str, str]
    said: tuple[str, ...]


class Ended(NamedTuple):
    """What became of it.

    Attributes:
        code: Exit code.
        output: What it wrote.
        statuses: Every answer of its ready probe.
        took_s: How long it ran.
    """

    code: int
    output: str
    statuses: set[int]
    took_s: float

    @property
    def pauses_s(self) -> list[float]:
        """The pauses that it announced."""
        lines = [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]
        return [line["again_in_s"] for line in lines if line["event"] == "access_refused"]


def run_until_end(case: Case, environment: dict[str, str]) -> Ended:
    """Run a service to its end, asking its ready probe all the time."""
    port = free_port()
    own = {"WORKER_INSTANCE_ID": "a100-0"} if case.service == "worker" else {}
    process = subprocess.Popen(
        [sys.executable, "-m", f"services.{case.service}"],
        env={
            "PATH": os.environ["PATH"],
            "HEXFLOW_PROBES__PORT": str(port),
            **own,
            **environment,
            **case.changes,
        },
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    statuses: set[int] = set()
    began_s = time.monotonic()
    give_up_s = began_s + ENDS_WITHIN_S
    with process:
        while process.poll() is None and time.monotonic() < give_up_s:
            statuses.add(ready_status(port))
            time.sleep(0.05)
        process.kill()
        output = process.communicate()[0]
    return Ended(process.returncode, output, statuses - {0}, time.monotonic() - began_s)


def ready_status(port: int) -> int:
    """Return what the ready probe says; 0: nobody listens."""
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/ready", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError:
        return 0
