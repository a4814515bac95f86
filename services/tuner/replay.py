"""Ask the simulator what the window's P95 would have been under other values of α.

Runs in a process of its own so that the event loop never stalls; everything that crosses the
process boundary is plain data.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Protocol

import msgspec

from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.domain.trace import TraceQuery

if TYPE_CHECKING:
    from shared.simulation.results import RunResult


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


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator predicts under one α.

    Attributes:
        alpha: The α.
        latencies_s: End-to-end time of every query, in the request's order; NaN: not completed.
        p95_s: Their 95th percentile, seconds.
        shares: instance_id -> share of the fleet's generated tokens, in [0, 1].
    """

    alpha: float
    latencies_s: tuple[float, ...]
    p95_s: float
    shares: dict[str, float]


class Replay(Protocol):
    """Predicts a window under several α."""

    async def sweep(self, request: ReplayRequest) -> list[Replayed]:
        """Return one prediction per α of the request, in its order."""
        ...


def replay_now(packed: bytes) -> bytes:
    """Return the packed predictions for a packed ReplayRequest; runs in the worker process."""
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
    predicted = [
        _replayed(alpha, result, request.fleet)
        for alpha, result in zip(request.alphas, results, strict=True)
    ]
    return msgspec.msgpack.encode(predicted)


def _replayed(alpha: float, result: "RunResult", fleet: Sequence[InstanceSpec]) -> Replayed:
    generated = dict.fromkeys((spec.instance_id for spec in fleet), 0)
    for index, tokens in zip(
        result.call_instance.tolist(), result.output_tokens.tolist(), strict=True
    ):
        if index >= 0:
            generated[fleet[index].instance_id] += tokens
    return Replayed(
        alpha=alpha,
        latencies_s=tuple(result.latency_s.tolist()),
        p95_s=result.summary().p95_s,
        shares=shares_of(generated),
    )


def shares_of(generated: Mapping[str, int]) -> dict[str, float]:
    """Return instance_id -> share of the fleet's generated tokens, in [0, 1]."""
    total = sum(generated.values())
    return {key: tokens / total if total else 0.0 for key, tokens in generated.items()}


class ProcessReplay:
    """Replays in an executor of processes.

    Args:
        executor: Where to run; the caller owns it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def sweep(self, request: ReplayRequest) -> list[Replayed]:
        """Return one prediction per α of the request, in its order."""
        loop = asyncio.get_running_loop()
        packed = msgspec.msgpack.encode(request)
        answer = await loop.run_in_executor(self._executor, replay_now, packed)
        return msgspec.msgpack.decode(answer, type=list[Replayed])


def alphas_to_try(grid: Sequence[float], current: float) -> tuple[float, ...]:
    """Return the grid with the value in force added, sorted."""
    return tuple(sorted({*grid, current}))
