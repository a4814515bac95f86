"""From predictions to a decision: calibration, confidence, extrapolation; pure."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from services.tuner.replay import Replayed
from shared.scheduling.attainment import percentile
from shared.scheduling.tuning import (
    TuningDecision,
    TuningRules,
    decide,
    gain_lower_bound,
    is_extrapolated,
)

BOOTSTRAP_SEED = 20_250_505  # a decision about the same window is the same decision


def judge(
    replayed: Sequence[Replayed],
    *,
    current: float,
    previous: float | None,
    observed_s: Sequence[float],
    observed_shares: Mapping[str, float],
    rules: TuningRules,
) -> TuningDecision:
    """Return what to do about α, given a sweep that contains the α in force.

    Args:
        replayed: Predictions on common arrivals.
        current: α in force.
        previous: α before it, or None.
        observed_s: End-to-end time of the window's completed queries, as measured, seconds.
        observed_shares: instance_id -> share of the generated tokens, as measured, in [0, 1].
        rules: Margins and bounds.
    """
    by_alpha = {run.alpha: run for run in replayed}
    now = by_alpha[current]
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    gain_low = {
        alpha: _gain_low(now, run, rng) for alpha, run in by_alpha.items() if run.p95_s < now.p95_s
    }
    return decide(
        current,
        {alpha: run.p95_s for alpha, run in by_alpha.items()},
        rules=rules,
        gain_low=gain_low,
        ineligible=[
            alpha for alpha, run in by_alpha.items() if is_extrapolated(run.shares, observed_shares)
        ],
        calibration_error=_calibration_error(now, observed_s),
        num_queries=len(observed_s),
        previous_alpha=previous,
    )


def _gain_low(now: Replayed, other: Replayed, rng: np.random.Generator) -> float:
    pairs = [
        (a, b)
        for a, b in zip(now.latencies_s, other.latencies_s, strict=True)
        if math.isfinite(a) and math.isfinite(b)
    ]
    return gain_lower_bound([a for a, _ in pairs], [b for _, b in pairs], rng)


def _calibration_error(now: Replayed, observed_s: Sequence[float]) -> float | None:
    measured_s = percentile(observed_s, 95)
    if not math.isfinite(measured_s) or measured_s <= 0:
        return None
    return abs(now.p95_s / measured_s - 1.0)
