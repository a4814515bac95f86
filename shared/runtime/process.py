"""The same few lines of every service's `__main__`: settings, logs, signals, exit code."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic_settings import BaseSettings

from shared.runtime import logs
from shared.runtime.lifecycle import run_blocking, serve_until_signal, while_refused
from shared.runtime.settings import MeshSettings, load
from shared.runtime.streams import open_standard_streams

S = TypeVar("S", bound=BaseSettings)
ServiceRun = Callable[[MeshSettings, S, asyncio.Event], Awaitable[None]]


def main(run: ServiceRun[S], settings_class: type[S]) -> int:
    """Run one service as a process of its own and return the exit code.

    Args:
        run: The service's composition root.
        settings_class: The service's own settings.

    Returns:
        0 after a clean stop, 2 for wrong settings, 1 after a crash.
    """

    async def start() -> None:
        mesh, own = load(MeshSettings), load(settings_class)
        logs.configure(mesh.log.level, mesh.log.format)

        async def once(stop: asyncio.Event) -> None:
            await run(mesh, own, stop)

        async def until(stop: asyncio.Event) -> None:
            await while_refused(once, stop)

        await serve_until_signal(until, mesh.drain_s)

    open_standard_streams()
    return run_blocking(start())
