"""From predictions of a replay to a decision: calibration, confidence, extrapolation; pure.

A replay starts with an empty fleet and the window did not, so the first queries of a window are
simulated but not judged: those still open when what is judged began, else the first tenth. An
instance's speed is known as well as the work it got: an α that would give it over twice its
observed share is not eligible; but every instance may be given a fair share, or else a fleet that
was run on one instance for a while could never spread again.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from shared.scheduling.attainment import percentile
from shared.scheduling.tuning import (
    TuningDecision,
    TuningRules,
    decide,
    gain_lower_bound,
    is_extrapolated,
)

BOOTSTRAP_SEED = 20_250_505  # a decision about the same window is the same decision
WARM_UP_SHARE = 0.1
FLOOR_OF_FAIR_SHARE = 0.5  # the extrapolation rule doubles it


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator predicts under one α.

    Attributes:
        alpha: The α.
        latencies_s: End-to-end time of every query, in the request's order; NaN: not completed.
        p95_s: Their 95th percentile, warm-up left out, seconds.
        shares: instance_id -> share of the fleet's generated tokens, in [0, 1].
    """

    alpha: float
    latencies_s: tuple[float, ...]
    p95_s: float
    shares: dict[str, float]


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What really happened in the window.

    Attributes:
        p95_s: P95 of the queries judged, those still running counted as longer, seconds.
        num_queries: How many queries were judged.
        shares: instance_id -> share of the generated tokens, in [0, 1].
    """

    p95_s: float
    num_queries: int
    shares: Mapping[str, float]


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with what it rests on.

    Attributes:
        decision: What to do.
        calibration_error: |simulated / observed P95 - 1| under the α in force; None: unknown.
        interval_s: 95% bootstrap interval of the predicted P95 under the decision's α, seconds.
        ineligible: α that would give an instance far more work than it was seen to do.
    """

    decision: TuningDecision
    calibration_error: float | None
    interval_s: tuple[float, float]
    ineligible: tuple[float, ...]


def warm_up_of(num_queries: int) -> int:
    """Return how many of a window's first queries are simulated but not judged."""
    return int(WARM_UP_SHARE * num_queries)


def judged(latencies_s: Sequence[float], warm_up: int | None = None) -> list[float]:
    """Return the end-to-end times that are judged: completed, after the warm-up; seconds."""
    start = warm_up_of(len(latencies_s)) if warm_up is None else warm_up
    return [s for s in latencies_s[start:] if math.isfinite(s)]


def judge(
    replayed: Sequence[Replayed],
    *,
    current: float,
    previous: float | None,
    observed: Observed | None,
    rules: TuningRules,
    as_it_was: Replayed | None = None,
    warm_up: int | None = None,
) -> Judgement:
    """Return what to do about α, given a sweep that contains the α in force.

    Args:
        replayed: Predictions on common arrivals.
        current: α in force.
        previous: α before it, or None.
        observed: What was measured; None offline: no calibration, nothing is extrapolation.
        rules: Margins and bounds.
        as_it_was: Prediction under the α and the expectations in force in the window, for the
            calibration; None: the sweep's own.
        warm_up: How many of the first queries are not judged; None: a tenth.
    """
    by_alpha = {run.alpha: run for run in replayed}
    now = by_alpha[current]
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    gain_low = {
        alpha: gain_low_of(now, run, rng, warm_up)
        for alpha, run in by_alpha.items()
        if run.p95_s < now.p95_s
    }
    ineligible = _ineligible(by_alpha, observed)
    error = _calibration_error(as_it_was or now, observed)
    decision = decide(
        current,
        {alpha: run.p95_s for alpha, run in by_alpha.items()},
        rules=rules,
        gain_low=gain_low,
        ineligible=ineligible,
        calibration_error=error,
        num_queries=None if observed is None else observed.num_queries,
        previous_alpha=previous,
    )
    return Judgement(
        decision=decision,
        calibration_error=error,
        interval_s=p95_interval_s(by_alpha[decision.alpha].latencies_s, warm_up=warm_up),
        ineligible=ineligible,
    )


def p95_interval_s(
    latencies_s: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 400,
    warm_up: int | None = None,
) -> tuple[float, float]:
    """Return the bootstrap interval of P95 over the queries judged, seconds; NaN when none."""
    sample = np.array(judged(latencies_s, warm_up))
    if not len(sample):
        return math.nan, math.nan
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = sample[rng.integers(0, len(sample), (resamples, len(sample)))]
    tail = 50.0 * (1.0 - level)
    low_s, high_s = np.percentile(np.percentile(drawn, 95, axis=1), [tail, 100.0 - tail])
    return float(low_s), float(high_s)


def _ineligible(by_alpha: Mapping[float, Replayed], observed: Observed | None) -> tuple[float, ...]:
    if observed is None:
        return ()
    ids = {instance_id for run in by_alpha.values() for instance_id in run.shares}
    floor = FLOOR_OF_FAIR_SHARE / max(1, len(ids))
    known = {one: max(floor, observed.shares.get(one, 0.0)) for one in ids}
    return tuple(alpha for alpha, run in by_alpha.items() if is_extrapolated(run.shares, known))


def gain_low_of(
    now: Replayed, other: Replayed, rng: np.random.Generator, warm_up: int | None = None
) -> float:
    """Return the lower 95% bound of the relative gain in P95 of a run over another.

    Args:
        now: The run to beat.
        other: The same queries under something else.
        rng: Draws the bootstrap samples.
        warm_up: How many of the first queries are not judged; None: a tenth.
    """
    start = warm_up_of(len(now.latencies_s)) if warm_up is None else warm_up
    pairs = [
        (a, b)
        for a, b in zip(now.latencies_s[start:], other.latencies_s[start:], strict=True)
        if math.isfinite(a) and math.isfinite(b)
    ]
    return gain_lower_bound([a for a, _ in pairs], [b for _, b in pairs], rng)


def _calibration_error(now: Replayed, observed: Observed | None) -> float | None:
    if observed is None or not math.isfinite(observed.p95_s) or observed.p95_s <= 0:
        return None
    return abs(now.p95_s / observed.p95_s - 1.0)


def p95_judged_s(latencies_s: Sequence[float], warm_up: int | None = None) -> float:
    """Return P95 over the queries judged, seconds; NaN when none."""
    return percentile(judged(latencies_s, warm_up), 95)
