"""Leaves the cores that an engine is held on to that engine.

A measured engine shares its cores with nothing else of ours, or the work of others would come in
between its steps, now and then and differently in every run. Others are this process, and helpers
of an engine that are not held there themselves: vLLM's scheduler is a process beside its worker
that spins while it waits.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.adapters.engine_guard import descendants


@contextmanager
def left_alone(cores: Collection[int]) -> Iterator[None]:
    """Run every thread of this process and its children that is free to choose on other cores.

    Threads that are held on nothing but these cores are the engine's, and stay. Nothing changes
    where no other core is left, or the system has no such thing. Afterwards this process may run
    anywhere again.

    Args:
        cores: What to leave alone; empty: nothing.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    others = allowed - set(cores)
    if not others:
        yield
        return
    for pid in (os.getpid(), *(one.pid for one in descendants([os.getpid()]))):
        _hold(pid, others, unless_within=cores)
    try:
        yield
    finally:
        _hold(os.getpid(), allowed)


def _hold(pid: int, cores: Collection[int], unless_within: Collection[int] = ()) -> None:
    try:
        threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # the process has just ended
        return
    for thread in threads:
        try:
            if not os.sched_getaffinity(thread) <= set(unless_within):
                os.sched_setaffinity(thread, cores)
        except OSError:  # the thread has just ended, or is not ours
            continue
