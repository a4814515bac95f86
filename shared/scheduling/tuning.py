"""Decides which α to publish, from what a replay predicts for each.

The tuner replays the recorded window under every α of a grid that is logarithmic near zero (the
best values are small, and even steps jump over them), refines around the best, and moves only for
a reason: a gain above the margin that the noise does not explain, on a simulator that reproduces
what was observed.

Source: HexGen-Flow (arXiv 2505.05286), online α-tuning; margin, hysteresis and the refusals are
ours.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from shared.scheduling.attainment import percentile

ALPHA_GRID = (0.0, 0.003, 0.01, 0.02, 0.04, 0.07, 0.1, 0.2, 0.4, 0.7, 1.0)


class TuningRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a better α is worth a change.

    Attributes:
        margin: Least relative gain in P95 for any change, in [0, 1).
        reversal_margin: Least gain for going back towards the α in force before the current one.
        max_calibration_error: Largest |simulated / observed P95 - 1| of the current α at which
            the replay is believed.
        min_queries: Fewest finished queries a window needs.
        rollback_excess: How far observed P95 may exceed the prediction before a change is undone,
            relative.
    """

    margin: float = 0.03
    reversal_margin: float = 0.08
    max_calibration_error: float = 0.2
    min_queries: int = 100
    rollback_excess: float = 0.3


class TuningDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about α.

    Attributes:
        alpha: α to be in force, in [0, 1].
        is_change: Whether it differs from the one in force.
        reason: Why, in one sentence for people.
        best_alpha: The predicted best, even when it is not adopted.
        predicted_p95_s: P95 predicted under `alpha`, seconds; None when unknown.
        gain: Predicted relative gain of the best over the current α.
    """

    alpha: float
    is_change: bool
    reason: str
    best_alpha: float
    predicted_p95_s: float | None = None
    gain: float = 0.0


def refine_alphas(p95_by_alpha: Mapping[float, float]) -> tuple[float, ...]:
    """Return the α to try next, around the best one: one on each side, as far as there is room.

    Towards a neighbour above zero the geometric mean is tried, towards zero half of it.

    Args:
        p95_by_alpha: Predicted P95 per α tried so far, seconds.
    """
    finite = _finite(p95_by_alpha)
    if not finite:
        return ()
    ordered = sorted(finite)
    at = ordered.index(best_alpha(finite))
    sides = [
        (ordered[low], ordered[low + 1]) for low in (at - 1, at) if 0 <= low < len(ordered) - 1
    ]
    tried = set(p95_by_alpha)
    middles = (_between(low, high) for low, high in sides)
    return tuple(middle for middle in middles if middle not in tried)


def best_alpha(p95_by_alpha: Mapping[float, float], near: float | None = None) -> float:
    """Return the α with the smallest P95; ties go to the one nearest to `near`, then smallest.

    Raises:
        ValueError: No α has a finite P95.
    """
    finite = _finite(p95_by_alpha)
    if not finite:
        raise ValueError("no alpha has a finite P95")
    anchor = 0.0 if near is None else near
    return min(finite, key=lambda alpha: (finite[alpha], abs(alpha - anchor), alpha))


def gain_lower_bound(
    current_s: Sequence[float],
    candidate_s: Sequence[float],
    rng: np.random.Generator,
    *,
    level: float = 0.95,
    resamples: int = 400,
) -> float:
    """Return the lower confidence bound of the relative P95 gain (paired bootstrap).

    Args:
        current_s: End-to-end seconds per query under the current α.
        candidate_s: The same queries, in the same order, under the candidate.
        rng: Source of randomness.
        level: One-sided confidence, in (0, 1).
        resamples: Bootstrap size, >= 1.

    Returns:
        `1 - P95(candidate) / P95(current)` at the lower bound; 0 for an empty sample.

    Raises:
        ValueError: The samples differ in length.
    """
    if len(current_s) != len(candidate_s):
        raise ValueError("paired samples must have the same length")
    if not current_s:
        return 0.0
    pairs = np.array([current_s, candidate_s], dtype=np.float64)
    drawn = rng.integers(0, pairs.shape[1], (resamples, pairs.shape[1]))
    current, candidate = np.percentile(pairs[:, drawn], 95, axis=2)
    gains = 1.0 - candidate / np.maximum(current, 1e-12)
    return percentile([float(gain) for gain in gains], 100.0 * (1.0 - level))


def is_extrapolated(
    predicted_share: Mapping[str, float], observed_share: Mapping[str, float], limit: float = 2.0
) -> bool:
    """Return whether a replay gives an instance far more work than it was observed to do.

    The speed of an instance that got little work is poorly known, so an α that would give it more
    than `limit` times its observed share is not eligible.

    Args:
        predicted_share: instance_id -> share of the work in the replay, in [0, 1].
        observed_share: instance_id -> share of the work observed, in [0, 1].
        limit: Largest factor between them.
    """
    return any(
        share > limit * observed_share.get(instance_id, 0.0) and share > 1e-9
        for instance_id, share in predicted_share.items()
    )


def decide(
    current_alpha: float,
    p95_by_alpha: Mapping[float, float],
    *,
    rules: TuningRules | None = None,
    gain_low: Mapping[float, float] | None = None,
    ineligible: Collection[float] = (),
    calibration_error: float | None = None,
    num_queries: int | None = None,
    previous_alpha: float | None = None,
) -> TuningDecision:
    """Return the α to be in force after a replay.

    Args:
        current_alpha: The α in force; the replay should contain it.
        p95_by_alpha: Predicted P95 per α, seconds; NaN where a replay finished no query.
        rules: Margins and bounds; None uses the defaults.
        gain_low: α -> lower confidence bound of its gain; where given it must exceed the margin.
        ineligible: α that must not be adopted (see `is_extrapolated`).
        calibration_error: |simulated / observed P95 - 1| under the current α; None: not measured.
        num_queries: Finished queries in the window; None: not counted.
        previous_alpha: The α in force before the current one, for hysteresis.
    """
    rules = rules or TuningRules()
    allowed = {
        alpha: p95_s for alpha, p95_s in _finite(p95_by_alpha).items() if alpha not in ineligible
    }
    refusal = _refusal(rules, allowed, calibration_error, num_queries)
    if refusal:
        return _keep(current_alpha, current_alpha, 0.0, p95_by_alpha, refusal)
    best = best_alpha(allowed, near=current_alpha)
    current_s = p95_by_alpha.get(current_alpha, math.nan)
    if best == current_alpha:
        return _keep(best, best, 0.0, p95_by_alpha, "the current alpha is the predicted best")
    if not math.isfinite(current_s):
        return _move(best, 1.0, allowed[best], "the replay cannot tell what the current alpha does")
    gain = 1.0 - allowed[best] / current_s if current_s > 0 else 0.0
    is_reversal = _is_reversal(current_alpha, previous_alpha, best)
    margin = rules.reversal_margin if is_reversal else rules.margin
    sure = gain if gain_low is None else min(gain, gain_low.get(best, gain))
    if sure <= margin:
        kind = "reversal margin" if is_reversal else "margin"
        reason = f"predicted gain {gain:.1%} (sure: {sure:.1%}) is within the {kind} {margin:.1%}"
        return _keep(current_alpha, best, gain, p95_by_alpha, reason)
    reason = f"predicted P95 {allowed[best]:.3g} s instead of {current_s:.3g} s ({gain:.1%} lower)"
    return _move(best, gain, allowed[best], reason)


def roll_back(
    current_alpha: float,
    previous_alpha: float,
    *,
    predicted_p95_s: float,
    observed_p95_s: float,
    rules: TuningRules | None = None,
) -> TuningDecision | None:
    """Return the decision to undo the last change, or None while reality keeps the prediction.

    Args:
        current_alpha: The α in force since the change.
        previous_alpha: The α before it.
        predicted_p95_s: P95 that was promised, seconds, > 0.
        observed_p95_s: P95 measured since, seconds; NaN while nothing finished.
        rules: Bounds; None uses the defaults.
    """
    rules = rules or TuningRules()
    limit_s = predicted_p95_s * (1.0 + rules.rollback_excess)
    if current_alpha == previous_alpha or not observed_p95_s > limit_s:
        return None
    return TuningDecision(
        alpha=previous_alpha,
        is_change=True,
        reason=(
            f"rolled back: observed P95 {observed_p95_s:.3g} s is above "
            f"the promised {predicted_p95_s:.3g} s by more than {rules.rollback_excess:.0%}"
        ),
        best_alpha=previous_alpha,
    )


def _refusal(
    rules: TuningRules,
    allowed: Mapping[float, float],
    calibration_error: float | None,
    num_queries: int | None,
) -> str | None:
    if num_queries is not None and num_queries < rules.min_queries:
        return f"only {num_queries} queries in the window, {rules.min_queries} are needed"
    if calibration_error is not None and not calibration_error <= rules.max_calibration_error:
        return (
            f"the simulator is off by {calibration_error:.1%}, "
            f"at most {rules.max_calibration_error:.0%} is believed"
        )
    if not allowed:
        return "no eligible alpha finished any query in the replay"
    return None


def _keep(
    current: float, best: float, gain: float, p95_by_alpha: Mapping[float, float], reason: str
) -> TuningDecision:
    predicted = p95_by_alpha.get(current)
    return TuningDecision(
        alpha=current,
        is_change=False,
        reason=reason,
        best_alpha=best,
        predicted_p95_s=predicted if predicted is not None and math.isfinite(predicted) else None,
        gain=gain,
    )


def _move(best: float, gain: float, predicted_p95_s: float, reason: str) -> TuningDecision:
    return TuningDecision(
        alpha=best,
        is_change=True,
        reason=reason,
        best_alpha=best,
        predicted_p95_s=predicted_p95_s,
        gain=gain,
    )


def _is_reversal(current: float, previous: float | None, best: float) -> bool:
    return previous is not None and (previous - current) * (best - current) > 0


def _between(low: float, high: float) -> float:
    return high / 2.0 if low <= 0.0 else math.sqrt(low * high)


def _finite(p95_by_alpha: Mapping[float, float]) -> dict[float, float]:
    return {alpha: p95_s for alpha, p95_s in p95_by_alpha.items() if math.isfinite(p95_s)}
