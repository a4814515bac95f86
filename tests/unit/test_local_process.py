"""A child process is restartable, and never outlives the process that started it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.adapters.local_process import (
    LOOPBACK,
    LocalProcess,
    connect,
    free_port,
    is_connected_to_itself,
)
from shared.errors import ConfigError
from tests.support.processes import dies_within, is_alive

STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.1; done"


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[LocalProcess]:
    """Return a started child that would sleep for an hour."""
    process = LocalProcess("sleeper", ["sleep", "3600"], tmp_path / "log")
    process.start()
    yield process
    process.kill()


def test_stop_ends_the_child(sleeper: LocalProcess):
    """After `stop` the process is gone and can be started again under another pid."""
    first = sleeper.pid
    assert first is not None
    sleeper.stop()
    assert sleeper.pid is None
    assert not is_alive(first)
    sleeper.start()
    assert sleeper.pid not in (None, first)


def test_start_of_a_running_child_does_nothing(sleeper: LocalProcess):
    """Starting twice leaves one process."""
    first = sleeper.pid
    sleeper.start()
    assert sleeper.pid == first


def test_one_thread_may_stop_and_start_it_while_another_asks(tmp_path: Path):
    """Restarts in one thread never disturb the question whether it runs in others."""
    process = LocalProcess("busy", ["sleep", "3600"], tmp_path / "log")
    done = threading.Event()

    def ask() -> int:
        asked = 0
        while not done.is_set():
            asked += process.is_running or process.pid is None
        return asked

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        for number in range(15):
            process.start()
            process.kill() if number % 2 else process.stop()
        done.set()
        assert all(one.result(30) for one in asking)
    assert not process.is_running


def test_stop_kills_a_child_that_ignores_sigterm(tmp_path: Path):
    """Past the grace period SIGTERM is followed by SIGKILL."""
    process = LocalProcess("stubborn", ["sh", "-c", STUBBORN], tmp_path / "log")
    process.start()
    process.wait_until(lambda: "ready" in process.log_path.read_text(), 5)
    pid = process.pid
    assert pid is not None
    process.stop(grace_s=0.2)
    assert not is_alive(pid)


def test_a_child_that_ended_is_noticed(tmp_path: Path):
    """A child that ends by itself is no longer running, and what it said is in the error."""
    process = LocalProcess("brief", ["sh", "-c", "echo no luck; exit 3"], tmp_path / "log")
    process.start()
    with pytest.raises(ConfigError, match=r"brief ended while starting:\nno luck"):
        process.wait_until(lambda: False, 5)
    assert not process.is_running


def test_a_child_that_never_answers_is_stopped(sleeper: LocalProcess):
    """Waiting ends with an error that names the limit, and leaves no process behind."""
    pid = sleeper.pid
    assert pid is not None
    with pytest.raises(ConfigError, match=r"did not answer within 0\.2 s"):
        sleeper.wait_until(lambda: False, 0.2)
    assert not is_alive(pid)


def test_a_missing_program_is_a_clear_error(tmp_path: Path):
    """A program that does not exist raises ConfigError with its name."""
    process = LocalProcess("nothing", ["/no/such/program"], tmp_path / "log")
    with pytest.raises(ConfigError, match="nothing cannot be started"):
        process.start()


@pytest.mark.parametrize("command", ["exec sleep 3600", STUBBORN])
def test_no_child_outlives_a_killed_parent(tmp_path: Path, command: str):
    """A parent that dies by SIGKILL takes its child along, even one that ignores SIGTERM."""
    parent = f"""
import pathlib, time
from shared.adapters.local_process import LocalProcess
child = LocalProcess("child", ["sh", "-c", {command!r}], pathlib.Path({str(tmp_path / "log")!r}))
child.start()
print(child.pid, flush=True)
time.sleep(3600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert is_alive(child)
        process.send_signal(signal.SIGKILL)
    assert dies_within(child, 15)


def test_free_ports_are_out_of_the_way_of_outgoing_connections():
    """A chosen port can be bound and lies below the range that outgoing connections use."""
    port = free_port()
    assert 1024 < port < 32_768
    with socket.socket() as sock:
        sock.bind((LOOPBACK, port))


def test_a_socket_connected_to_itself_is_recognised():
    """Dialling a closed port from that very port connects, and is no answer of a server."""
    port = free_port()
    with socket.socket() as sock:
        sock.bind((LOOPBACK, port))
        sock.connect((LOOPBACK, port))
        assert is_connected_to_itself(sock)


def test_a_closed_port_refuses():
    """Connecting to a port that nobody listens on raises OSError."""
    with pytest.raises(ConnectionRefusedError):
        connect(LOOPBACK, free_port())


def test_only_the_given_environment_reaches_the_child(tmp_path: Path):
    """A child with an environment of its own inherits nothing else."""
    process = LocalProcess(
        "env",
        ["/bin/sh", "-c", 'echo "$ONE-$HOME-"; exec sleep 3600'],
        tmp_path / "log",
        {"ONE": "1", "PATH": os.defpath},
    )
    process.start()
    try:
        process.wait_until(lambda: "1--" in process.log_path.read_text(), 5)
    finally:
        process.kill()
