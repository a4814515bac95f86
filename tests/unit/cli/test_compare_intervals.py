"""Means and confidence intervals over seeds."""

import math

import numpy as np
import pytest

from services.cli.lab.intervals import interval, ratio_interval


def test_the_interval_is_students():
    """For 1, 2, 3: mean 2, standard error 1/√3, t with two degrees of freedom 4.303."""
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == pytest.approx(2.0)
    assert found.half == pytest.approx(4.303 / math.sqrt(3.0))
    assert (found.low, found.high) == (found.mean - found.half, found.mean + found.half)


def test_ninety_five_of_a_hundred_intervals_hold_the_truth():
    """Over many samples of five the true mean lies inside 95% of the time."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2_000):
        found = interval([float(value) for value in rng.normal(7.0, 2.0, 5)])
        hits += found.low <= 7.0 <= found.high
    assert hits / 2_000 == pytest.approx(0.95, abs=0.015)


def test_one_value_has_no_interval_and_none_has_no_mean():
    """Values without a number are left out."""
    assert math.isnan(interval([3.0, math.nan, math.inf]).half)
    assert interval([3.0, math.nan]).mean == 3.0
    assert math.isnan(interval([]).mean)
    assert interval([2.0]).low == interval([2.0]).high == 2.0


def test_ratios_are_paired():
    """Seeds that differ tenfold but agree on the ratio give a ratio without an interval."""
    found = ratio_interval([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert found.mean == pytest.approx(2.0)
    assert found.half == pytest.approx(0.0, abs=1e-9)


def test_the_ratio_turned_round_is_its_inverse():
    """Geometric means do not favour either side."""
    up, down = [3.0, 5.0, 2.0], [2.0, 7.0, 1.0]
    assert ratio_interval(up, down).mean == pytest.approx(1.0 / ratio_interval(down, up).mean)


def test_pairs_without_a_rate_are_left_out():
    """A policy that sustains no rate has no ratio."""
    assert ratio_interval([1.0], [0.0]).num == 0
