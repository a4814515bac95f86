"""Change points and censored percentiles: what the window may rest on."""

import math

import numpy as np
import pytest

from shared.scheduling.attainment import percentile
from shared.scheduling.censoring import censored_percentile
from shared.scheduling.changepoints import latest_change


def test_a_doubled_rate_is_found_near_where_it_happened():
    """Exponential gaps whose mean halves after 300 samples: the cut lies within 25 of it."""
    rng = np.random.default_rng(1)
    gaps = [*rng.exponential(4.0, 300), *rng.exponential(2.0, 300)]
    cut = latest_change(gaps)
    assert cut is not None
    assert abs(cut - 300) <= 25


def test_the_latest_of_several_changes_is_returned():
    """Two steps: what lies before the second is out of date too."""
    rng = np.random.default_rng(2)
    series = [*rng.normal(10, 1, 150), *rng.normal(20, 1, 150), *rng.normal(40, 1, 150)]
    cut = latest_change(series)
    assert cut is not None
    assert abs(cut - 300) <= 2


def test_stationary_series_show_no_change():
    """200 series of heavy-tailed samples without a change: at most one false alarm."""
    rng = np.random.default_rng(3)
    alarms = sum(latest_change(rng.lognormal(1.0, 1.0, 600)) is not None for _ in range(200))
    assert alarms <= 1


def test_outliers_are_no_change():
    """A few samples a thousand times too large move no rank sum."""
    rng = np.random.default_rng(4)
    series = rng.exponential(1.0, 400)
    series[300:304] *= 1_000.0
    assert latest_change(series) is None


def test_a_small_change_is_not_worth_losing_a_window():
    """A step of ten percent is significant in ranks and still no reason to cut."""
    rng = np.random.default_rng(5)
    series = [*rng.normal(10, 0.1, 300), *rng.normal(11, 0.1, 300)]
    assert latest_change(series) is None


def test_short_series_have_no_change():
    """Below two sides' worth of samples nothing is said."""
    assert latest_change([1.0] * 19 + [9.0] * 20) is None


def test_without_censoring_the_percentile_is_the_empirical_one():
    """Ranks of what ended: the smallest value with 95% at or below it."""
    values = [float(value) for value in range(1, 101)]
    assert censored_percentile(values, [], 95) == pytest.approx(percentile(values, 95), abs=1.0)


def test_running_queries_raise_the_percentile():
    """Ten that have run for 90 s already may yet be the slowest."""
    ended = [float(value) for value in range(1, 91)]
    assert censored_percentile(ended, [85.0] * 10, 90) > percentile(ended, 90)


def test_a_textbook_example():
    """Kaplan and Meier: deaths at 1, 3, 4, losses at 2 and 5; survival 4/5, then 8/15, 4/15."""
    assert censored_percentile([1.0, 3.0, 4.0], [2.0, 5.0], 46) == 3.0
    assert censored_percentile([1.0, 3.0, 4.0], [2.0, 5.0], 47) == 4.0


def test_nothing_ended_is_nan():
    """There is no percentile of nothing."""
    assert math.isnan(censored_percentile([], [3.0], 95))
