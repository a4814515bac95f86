"""Ask the simulator what the window's P95 would have been under other values of α.

Runs in a process of its own so that the event loop never stalls; everything that crosses the
process boundary is plain data.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

import msgspec

from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.domain.trace import TraceQuery


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A window to be replayed.

    Attributes:
        queries: Arrivals, structure and lengths.
        fleet: The instances, as they reported themselves.
        policy: Policy name.
        shapes: Predictions the dispatcher uses.
        alphas: Values to try.
        speed_factors: Learned correction per instance.
    """

    queries: tuple[TraceQuery, ...]
    fleet: tuple[InstanceSpec, ...]
    policy: str
    shapes: dict[str, WorkflowShape]
    alphas: tuple[float, ...]
    speed_factors: dict[str, float] = {}


class Replay(Protocol):
    """Predicts P95 per α."""

    async def p95_by_alpha(self, request: ReplayRequest) -> dict[float, float]:
        """Return α -> predicted P95 of end-to-end time, seconds."""
        ...


def replay_now(packed: bytes) -> list[tuple[float, float]]:
    """Return (α, P95 seconds) for every α of a packed ReplayRequest; runs in the worker process."""
    from shared.simulation.scenario import Scenario  # noqa: PLC0415 - loads the compiled core
    from shared.simulation.simulator import sweep_alpha  # noqa: PLC0415

    request = msgspec.msgpack.decode(packed, type=ReplayRequest)
    scenario = Scenario(
        queries=request.queries,
        fleet=request.fleet,
        policy=request.policy,
        shapes=request.shapes,
        speed_factors=request.speed_factors,
    )
    results = sweep_alpha(scenario, request.alphas)
    return [
        (alpha, result.summary().p95_s)
        for alpha, result in zip(request.alphas, results, strict=True)
    ]


class ProcessReplay:
    """Replays in an executor of processes.

    Args:
        executor: Where to run; the caller owns it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def p95_by_alpha(self, request: ReplayRequest) -> dict[float, float]:
        """Return α -> predicted P95, seconds."""
        loop = asyncio.get_running_loop()
        packed = msgspec.msgpack.encode(request)
        return dict(await loop.run_in_executor(self._executor, replay_now, packed))


def alphas_to_try(grid: Sequence[float], current: float) -> tuple[float, ...]:
    """Return the grid with the value in force added, sorted."""
    return tuple(sorted({*grid, current}))
