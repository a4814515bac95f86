"""Faults of a simulated engine on request of a file, for chaos runs with real processes.

The file holds one word, `hang` or `fail`; empty or missing it means that the engine is well.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from shared.adapters.simulated_engine import SimulatedEngine
from shared.ports import Clock

LOOK_S = 0.1
EVERY_CALL = 1_000_000_000
log = structlog.get_logger(__name__)


@asynccontextmanager
async def faults_from(
    path: Path | None, engine: SimulatedEngine, clock: Clock
) -> AsyncIterator[None]:
    """Do to an engine what a file says, while the block runs; nothing without a file."""
    if path is None:
        yield
        return
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_obey(path, engine, clock), name="engine-faults")
        try:
            yield
        finally:
            task.cancel()


async def _obey(path: Path, engine: SimulatedEngine, clock: Clock) -> None:
    before = ""
    while True:
        word = await asyncio.to_thread(_word, path)
        if word != before:
            log.warning("engine_fault", fault=word or "none")
            engine.recover()
            if word == "hang":
                engine.hang()
            elif word == "fail":
                engine.fail_next(EVERY_CALL)
            before = word
        await clock.sleep_wall(LOOK_S)


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
