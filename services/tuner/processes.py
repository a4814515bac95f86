"""The process that replays: it ends with its parent, and another takes its place when it dies."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import ParamSpec, TypeVar

import structlog

log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class ReplayProcesses(Executor):
    """An executor of one process that outlives the process.

    A `ProcessPoolExecutor` whose process was killed is of no use ever after. This one starts
    another with the next question. One that dies without having answered anything is likely to die
    again (of the question's size, of a broken installation), so from the second such death on
    there is a pause, twice as long every time: a machine short of memory is not pressed on.

    Used from one thread.

    Args:
        now_s: Wall clock that never jumps, seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._pool: ProcessPoolExecutor | None = None
        self._deaths = 0
        self._died_at_s = float("-inf")
        self._is_shut_down = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Ask the process, or a new one where it has died.

        The future fails with `BrokenProcessPool` where the process dies over this question, where
        none may be started yet, and where none can be: one way for the caller to look out for.

        Raises:
            RuntimeError: The executor was shut down.
        """
        if self._is_shut_down:
            raise RuntimeError("the replay processes were shut down")
        try:
            future = self._submit_to_living(fn, *args, **kwargs)
        except BrokenProcessPool as exc:
            refused: Future[T] = Future()
            refused.set_exception(exc)
            return refused
        future.add_done_callback(self._note)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the process, after its current question."""
        self._is_shut_down = True
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def _submit_to_living(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        if self._pool is not None:
            try:
                return self._pool.submit(fn, *args, **kwargs)
            except BrokenProcessPool:  # it died since the last question, or over it
                self._drop(self._pool)
        pause_s = self._died_at_s + pause_after_s(self._deaths) - self._now_s()
        if pause_s > 0:
            raise BrokenProcessPool(
                f"died {self._deaths} times in a row; not started again for {pause_s:.1f} s"
            )
        if self._deaths:
            log.info("replay_process_started_again", deaths_in_a_row=self._deaths)
        pool: ProcessPoolExecutor | None = None
        try:
            pool = ProcessPoolExecutor(
                max_workers=1,
                # A fresh process inherits no sockets and no locks.
                mp_context=multiprocessing.get_context("spawn"),
                initializer=begin,
            )
            future = pool.submit(fn, *args, **kwargs)
        except OSError as exc:  # no memory, no process ids, no file descriptors left
            self._died_at_s = self._now_s()
            self._drop(pool)
            raise BrokenProcessPool(f"cannot be started: {exc}") from exc
        self._pool = pool
        return future

    def _drop(self, pool: ProcessPoolExecutor | None) -> None:
        if pool is not None:
            pool.shutdown(wait=False)
        self._pool = None
        self._deaths += 1

    def _note(self, future: Future[T]) -> None:
        """Note how a question ended.

        The pool's own thread calls this, in newer Pythons with the lock held that `submit` takes.
        So it takes no lock itself and only sets plain values.
        """
        if future.cancelled():
            return
        if isinstance(future.exception(), BrokenProcessPool):
            self._died_at_s = self._now_s()
        else:
            self._deaths = 0


def pause_after_s(deaths: int) -> float:
    """Return how long to wait after the last of some deaths in a row, seconds.

    None after one: the usual death is a single one.
    """
    # Bounded before it is raised to a power: a float overflows after a thousand deaths.
    return FIRST_PAUSE_S * min(2.0 ** min(deaths - 2, 32), LONGEST_PAUSE_S) if deaths > 1 else 0.0


def begin() -> None:
    """Prepare a replaying process; runs in it."""
    # A terminal's Ctrl-C reaches it too; the tuner ends it in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that was killed told nobody. The process would wait for questions for ever: it holds
    # the writing end of its own queue, which therefore never ends. (`PR_SET_PDEATHSIG` is Linux
    # only, and fires when the *thread* that started the process ends.)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:  # not started by multiprocessing: nobody to wait for
        return
    connection.wait([parent.sentinel])
    # The main thread waits in a lock or computes and answers nobody: nothing is left to be saved.
    os._exit(1)
