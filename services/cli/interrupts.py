"""Run a command's coroutine so that Ctrl-C ends it in order."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from shared.runtime.lifecycle import loop_factory

T = TypeVar("T")
Main = Callable[[asyncio.Event], Awaitable[T]]


async def with_end(main: Awaitable[T], stop: asyncio.Event) -> tuple[T, bool]:
    """Return a result, and whether the user had stopped by then what gave it."""
    return await main, stop.is_set()


async def unless_stopped(main: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return a result that is worth nothing by halves: the wish to stop cancels it.

    Args:
        main: What gives it.
        stop: Set when the user wants to stop.

    Returns:
        The result; None where the user wanted to stop before there was one.
    """
    return await unless(main, stop.wait())


async def unless(main: Coroutine[Any, Any, T], ending: Coroutine[Any, Any, object]) -> T | None:
    """Return a result unless something else comes first, which cancels what would give it.

    Args:
        main: What gives the result.
        ending: What may come first; an error of its own is raised then.

    Returns:
        The result; None where `ending` ended first.
    """
    working = asyncio.create_task(main, name="unless-ended")
    other = asyncio.create_task(ending, name="ending")
    try:
        await asyncio.wait((working, other), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            other.result()
    finally:
        working.cancel()
        other.cancel()
        await asyncio.gather(working, other, return_exceptions=True)  # what they say is looked at
    return None if working.cancelled() else working.result()


def run_until_stopped(main: Main[T], *, is_graceful: bool = True) -> T:
    """Run a coroutine that is told by an event when the user wants to stop.

    The first Ctrl-C (or SIGTERM) sets the event; the second cancels what still runs.

    Args:
        main: Takes the event; returns the result.
        is_graceful: Whether `main` heeds the event; else the first Ctrl-C cancels.

    Raises:
        KeyboardInterrupt: It was cancelled.
    """

    async def guarded() -> T:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def interrupt() -> None:
            if task is not None and (stop.is_set() or not is_graceful):
                task.cancel()
                return
            # Not through a console of our own: a live display must know what is printed.
            print("stopping; once more to stop at once", file=sys.stderr)
            stop.set()

        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, interrupt)
        try:
            return await main(stop)
        finally:
            for sig in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(sig)

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(guarded())
    except asyncio.CancelledError as exc:
        raise KeyboardInterrupt from exc
