"""Run a service until it is told to stop: signals, drain bound, exit codes."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog

from shared.errors import AccessRefused, ConfigError, MeshError

EXIT_OK = 0
EXIT_CRASH = 1
EXIT_CONFIG = 2
FIRST_PAUSE_S = 1.0
MAX_REFUSALS = 4
FORGIVEN_AFTER_S = 60.0

Run = Callable[[asyncio.Event], Awaitable[None]]
log = structlog.get_logger(__name__)


async def _cancel_after(stop: asyncio.Event, drain_s: float, main: "asyncio.Task[Any]") -> None:
    await stop.wait()
    await asyncio.sleep(drain_s)
    log.warning("drain_overrun", drain_s=drain_s)
    main.cancel()


async def serve_until_signal(run: Run, drain_s: float) -> None:
    """Run a service until SIGTERM or SIGINT, then give it `drain_s` seconds to finish.

    Args:
        run: The service; it must return soon after the event is set.
        drain_s: Wall seconds before what still runs is cancelled. Nothing is lost then: messages
            that were not handed on are delivered again.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)

    async def main() -> None:
        await run(stop)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(main(), name="run")
        guard = group.create_task(_cancel_after(stop, drain_s, task), name="drain")
        task.add_done_callback(lambda _: guard.cancel())


async def while_refused(
    run: Run, stop: asyncio.Event, *, first_pause_s: float = FIRST_PAUSE_S
) -> None:
    """Run a service, and again after a growing pause when a server refuses it access.

    Rights and rotated passwords arrive late, and no supervisor has to slow down its restarts: it
    sees an end only after `MAX_REFUSALS` tries. Between them the service is not ready.

    Args:
        run: The service.
        stop: Set to end it, during a pause too.
        first_pause_s: Before the second try, wall seconds; each further one is twice as long.

    Raises:
        AccessRefused: The last try was refused as well.
    """
    loop = asyncio.get_running_loop()
    num_refusals = 0
    while not stop.is_set():
        began_s = loop.time()
        try:
            await run(stop)
        except (MeshError, ExceptionGroup) as exc:
            if loop.time() - began_s > FORGIVEN_AFTER_S:
                num_refusals = 0
            num_refusals += 1
            leaf = _first_leaf(exc)
            if not isinstance(leaf, AccessRefused) or num_refusals >= MAX_REFUSALS:
                raise
            pause_s = first_pause_s * 2 ** (num_refusals - 1)
            log.error("access_refused", error=str(leaf), again_in_s=pause_s)  # noqa: TRY400 - no bug
        else:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await stop.wait()


def _first_leaf(exc: BaseException) -> BaseException:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


def run_blocking(main: Coroutine[Any, Any, None]) -> int:
    """Run a coroutine on the fastest loop there is and return the process's exit code.

    Returns:
        0 when it returned, 2 for a ConfigError (printed with what to do), 1 for any other crash.
    """
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(main)
    except (MeshError, ExceptionGroup) as exc:
        leaf = _first_leaf(exc)
        if isinstance(leaf, ConfigError):
            print(f"hexflow: {leaf}", file=sys.stderr)  # noqa: T201 - a person reads it
            return EXIT_CONFIG
        if not isinstance(leaf, MeshError):
            raise
        log.critical("service_crashed", reason=leaf.reason, error=str(leaf))
        return EXIT_CRASH
    return EXIT_OK


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's loop factory where it is installed, else asyncio's."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
