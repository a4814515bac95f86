"""Runs jobs in worker processes, with live progress on stderr."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Protocol

import msgspec
from rich.console import Console

from services.cli.lab.bench import Workbench
from services.cli.lab.setting import Job, Row, Setup
from services.cli.progress import JobProgress
from shared.errors import MeshError
from shared.simulation.simulator import CoreName

# A compiled run takes no time, but loading the code takes about as long as this many queries.
QUERIES_WORTH_COMPILING = 3_000


class WorkerLost(MeshError):
    """A worker process of the lab died."""

    reason = "worker_lost"


class Runner(Protocol):
    """Runs many jobs."""

    def run(self, label: str, jobs: Sequence[Job]) -> list[Row]:
        """Return the rows of all jobs, in the jobs' order.

        Args:
            label: What they are, for the progress shown.
            jobs: The work.
        """
        ...


class LocalRunner:
    """Runs jobs one after the other in this process.

    Args:
        setup: What all jobs have in common.
        progress: Where progress is shown.
    """

    def __init__(self, setup: Setup, progress: JobProgress) -> None:
        self._bench = Workbench(setup)
        self._progress = progress
        self._num_queries = setup.num_queries or max(map(len, setup.traces.values()))

    def run(self, label: str, jobs: Sequence[Job]) -> list[Row]:
        """See `Runner`."""
        rows = []
        core: CoreName = "auto"
        if self._num_queries * sum(len(job.variants) for job in jobs) >= QUERIES_WORTH_COMPILING:
            core = "compiled"
        with self._progress.stage(label, len(jobs)) as advance:
            for job in jobs:
                rows += self._bench.run(job, core)
                advance()
        return rows


class ProcessRunner:
    """Runs jobs in worker processes that hold the setup.

    Args:
        executor: The processes; see `open_runner`.
        progress: Where progress is shown.
    """

    def __init__(self, executor: ProcessPoolExecutor, progress: JobProgress) -> None:
        self._executor = executor
        self._progress = progress

    def run(self, label: str, jobs: Sequence[Job]) -> list[Row]:
        """See `Runner`.

        Raises:
            WorkerLost: A process died, for example for want of memory.
        """
        with self._progress.stage(label, len(jobs)) as advance:
            futures: list[Future[bytes]] = [self._executor.submit(_work, job) for job in jobs]
            try:
                for future in as_completed(futures):
                    future.result()
                    advance()
            except BrokenProcessPool as exc:
                raise WorkerLost("a simulating process died; was it killed for memory?") from exc
        return [
            row
            for future in futures
            for row in msgspec.msgpack.decode(future.result(), type=list[Row])
        ]


@contextmanager
def open_runner(
    setup: Setup, num_processes: int, console: Console, *, quiet: bool = False
) -> Iterator[Runner]:
    """Provide a runner; its processes end with the block, at once when it fails.

    Args:
        setup: What all jobs have in common.
        num_processes: Processes; 1 runs in this one.
        console: Where progress is shown.
        quiet: Show none.
    """
    progress = JobProgress(console, quiet=quiet)
    if num_processes == 1:
        yield LocalRunner(setup, progress)
        return
    executor = ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(msgspec.msgpack.encode(setup),),
    )
    try:
        with progress.stage("loading the compiled simulator", 1) as advance:
            # Done once: where machine code must be made first, all processes would make it.
            executor.submit(_load).result()
            advance()
        yield ProcessRunner(executor, progress)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()


def default_processes() -> int:
    """Return how many processes this machine's free cores are good for."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


_held: list[Workbench] = []


def _begin(packed: bytes) -> None:
    """Prepare a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    _held.append(Workbench(msgspec.msgpack.decode(packed, type=Setup), core="compiled"))


def _load() -> None:
    import shared.simulation.compiled  # noqa: F401, PLC0415 - what loading it leaves on disk


def _work(job: Job) -> bytes:
    return msgspec.msgpack.encode(_held[0].run(job))
