"""The decision about α."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.tuning import (
    ALPHA_GRID,
    TuningRules,
    best_alpha,
    decide,
    gain_lower_bound,
    is_extrapolated,
    refine_alphas,
    roll_back,
)

curves = st.dictionaries(st.sampled_from(ALPHA_GRID), st.floats(1.0, 1e4), min_size=2)


def test_the_grid_is_fine_near_zero() -> None:
    """The grid of the design, ascending within 0..1."""
    assert ALPHA_GRID == (0, 0.003, 0.01, 0.02, 0.04, 0.07, 0.1, 0.2, 0.4, 0.7, 1)


def test_a_clear_gain_moves_alpha() -> None:
    """40 s instead of 50 s is 20% lower: adopt it and say so."""
    decision = decide(0.7, {0.01: 40.0, 0.7: 50.0})
    assert (decision.alpha, decision.is_change) == (0.01, True)
    assert decision.gain == pytest.approx(0.2)
    assert decision.predicted_p95_s == 40.0
    assert "40 s instead of 50 s" in decision.reason


def test_a_gain_within_the_margin_keeps_alpha() -> None:
    """2% lower is not worth a change, though the better value is named."""
    decision = decide(0.7, {0.01: 49.0, 0.7: 50.0})
    assert (decision.alpha, decision.is_change, decision.best_alpha) == (0.7, False, 0.01)
    assert "margin" in decision.reason


def test_the_best_alpha_stays() -> None:
    """No better value, no change."""
    decision = decide(0.01, {0.01: 40.0, 0.7: 50.0})
    assert (decision.alpha, decision.is_change, decision.predicted_p95_s) == (0.01, False, 40.0)


def test_an_equal_alternative_is_not_adopted() -> None:
    """Of equally good values the current one wins."""
    assert decide(0.1, {0.0: 40.0, 0.1: 40.0, 0.2: 40.0}).alpha == 0.1


def test_going_back_needs_a_larger_gain() -> None:
    """5% suffices onwards, but not back towards the value in force before (hysteresis)."""
    replay = {0.01: 47.5, 0.1: 50.0}
    assert decide(0.1, replay, previous_alpha=0.2).is_change
    assert not decide(0.1, replay, previous_alpha=0.02).is_change
    assert decide(0.1, {0.01: 40.0, 0.1: 50.0}, previous_alpha=0.02).is_change


def test_an_unsure_gain_is_no_reason() -> None:
    """20% predicted, but the lower confidence bound is 1%."""
    decision = decide(0.7, {0.01: 40.0, 0.7: 50.0}, gain_low={0.01: 0.01})
    assert not decision.is_change
    assert "sure: 1.0%" in decision.reason


def test_a_simulator_that_is_off_is_not_believed() -> None:
    """A calibration error of 30%, or none that can be told, is above the bound of 20%."""
    for error in (0.3, math.nan):
        decision = decide(0.7, {0.01: 40.0, 0.7: 50.0}, calibration_error=error)
        assert not decision.is_change
        assert "off by" in decision.reason


def test_a_short_window_is_not_believed() -> None:
    """Fewer finished queries than the rules demand decide nothing."""
    decision = decide(0.7, {0.01: 40.0, 0.7: 50.0}, num_queries=20)
    assert not decision.is_change
    assert "20 queries" in decision.reason


def test_an_ineligible_alpha_is_passed_over() -> None:
    """The second best is adopted where the best extrapolates."""
    decision = decide(0.7, {0.0: 30.0, 0.01: 40.0, 0.7: 50.0}, ineligible={0.0})
    assert decision.alpha == 0.01


def test_a_replay_without_any_result_keeps_alpha() -> None:
    """All NaN is no crash and no change."""
    decision = decide(0.7, {0.0: math.nan, 0.7: math.nan})
    assert (decision.alpha, decision.is_change, decision.predicted_p95_s) == (0.7, False, None)


def test_an_alpha_under_which_nothing_finishes_is_left() -> None:
    """Where the replay has no P95 for the current value, the best known one is adopted."""
    assert decide(0.7, {0.01: 40.0, 0.7: math.nan}).alpha == 0.01


@given(curve=curves, data=st.data())
def test_a_decision_is_never_predicted_to_be_worse(
    curve: dict[float, float], data: st.DataObject
) -> None:
    """The α in force after a decision is the current one, or one predicted better by the margin."""
    current = data.draw(st.sampled_from(sorted(curve)))
    decision = decide(current, curve)
    if decision.is_change:
        assert curve[decision.alpha] < curve[current] * (1.0 - TuningRules().margin)
    else:
        assert decision.alpha == current
    again = decide(decision.alpha, curve, previous_alpha=current)
    assert not again.is_change


@given(curve=curves)
def test_the_best_alpha_has_the_smallest_p95(curve: dict[float, float]) -> None:
    """No value of the curve is below the best one's."""
    assert curve[best_alpha(curve)] == min(curve.values())


def test_no_best_without_any_result() -> None:
    """There is no best among NaN."""
    with pytest.raises(ValueError, match="finite"):
        best_alpha({0.1: math.nan})


def test_refinement_tries_both_sides_of_the_best() -> None:
    """Around 0.02: the geometric means with 0.01 and with 0.04."""
    assert refine_alphas({0.01: 5.0, 0.02: 4.0, 0.04: 6.0}) == pytest.approx(
        (math.sqrt(0.01 * 0.02), math.sqrt(0.02 * 0.04))
    )


def test_refinement_towards_zero_halves() -> None:
    """Between 0 and 0.003 there is no geometric mean."""
    assert refine_alphas({0.0: 4.0, 0.003: 5.0, 0.01: 6.0}) == (0.0015,)


@given(curve=curves)
def test_refinement_stays_inside_and_is_new(curve: dict[float, float]) -> None:
    """Every proposal lies between tried values and was not tried yet."""
    for alpha in refine_alphas(curve):
        assert min(curve) < alpha < max(curve)
        assert alpha not in curve


def test_refinement_of_nothing_is_nothing() -> None:
    """Without a finite result there is nothing to refine."""
    assert refine_alphas({0.1: math.nan}) == ()


def test_a_certain_gain_has_a_positive_lower_bound() -> None:
    """Every query is 20% faster: the bound is 20% in every resample."""
    current = list(np.random.default_rng(1).exponential(50.0, 300))
    faster = [0.8 * value for value in current]
    assert gain_lower_bound(current, faster, np.random.default_rng(2)) == pytest.approx(0.2)


def test_noise_seldom_has_a_positive_lower_bound() -> None:
    """Equal distributions: of 100 comparisons at 95% at most 12 call the noise a gain."""
    wrong = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        one, other = rng.exponential(50.0, (2, 200)).tolist()
        wrong += gain_lower_bound(one, other, rng) > 0.0
    assert wrong <= 12


def test_the_bound_is_the_same_for_the_same_seed() -> None:
    """The bootstrap draws from the generator it is given."""
    one, other = [1.0, 2.0, 5.0, 9.0], [1.0, 1.5, 6.0, 7.0]
    bounds = {gain_lower_bound(one, other, np.random.default_rng(7)) for _ in range(3)}
    assert len(bounds) == 1


def test_unpaired_samples_are_refused() -> None:
    """Pairs need equal lengths; an empty window has no gain."""
    with pytest.raises(ValueError, match="same length"):
        gain_lower_bound([1.0], [], np.random.default_rng(0))
    assert gain_lower_bound([], [], np.random.default_rng(0)) == 0.0


def test_twice_the_observed_share_is_extrapolation() -> None:
    """10% observed: 20% may be replayed, 21% not; an unseen instance may get nothing."""
    observed = {"a": 0.9, "b": 0.1}
    assert not is_extrapolated({"a": 0.8, "b": 0.2}, observed)
    assert is_extrapolated({"a": 0.79, "b": 0.21}, observed)
    assert is_extrapolated({"a": 0.9, "c": 0.1}, observed)
    assert not is_extrapolated({"a": 1.0, "c": 0.0}, observed)


def test_a_broken_promise_is_rolled_back() -> None:
    """Promised 40 s, observed 53 s: more than 30% above, so the change is undone."""
    decision = roll_back(0.01, 0.7, predicted_p95_s=40.0, observed_p95_s=53.0)
    assert decision is not None
    assert (decision.alpha, decision.is_change) == (0.7, True)
    assert "rolled back" in decision.reason


@pytest.mark.parametrize("observed_s", [10.0, 40.0, 51.9, math.nan])
def test_a_kept_promise_stays(observed_s: float) -> None:
    """Within 30% of the promise, or nothing observed yet: no rollback."""
    assert roll_back(0.01, 0.7, predicted_p95_s=40.0, observed_p95_s=observed_s) is None
