"""What belongs to one life (epoch) of a worker; its parts share it."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from services.worker.bells import Bells
from services.worker.calls import CallBook, EndedCalls
from services.worker.endings import Endings
from services.worker.params import WorkerParams
from services.worker.pulse import Pulse
from services.worker.tombstones import Tombstones
from services.worker.vitals import Vitals
from shared.ports import Clock, UrgencySet
from shared.runtime.metrics import Metrics
from shared.runtime.offsets import OffsetTracker


class End(IntEnum):
    """Why a life ends; a later cause replaces a lower one."""

    NONE = 0
    STOPPED = 1
    ENGINE_DEAD = 2
    FENCED = 3


class Over:
    """Whether and why a life is over."""

    def __init__(self) -> None:
        self.end = End.NONE
        self.is_engine_dead = False
        self.changed = asyncio.Event()

    def set(self, end: End) -> None:
        """End the life."""
        self.is_engine_dead |= end is End.ENGINE_DEAD
        if end > self.end:
            self.end = end
            self.changed.set()


@dataclass(kw_only=True)
class Life:
    """The parts of one life."""

    epoch: int
    nonce: str
    params: WorkerParams
    clock: Clock
    metrics: Metrics
    vitals: Vitals
    tombstones: Tombstones
    index: UrgencySet
    offsets: OffsetTracker
    book: CallBook
    ended: EndedCalls
    bells: Bells
    endings: Endings
    pulse: Pulse
    group: asyncio.TaskGroup
    over: Over = field(default_factory=Over)
    index_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a claim and by a repair: a repair must not see half a claim."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something of this life beside it, by name."""
        task = self.group.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def cancel_all(self, keep: asyncio.Task[None] | None = None) -> None:
        """Cancel everything that was spawned, but for one task."""
        for task in self.tasks - {keep}:
            task.cancel()
