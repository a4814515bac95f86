"""Lifecycle: clean stop, drain overrun, crash; every way closes what was opened."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from itertools import pairwise

import pytest

from shared.errors import AccessRefused, BrokerUnavailable, ConfigError
from shared.runtime.lifecycle import (
    MAX_REFUSALS,
    run_blocking,
    serve_until_signal,
    while_refused,
)


async def _kill_soon() -> None:
    await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_signal_sets_the_stop_event_and_the_service_ends_by_itself():
    """SIGTERM asks; the service finishes its work and returns."""
    finished = []

    async def run(stop: asyncio.Event) -> None:
        await stop.wait()
        finished.append("drained")

    async with asyncio.TaskGroup() as group:
        group.create_task(serve_until_signal(run, drain_s=30))
        group.create_task(_kill_soon())
    assert finished == ["drained"]


async def test_a_service_that_does_not_end_is_cancelled_after_the_drain_bound():
    """Past the bound it is cancelled, and its resources are closed all the same."""
    closed = []

    async def run(stop: asyncio.Event) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(stop.is_set())

    async with asyncio.TaskGroup() as group:
        group.create_task(serve_until_signal(run, drain_s=0.01))
        group.create_task(_kill_soon())
    assert closed == [True]


async def test_a_crash_is_raised_and_not_swallowed():
    """An error of the service ends serve_until_signal at once."""

    async def run(_: asyncio.Event) -> None:
        raise BrokerUnavailable("gone")

    with pytest.raises(ExceptionGroup) as caught:
        await serve_until_signal(run, drain_s=30)
    assert caught.group_contains(BrokerUnavailable)


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("x"), 2), (BrokerUnavailable("x"), 1), (None, 0)]
)
def test_exit_codes_tell_configuration_faults_from_crashes(error, code, capsys):
    """2 means: change something; 1 means: a supervisor may restart it."""

    async def main() -> None:
        if error is not None:
            raise error

    assert run_blocking(main()) == code
    assert ("hexflow: x" in capsys.readouterr().err) == (code == 2)


def test_an_unexpected_error_shows_its_traceback_and_exits_non_zero():
    """A bug is not dressed up as an operating fault."""
    code = textwrap.dedent("""
        import sys
        from shared.runtime.lifecycle import run_blocking
        async def main(): raise ZeroDivisionError("bug")
        sys.exit(run_blocking(main()))
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError: bug" in done.stderr


async def test_a_refused_service_tries_again_after_growing_pauses():
    """What is granted meanwhile lets it go on; the service itself decides when it has ended."""
    tries: list[float] = []

    async def run(_: asyncio.Event) -> None:
        tries.append(asyncio.get_running_loop().time())
        if len(tries) < MAX_REFUSALS:
            raise ExceptionGroup("tasks", [AccessRefused("not yet")])

    await while_refused(run, asyncio.Event(), first_pause_s=0.02)
    assert len(tries) == MAX_REFUSALS
    pauses_s = [later - earlier for earlier, later in pairwise(tries)]
    assert all(pause_s >= 0.02 * 2**index for index, pause_s in enumerate(pauses_s))


@pytest.mark.parametrize(
    ("error", "num_tries"), [(AccessRefused("never"), MAX_REFUSALS), (ConfigError("wrong"), 1)]
)
async def test_a_service_that_is_never_let_in_ends(error: ConfigError, num_tries: int):
    """After a few tries the reason is raised; what only a new setting cures is not tried again."""
    tries: list[int] = []

    async def run(_: asyncio.Event) -> None:
        tries.append(1)
        raise error

    with pytest.raises(type(error), match=str(error)):
        await while_refused(run, asyncio.Event(), first_pause_s=0.001)
    assert len(tries) == num_tries


async def test_a_stop_ends_the_pause():
    """A service that waits to be let in does not have to be killed."""
    stop = asyncio.Event()

    async def run(_: asyncio.Event) -> None:
        stop.set()
        raise AccessRefused("not yet")

    async with asyncio.timeout(30):
        await while_refused(run, stop, first_pause_s=3_600.0)
