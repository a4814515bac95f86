"""The process in which the tuner replays."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from services.tuner.app import replay_processes
from services.tuner.processes import LONGEST_PAUSE_S, ReplayProcesses, pause_after_s
from services.tuner.replay import ProcessReplay, ReplayLost

ROOT = Path(__file__).parents[3]
PATIENCE_S = 30.0

PARENT = """
import os, time
from multiprocessing import resource_tracker
from services.tuner.app import replay_processes

executor = replay_processes()
pid = executor.submit(os.getpid).result()
if {is_busy}:
    executor.submit(time.sleep, 600)
print(pid, resource_tracker._resource_tracker._pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie that nobody has collected does not."""
    shown = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() != "" and not shown.stdout.startswith("Z")


def ended(pid: int) -> bool:
    """Wait until a process has ended; return whether it has."""
    until_s = time.monotonic() + PATIENCE_S
    while is_running(pid) and time.monotonic() < until_s:
        time.sleep(0.05)
    return not is_running(pid)


def pid_of(executor: Executor) -> int:
    """Return the replaying process's id; it answers a question for that."""
    return executor.submit(os.getpid).result(timeout=PATIENCE_S)


def test_ctrl_c_does_not_end_the_replay_process():
    """It ignores SIGINT: a terminal sends that to all, and the tuner ends its process in order."""
    with replay_processes() as executor:
        handler = executor.submit(signal.getsignal, signal.SIGINT).result()
    assert handler == signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_killed_over_a_question_fails_that_question_alone(number: signal.Signals):
    """The next question is answered by another process."""
    with replay_processes() as executor:
        pid = pid_of(executor)
        question = executor.submit(time.sleep, 600)
        os.kill(pid, number)
        with pytest.raises(BrokenProcessPool):
            question.result(timeout=PATIENCE_S)
        assert pid_of(executor) != pid


def test_a_process_killed_while_it_waits_costs_no_question():
    """Once its death is seen, the next question goes to another process."""
    with replay_processes() as executor:
        pid = pid_of(executor)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid)
        time.sleep(0.5)  # the executor's thread sees it
        assert pid_of(executor) != pid


def test_a_process_killed_before_it_has_read_a_long_question_holds_nobody_up():
    """The question is larger than the pipe: whoever writes it must not wait for ever."""
    with replay_processes() as executor:
        pid = pid_of(executor)
        os.kill(pid, signal.SIGSTOP)  # it reads nothing any more
        question = executor.submit(len, bytes(10_000_000))
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            question.result(timeout=PATIENCE_S)
        assert pid_of(executor) != pid


def test_a_process_that_dies_again_and_again_is_started_after_growing_pauses():
    """At once after one death, then a second later, then two; an answer ends the row."""
    now_s = 1_000.0

    def dies() -> str:
        with pytest.raises(BrokenProcessPool) as caught:
            executor.submit(os._exit, 0).result(timeout=PATIENCE_S)
        return str(caught.value)

    with ReplayProcesses(now_s=lambda: now_s) as executor:
        dies()
        assert "not started again" not in dies()
        assert "died 2 times in a row; not started again for 1.0 s" in dies()
        now_s += 0.9
        assert "not started again for 0.1 s" in dies()  # to be refused does not lengthen it
        now_s += 0.2
        assert "not started again" not in dies()
        assert "died 3 times in a row; not started again for 2.0 s" in dies()
        now_s += 2.1
        pid_of(executor)
        dies()
        assert "not started again" not in dies()


def test_the_pause_is_bounded():
    """However often it died."""
    assert [pause_after_s(deaths) for deaths in range(5)] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert pause_after_s(10_000) == LONGEST_PAUSE_S


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open no more than so many files, pipes and sockets in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0) for _ in range(64)]  # more than there are gaps below the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
    try:
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def test_a_process_that_cannot_be_started_fails_the_question_alone():
    """No file descriptor is left for its queues, then enough for those and none for it."""
    now_s = 1_000.0
    with ReplayProcesses(now_s=lambda: now_s) as executor:
        pid = pid_of(executor)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid)
        time.sleep(0.5)  # the executor's thread sees it
        for count in (0, 7):
            gc.collect()  # what an earlier one held is not to be freed, and taken, in between
            with descriptors_left(count):
                question = executor.submit(os.getpid)
            with pytest.raises(BrokenProcessPool, match="cannot be started"):
                question.result(timeout=PATIENCE_S)
            now_s += LONGEST_PAUSE_S
        assert pid_of(executor) != pid


async def test_a_killed_process_is_told_as_a_lost_replay():
    """The services' own error, so that nobody above has to know of executors."""
    with replay_processes() as executor:
        pid = pid_of(executor)
        os.kill(pid, signal.SIGSTOP)  # or it might have answered before the kill
        question = asyncio.create_task(ProcessReplay(executor).speeds({}))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ReplayLost, match="is gone"):
            await question
        assert await ProcessReplay(executor).speeds({}) == {}


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_killed_parent_leaves_no_process_behind(is_busy: bool):
    """Neither the one that waits for a question or answers one, nor what multiprocessing adds."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(is_busy=is_busy)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        try:
            assert [is_running(pid) for pid in pids] == [True, True]
            parent.kill()
            assert [ended(pid) for pid in pids] == [True, True]
        finally:
            parent.kill()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
