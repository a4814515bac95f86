"""Nothing of an engine outlives its worker."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.adapters.engine_guard import Guard, descendants, end_all, processes, still_there
from tests.support.processes import is_alive

ROOT = Path(__file__).resolve().parents[3]
WITHIN_S = 30.0
# A worker whose engine has a part of its own, and changes what others see of it.
WORKER = """
import subprocess, sys, time
from shared.adapters.engine_guard import Guard
guard = Guard()
inner = "import time; print('part', flush=True); time.sleep(600)"
engine = (
    "import subprocess, sys, time;"
    f"subprocess.Popen([sys.executable, '-c', {inner!r}]); time.sleep(600)"
)
child = subprocess.Popen([sys.executable, "-c", engine], stdout=subprocess.PIPE)
child.stdout.readline()
guard.look()
print("ready", flush=True)
{end}
"""


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """Return a process that would sleep for an hour, with one below it."""
    process = subprocess.Popen(["sh", "-c", "sleep 3600 & wait"])
    yield process
    process.kill()
    process.wait()


def test_what_a_worker_leaves_is_ended_with_all_below_it():
    """SIGKILL of a worker ends its engine, and the engine's own parts."""
    worker, pids = _worker_with_engine("time.sleep(600)")
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    _until_dead(pids)


def test_a_worker_that_ends_by_itself_leaves_nothing_either():
    """An exit without goodbye counts as death."""
    worker, pids = _worker_with_engine("time.sleep(2)")
    worker.wait()
    _until_dead(pids)


def test_a_dismissed_guard_ends_nothing(sleeper: "subprocess.Popen[bytes]"):
    """After a goodbye the processes are left alone."""
    guard = Guard()
    _until(lambda: len(descendants([sleeper.pid])) == 1)
    guard.dismiss()
    assert not is_alive(guard.pid)
    assert sleeper.poll() is None


def test_a_pid_that_was_given_away_again_is_safe(sleeper: "subprocess.Popen[bytes]"):
    """A process with the pid of a known one, but a later start, is another process."""
    seen = processes()[sleeper.pid]
    assert still_there([seen]) == {seen}
    assert still_there([seen._replace(started=seen.started - 1)]) == set()
    assert end_all([seen._replace(started=seen.started - 1)])
    assert sleeper.poll() is None


def test_ending_takes_what_is_below_too(sleeper: "subprocess.Popen[bytes]"):
    """A process and its children are gone when `end_all` returns."""
    _until(lambda: len(descendants([sleeper.pid])) == 1)
    (below,) = descendants([sleeper.pid])
    seen = processes()[sleeper.pid]
    os.kill(sleeper.pid, signal.SIGSTOP)  # does not end by itself
    assert end_all([seen], grace_s=0.1)
    assert not still_there([seen, below])


def _worker_with_engine(end: str) -> tuple["subprocess.Popen[str]", set[int]]:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER.replace("{end}", end)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    pids = {one.pid for one in descendants([worker.pid])}
    worker.stdout.close()
    assert len(pids) == 3
    return worker, pids


def _until_dead(pids: set[int]) -> None:
    _until(lambda: not any(is_alive(pid) for pid in pids))


def _until(is_so) -> None:
    give_up_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
