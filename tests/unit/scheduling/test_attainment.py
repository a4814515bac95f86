"""What a run achieved."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.attainment import QueryEnd, percentile, summarize

samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def _end(arrival_s: float, latency_s: float, *, slo_s: float = 10.0, done: bool = True) -> QueryEnd:
    return QueryEnd(arrival_s=arrival_s, end_s=arrival_s + latency_s, slo_s=slo_s, completed=done)


@given(values=samples, percent=st.floats(0.0, 100.0))
def test_percentile_agrees_with_numpy(values: list[float], percent: float) -> None:
    """It is NumPy's default definition, without arrays."""
    expected = float(np.percentile(values, percent))
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(values=samples, data=st.data())
def test_percentile_ignores_order(values: list[float], data: st.DataObject) -> None:
    """Any permutation of the sample has the same percentile."""
    shuffled = data.draw(st.permutations(values))
    assert percentile(values, 95) == percentile(shuffled, 95)


def test_percentile_of_nothing_is_nan() -> None:
    """There is no percentile without a sample."""
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize("percent", [-1.0, 100.5, math.nan])
def test_percent_outside_its_range_is_refused(percent: float) -> None:
    """Percentiles lie in 0..100."""
    with pytest.raises(ValueError, match="outside"):
        percentile([1.0], percent)


def test_attainment_counts_what_was_injected() -> None:
    """Two of four within the SLO: late, failed and never ended ones all count as missed."""
    ends = [_end(0.0, 5.0), _end(1.0, 10.0), _end(2.0, 11.0), _end(3.0, 1.0, done=False)]
    assert summarize(ends, 4).attainment == 0.5
    assert summarize(ends, 8).attainment == 0.25


def test_goodput_counts_met_queries_over_the_whole_span() -> None:
    """Two met queries between the first arrival at 0 and the last end at 13 s."""
    ends = [_end(0.0, 5.0), _end(1.0, 10.0), _end(2.0, 11.0)]
    assert summarize(ends, 3).goodput_qps == pytest.approx(2 / 13)


def test_percentiles_leave_unanswered_queries_out() -> None:
    """A failed query has no latency."""
    ends = [_end(0.0, 5.0), _end(0.0, 500.0, done=False)]
    assert summarize(ends, 2).p99_s == 5.0


def test_a_run_without_queries_has_a_summary() -> None:
    """Nothing injected is no division by zero."""
    summary = summarize([], 0)
    assert (summary.attainment, summary.goodput_qps) == (0.0, 0.0)
    assert math.isnan(summary.p95_s)
