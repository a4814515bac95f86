"""Picks among scored instances, as `dispatch.highest` does."""

from shared.scheduling.dispatch import tie_order
from shared.simulation.fleet_state import UNASSIGNED, RunState
from shared.simulation.tables import Tables


def best_scored(tables: Tables, run: RunState, index: int) -> int:
    """Return the instance with the highest of `scores` among those that can run a call."""
    best = UNASSIGNED
    for instance in range(run.num_instances):
        if tables.costs_s[instance] < 0.0:
            continue
        lead = 1.0 if best < 0 else tables.scores[instance] - tables.scores[best]
        if lead > 0.0 or (lead == 0.0 and wins_tie(tables, index, instance, best)):
            best = instance
    return best


def wins_tie(tables: Tables, index: int, instance: int, other: int) -> bool:
    """Return whether an instance precedes another of equal score for this call."""
    key = tables.plans[index].tie_key
    mine = tie_order(key, tables.lines[instance].tie_key)
    return mine > tie_order(key, tables.lines[other].tie_key)
