"""Ends for aiokafka's clients that are bounded and leave nothing running.

Their own `stop` may wait for a broker that is gone, and may raise a CancelledError of a task inside
it, which would look as if the caller had been cancelled.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def ends_well(ending: Coroutine[Any, Any, Any], *, name: str, timeout_s: float) -> bool:
    """Run what ends something in a task of its own; whether it ended in time and without error.

    Args:
        ending: The coroutine to run.
        name: Name of the task.
        timeout_s: How long it may take, wall seconds.
    """
    task = asyncio.get_running_loop().create_task(ending, name=name)
    await asyncio.wait({task}, timeout=timeout_s)
    if task.done():
        return not task.cancelled() and task.exception() is None
    await cancel_all([task], timeout_s=1.0)
    return False


async def cancel_all(tasks: Iterable[asyncio.Task[Any] | None], *, timeout_s: float) -> None:
    """Cancel tasks and wait for them, within a bound, whatever they raise.

    Args:
        tasks: Tasks to end; None and finished ones are passed over.
        timeout_s: How long to wait for them together, wall seconds.
    """
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=timeout_s)
        for task in running:
            if task.done() and not task.cancelled():
                task.exception()
