"""The cores of a measured engine are left to it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.cli.cores import left_alone

SLEEPS = "import sys; print('there', flush=True); sys.stdin.read()"
ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="one core: nothing can be left alone")


@contextmanager
def child() -> Iterator[int]:
    """Run a process that waits; yield its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_everything_but_the_engine_leaves_its_core():
    """This process and a free child go to other cores; what is held on the core stays there."""
    engine_core = {max(ALL)}
    with child() as engine, child() as scheduler:
        os.sched_setaffinity(engine, engine_core)
        with left_alone(engine_core):
            assert os.sched_getaffinity(0) == ALL - engine_core
            assert os.sched_getaffinity(scheduler) == ALL - engine_core
            assert os.sched_getaffinity(engine) == engine_core
    assert os.sched_getaffinity(0) == ALL


def test_without_cores_nothing_moves():
    """No core is named, or all of them: everybody stays where they were."""
    for cores in ((), ALL):
        with left_alone(cores):
            assert os.sched_getaffinity(0) == ALL
