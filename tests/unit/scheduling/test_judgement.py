"""From a sweep to a decision: what is believed, what is eligible, what is promised."""

import math

import numpy as np
import pytest

from shared.scheduling.judgement import Observed, Replayed, judge, judged, p95_interval_s
from shared.scheduling.tuning import TuningRules

RULES = TuningRules(min_queries=50)
EVEN = {"a": 0.5, "b": 0.5}


def run(alpha: float, factor: float, shares: dict[str, float] | None = None) -> Replayed:
    """Return a prediction: the same exponential times, multiplied."""
    times = factor * np.random.default_rng(7).exponential(20.0, 400)
    return Replayed(
        alpha=alpha,
        latencies_s=tuple(times.tolist()),
        p95_s=float(np.percentile(times[40:], 95)),
        shares=shares or EVEN,
    )


def seen(p95_s: float, shares: dict[str, float] | None = None, count: int = 400) -> Observed:
    """Return a measurement."""
    return Observed(p95_s=p95_s, num_queries=count, shares=shares or EVEN)


def verdict(runs: list[Replayed], observed: Observed | None):
    """Return the judgement when the first α is in force."""
    return judge(runs, current=runs[0].alpha, previous=None, observed=observed, rules=RULES)


def test_a_clear_gain_on_a_faithful_simulator_is_taken():
    """Half the P95 and a simulator that is right about the present: move."""
    now, better = run(0.7, 1.0), run(0.01, 0.5)
    found = verdict([now, better], seen(now.p95_s * 1.04))
    assert found.decision.alpha == 0.01
    assert found.calibration_error == pytest.approx(1 - 1 / 1.04)
    low_s, high_s = found.interval_s
    assert low_s < better.p95_s < high_s


def test_a_simulator_that_is_off_is_not_believed():
    """It says 60 s where 100 s were measured."""
    now, better = run(0.7, 1.0), run(0.01, 0.5)
    assert not verdict([now, better], seen(now.p95_s * 1.5)).decision.is_change


def test_the_calibration_may_rest_on_a_run_of_its_own():
    """Expectations were others in the window: how those do is what was measured."""
    now, better, before = run(0.7, 1.0), run(0.01, 0.5), run(0.7, 1.5)
    found = judge(
        [now, better],
        current=0.7,
        previous=None,
        observed=seen(now.p95_s * 1.5),
        rules=RULES,
        as_it_was=before,
    )
    assert found.decision.alpha == 0.01


def test_an_instance_is_not_given_over_twice_what_it_was_seen_to_do():
    """From 30% to 90% of the work: nobody knows how it would do."""
    now = run(0.7, 1.0, {"a": 0.7, "b": 0.3})
    better = run(0.01, 0.5, {"a": 0.1, "b": 0.9})
    found = verdict([now, better], seen(now.p95_s, {"a": 0.7, "b": 0.3}))
    assert found.ineligible == (0.01,)
    assert found.decision.alpha == 0.7


def test_an_idle_instance_may_always_be_given_a_fair_share():
    """All work on one instance, and now there is more: the other may get half."""
    now, better = run(1.0, 1.0, {"a": 1.0, "b": 0.0}), run(0.01, 0.5)
    found = verdict([now, better], seen(now.p95_s, {"a": 1.0}))
    assert found.decision.alpha == 0.01


def test_the_warm_up_is_simulated_but_not_judged():
    """The replay starts empty and the window did not: its first tenth does not count."""
    assert judged([1.0, *[5.0] * 9, 7.0, math.nan]) == [*[5.0] * 9, 7.0]


def test_offline_without_measurements_the_sweep_decides():
    """A trace has no measured times: no calibration, nothing is extrapolation."""
    now, better = run(0.7, 1.0, {"a": 1.0, "b": 0.0}), run(0.01, 0.5, {"a": 0.0, "b": 1.0})
    found = verdict([now, better], None)
    assert found.decision.alpha == 0.01
    assert found.calibration_error is None


def test_the_same_window_gives_the_same_judgement():
    """The bootstrap has a fixed seed."""
    runs = [run(0.7, 1.0), run(0.01, 0.9)]
    assert verdict(runs, seen(60.0)) == verdict(runs, seen(60.0))


def test_nothing_finished_has_no_interval():
    """No query, no P95."""
    assert all(math.isnan(end) for end in p95_interval_s([math.nan] * 20))
