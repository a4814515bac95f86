"""The waiting lines of the instances, by urgency, read from the state store while somebody looks.

A queue score is the latest start on the mesh clock where the policy orders by urgency; other
policies use scales of their own, and then only the count is shown.
"""

import asyncio
from typing import Any

import msgspec
import structlog

from shared.errors import MeshError
from shared.ports import Clock, QueueEntry, StateStore

MAX_READ = 500
MAX_FIRST = 20
LONGEST_SLACK_S = 10 * 86_400.0
EDGES_S = (0.0, 5.0, 30.0)
log = structlog.get_logger(__name__)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's line.

    Attributes:
        by_slack: Calls that can no longer start in time, have less than 5 s, less than 30 s, more;
            None where the policy does not order by urgency.
        first: The first calls and their slack, seconds.
    """

    by_slack: tuple[int, int, int, int] | None
    first: list[dict[str, Any]]


class WaitingLines:
    """Reads the lines.

    Args:
        store: Where they are.
        clock: Mesh clock.
    """

    def __init__(self, store: StateStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.lines: dict[str, Line] = {}

    async def read(self, instance_ids: list[str]) -> None:
        """Read the lines of these instances anew; those that cannot be read are left out."""
        async with asyncio.TaskGroup() as group:
            tasks = {
                one: group.create_task(self._read(one), name=f"line-{one}") for one in instance_ids
            }
        found = {one: task.result() for one, task in tasks.items()}
        self.lines = {one: line for one, line in found.items() if line is not None}

    async def _read(self, instance_id: str) -> Line | None:
        try:
            entries = await self._store.urgency_set(instance_id).waiting(limit=MAX_READ)
        except MeshError as exc:
            log.debug("line_unreadable", instance_id=instance_id, error=str(exc))
            return None
        return line_of(entries, self._clock.now_s())


def line_of(entries: list[QueueEntry], now_s: float) -> Line:
    """Return how urgent the waiting calls are (mesh clock)."""
    slacks = [entry.score - now_s for entry in entries]
    if any(abs(slack) > LONGEST_SLACK_S for slack in slacks):
        return Line(by_slack=None, first=[])
    counts = [0, 0, 0, 0]
    for slack in slacks:
        counts[sum(slack >= edge for edge in EDGES_S)] += 1
    first = [
        {"request_id": entry.request_id, "slack_s": slack}
        for entry, slack in list(zip(entries, slacks, strict=True))[:MAX_FIRST]
    ]
    return Line(by_slack=(counts[0], counts[1], counts[2], counts[3]), first=first)
