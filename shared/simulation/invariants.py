"""What must hold of every simulated run, whatever the policy."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.errors import MeshError

if TYPE_CHECKING:
    from shared.simulation.results import RunResult

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

TOLERANCE_S = 1e-6


class SimulationFault(MeshError):
    """A simulated run broke an invariant: a defect of the simulator, never of its input."""

    reason = "simulation_fault"


def check_result(result: "RunResult") -> None:
    """Check conservation, causality, monotone time, Little's law and work conservation.

    Raises:
        SimulationFault: Names the invariant.
    """
    check_conservation(result)
    check_causality(result)
    check_work_conservation(result)
    check_littles_law(result)


def check_conservation(result: "RunResult") -> None:
    """Every call of an answered query ran exactly once; every query ended."""
    ran = np.isfinite(result.call_end_s)
    answered = result.is_completed[result.call_query]
    _demand(bool(np.isfinite(result.end_s).all()), "a query never ended")
    _demand(bool(ran[answered].all()), "a call of an answered query never ran")
    bound = result.call_instance >= 0
    _demand(bool((bound == ran).all()), "a bound call was lost")
    counts = np.bincount(result.call_instance[bound], minlength=len(result.fleet))
    _demand(bool((counts == result.num_calls).all()), "calls per instance do not add up")


def check_causality(result: "RunResult") -> None:
    """No effect precedes its cause."""
    ran = np.isfinite(result.call_end_s)
    chain = [
        result.arrival_s[result.call_query],
        result.ready_s,
        result.dispatched_s,
        result.delivered_s,
        result.started_s,
        result.first_token_s,
        result.call_end_s,
    ]
    for earlier, later in pairwise(chain):
        _demand(bool((earlier[ran] <= later[ran] + TOLERANCE_S).all()), "an effect came first")
    last = np.full(len(result.arrival_s), -np.inf)
    np.maximum.at(last, result.call_query[ran], result.call_end_s[ran])
    done = result.is_completed
    _demand(bool((last[done] <= result.end_s[done] + TOLERANCE_S).all()), "a query ended early")
    _demand(
        bool((result.cached_tokens[ran] < result.input_tokens[ran]).all()),
        "a prompt was never computed",
    )


def check_work_conservation(result: "RunResult") -> None:
    """An instance is busy exactly while it has a call, in its line or in its engine."""
    for place in range(len(result.fleet)):
        mine = _calls_at(result, place)
        covered_s = union_s(result.delivered_s[mine], result.call_end_s[mine])
        busy_s = float(result.busy_s[place])
        _demand(_is_close(busy_s, covered_s), "an instance idle with work, or busy without")


def check_littles_law(result: "RunResult") -> None:
    """The integral of the calls at an instance equals the sum of their times there."""
    for place in range(len(result.fleet)):
        mine = _calls_at(result, place)
        total_s = float((result.call_end_s[mine] - result.delivered_s[mine]).sum())
        _demand(_is_close(float(result.present_s[place]), total_s), "Little's law")


def _calls_at(result: "RunResult", place: int) -> Flags:
    mine: Flags = (result.call_instance == place) & np.isfinite(result.call_end_s)
    return mine


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE_S * max(1.0, abs(other))


def union_s(starts_s: Floats, ends_s: Floats) -> float:
    """Return the length of the union of intervals, seconds."""
    if len(starts_s) == 0:
        return 0.0
    order = np.argsort(starts_s, kind="stable")
    starts, reach = starts_s[order], np.maximum.accumulate(ends_s[order])
    gaps = np.maximum(0.0, starts[1:] - reach[:-1])
    return float(reach[-1] - starts[0] - gaps.sum())


def _demand(holds: bool, invariant: str) -> None:
    if not holds:
        msg = f"simulation broke an invariant: {invariant}"
        raise SimulationFault(msg)
