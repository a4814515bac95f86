"""What a reader must know to judge the numbers of a run whose time is scaled."""

import math
from collections.abc import Mapping

from services.cli.tally import Tally

LATE_WALL_S = 0.5


def _slower(time_scale: float) -> float:
    """Return a time scale at which a machine has about twice the time."""
    return max(1.0, round(time_scale / 2))


def scale_caveats(
    tallies: Mapping[str, Tally], time_scale: float, command: str = "--time-scale"
) -> list[str]:
    """Return one sentence each; none for runs in real time.

    Args:
        tallies: name -> what came back; a run that is the only one may have an empty name.
        time_scale: Mesh seconds per wall second.
        command: What a person types before a smaller time scale.
    """
    if time_scale <= 1:
        return []
    lines = []
    late_s = max(tally.latest_arrival_s for tally in tallies.values())
    if late_s > time_scale * LATE_WALL_S:
        lines.append(
            f"This machine was too busy for this time scale (a query arrived {late_s:.1f} "
            f"workload seconds late): give it more time with {command} {_slower(time_scale):g}."
        )
    costs_s = {name: tally.mean_hops_s() for name, tally in tallies.items()}
    hops = ", ".join(
        f"{name} {cost_s:.2f} s".strip()
        for name, cost_s in costs_s.items()
        if math.isfinite(cost_s)
    )
    if hops:
        lines.append(
            f"Broker and dispatch cost each call workload time ({hops} on average): real "
            f"milliseconds count {time_scale:g}-fold here."
        )
    return lines
