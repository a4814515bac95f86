"""What must hold of every simulated run, whatever the policy."""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shared.errors import MeshError

if TYPE_CHECKING:
    from shared.simulation.results import RunResult

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
    check_busy_time(result)
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


def check_busy_time(result: "RunResult") -> None:
    """An instance is busy whenever it has a call in its batch, and only then has work."""
    for place in range(len(result.fleet)):
        mine = (result.call_instance == place) & np.isfinite(result.call_end_s)
        covered_s = union_s(result.started_s[mine], result.call_end_s[mine])
        busy_s = float(result.busy_s[place])
        scale = max(1.0, covered_s)
        _demand(abs(busy_s - covered_s) <= TOLERANCE_S * scale, "idle with work, or busy without")


def check_littles_law(result: "RunResult") -> None:
    """The time-average of queries inside equals their arrival rate times their mean time."""
    ended = np.isfinite(result.end_s)
    arrivals, ends = result.arrival_s[ended], result.end_s[ended]
    if len(ends) == 0:
        return
    instants = np.concatenate([arrivals, ends])
    changes = np.concatenate([np.ones(len(arrivals)), -np.ones(len(ends))])
    order = np.lexsort((changes, instants))
    inside = np.cumsum(changes[order])
    area = float((inside[:-1] * np.diff(instants[order])).sum())
    total_s = float((ends - arrivals).sum())
    _demand(abs(area - total_s) <= TOLERANCE_S * max(1.0, total_s), "Little's law")


def union_s(starts_s: np.ndarray, ends_s: np.ndarray) -> float:
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
