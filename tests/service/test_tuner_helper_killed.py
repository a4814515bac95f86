"""A tuner whose replaying process is killed over its questions."""

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
from structlog.testing import capture_logs

from services.tuner.app import replay_processes
from services.tuner.replay import ProcessReplay, speeds_packed, sweep_packed
from shared.contracts.messages import WorkflowProfile
from tests.support.tuner_bench import PARAMS, running

PATIENCE_S = 60.0


class Killing(Executor):
    """Kills the real process over the first question of each kind.

    Args:
        executor: Has the process.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.killed: list[Callable[..., Any]] = []
        self.answered: list[Callable[..., Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Ask, and kill at once where nothing of this kind was asked before."""
        if fn in self.killed:
            self.answered.append(fn)
            return self._executor.submit(fn, *args, **kwargs)
        self.killed.append(fn)
        pid = self._executor.submit(os.getpid).result(timeout=PATIENCE_S)
        os.kill(pid, signal.SIGSTOP)  # or it might have answered before the kill
        question = self._executor.submit(fn, *args, **kwargs)
        os.kill(pid, signal.SIGKILL)
        return question


async def test_a_killed_helper_costs_a_lesson_or_a_replay_and_the_tuner_lives_on():
    """One warning each; the next lesson and the next decision rest on real answers."""
    params = msgspec.structs.replace(PARAMS, period_s=0.5)
    with replay_processes() as helper, capture_logs() as logs:
        executor = Killing(helper)
        async with running(ProcessReplay(executor), params) as bench:
            await bench.feed(latency_s=40.0)
            await bench.until(lambda: len(executor.killed) >= 2)
            assert await bench.control() == []  # the lesson was given up, not half learned
            await bench.feed(latency_s=40.0, start_s=100.0)
            await bench.until(
                lambda: len(bench.decided) >= 1 and speeds_packed in executor.answered
            )
            while not [one for one in await bench.control() if isinstance(one, WorkflowProfile)]:
                await asyncio.sleep(0.01)
    assert executor.killed == [speeds_packed, sweep_packed]
    warnings = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert warnings == ["lesson_given_up", "replay_given_up"]
    assert bench.metrics.totals()["hexflow_tuning_decisions_total{result=not_replayed}"] == 1.0
