"""The tightest SLO a policy can promise: the smallest scale that a share of the queries meets.

All queries get the same scale s. The schedule itself may depend on s (urgency does), so s is the
fixed point of "run under s, see which scale the target share would have met". Policies blind to
SLOs are there after one run; for the others the steps are halved after the second.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from services.cli.lab.pool import Runner
from services.cli.lab.setting import Job, Row, Variant

TARGETS = (0.95, 0.99)
ROUNDS = 6
TOLERANCE = 0.01


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Where a search begins.

    Attributes:
        key: What the result is filed under.
        variant: Policy and parameters.
        target: Share of the queries that must meet the scale, one of `TARGETS`.
        row: A run of it, whose schedule gives the first guess.
    """

    key: Any
    variant: Variant
    target: float
    row: Row


def tightest_scales(
    runner: Runner, starts: Sequence[Start]
) -> dict[Any, dict[float, tuple[float, ...]]]:
    """Return key -> target -> the smallest scales, seed by seed; infinite where none is met.

    Args:
        runner: Where runs happen.
        starts: The searches.
    """
    guesses = [scale_of(start.row, start.target) for start in starts]
    open_ones = [place for place, guess in enumerate(guesses) if guess < float("inf")]
    for number in range(ROUNDS):
        jobs = [_job(starts[place], guesses[place]) for place in open_ones]
        rows = runner.run(f"tightest SLOs, round {number + 1} of at most {ROUNDS}", jobs)
        still_open = []
        for place, row in zip(open_ones, rows, strict=True):
            before, seen = guesses[place], scale_of(row, starts[place].target)
            if abs(seen - before) > TOLERANCE * before and seen < float("inf"):
                still_open.append(place)
            guesses[place] = seen if number < 2 else (before + seen) / 2.0
        open_ones = still_open
        if not open_ones:
            break
    filed: dict[Any, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for start, guess in zip(starts, guesses, strict=True):
        filed[start.key][start.target].append(guess)
    return {
        key: {target: tuple(found) for target, found in by_target.items()}
        for key, by_target in filed.items()
    }


def scale_of(row: Row, target: float) -> float:
    """Return the scale that a share of a run's queries would have met on its schedule."""
    return row.measured.scale95 if target == TARGETS[0] else row.measured.scale99


def _job(start: Start, scale: float) -> Job:
    return Job(cell=start.row.cell, seed=start.row.seed, variants=(start.variant,), slo_scale=scale)
