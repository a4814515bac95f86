"""What is measured of a run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.lab.bench import Workbench
from services.cli.lab.setting import Variant
from services.cli.lab.steady import Window, bounds_s, clipped_union_s, measure
from shared.errors import ConfigError
from tests.support.lab import cell, setup

ALL = Window(warm_up=0.0, cool_down=0.0)
RESULT, SCENARIO, ALONE_S = Workbench(setup(num_queries=40)).simulate(
    cell(0.3), 0, Variant(policy="least-outstanding")
)


def test_a_window_of_everything_agrees_with_the_runs_own_summary():
    """Percentiles, attainment and goodput are the simulator's."""
    found, summary = measure(RESULT, ALONE_S, ALL), RESULT.summary()
    assert found.num_queries == 40
    assert found.p95_s == pytest.approx(summary.p95_s)
    assert found.attainment == summary.attainment
    assert found.goodput_qps == pytest.approx(summary.goodput_qps)
    assert [one.utilisation for one in found.instances.values()] == pytest.approx(
        list(RESULT.utilisation)
    )


def test_warm_up_and_cool_down_are_not_measured():
    """Of 40 queries the first 8 and the last 4 are left out."""
    window = Window(warm_up=0.2, cool_down=0.1)
    found = measure(RESULT, ALONE_S, window)
    inside = slice(8, 36)
    latencies = RESULT.latency_s[inside]
    assert found.num_queries == 28
    assert bounds_s(RESULT, window) == (RESULT.arrival_s[8], RESULT.arrival_s[35])
    assert found.p50_s == pytest.approx(np.percentile(latencies, 50))


def test_goodput_counts_what_ends_in_time_inside_the_window():
    """Whenever it arrived: a backlog that builds up is not counted before it is served."""
    low_s, high_s = bounds_s(RESULT, Window(warm_up=0.2, cool_down=0.1))
    found = measure(RESULT, ALONE_S, Window(warm_up=0.2, cool_down=0.1))
    ended = (RESULT.end_s >= low_s) & (RESULT.end_s <= high_s) & RESULT.is_within_slo
    assert found.goodput_qps == pytest.approx(ended.sum() / (high_s - low_s))
    assert ended.sum() not in (0, 28)


def test_the_scale_reported_is_the_smallest_that_enough_queries_meet():
    """At `scale95` at least 95% are on time, just below it fewer are."""
    found = measure(RESULT, ALONE_S, ALL)
    stretch = RESULT.latency_s / ALONE_S
    assert (stretch <= found.scale95).mean() >= 0.95
    assert (stretch < found.scale95).mean() < 0.95
    assert found.scale99 >= found.scale95


def test_unanswered_queries_meet_no_scale():
    """They count as missed, never as fast."""
    result, _, alone_s = Workbench(setup(num_queries=40)).simulate(
        cell(0.3), 0, Variant(policy="vllm")
    )
    result.is_completed[:5] = False
    found = measure(result, alone_s, ALL)
    assert found.completed == 35 / 40
    assert found.scale95 == float("inf")
    assert found.attainment <= 35 / 40


def test_batch_is_the_time_average_of_running_calls():
    """Its integral over the run is the calls' own time in the engine."""
    found = measure(RESULT, ALONE_S, ALL)
    span_s = float(RESULT.end_s.max() - RESULT.arrival_s.min())
    inside_s = float((RESULT.call_end_s - RESULT.started_s).sum())
    assert sum(one.batch for one in found.instances.values()) * span_s == pytest.approx(inside_s)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=8),
    st.integers(0, 40),
    st.integers(0, 30),
)
def test_clipped_unions_count_every_covered_second_once(
    spans: list[tuple[int, int]], low: int, width: int
):
    """Agrees with counting whole seconds."""
    starts = np.array([float(start) for start, _ in spans])
    ends = np.array([float(start + length) for start, length in spans])
    covered = {second for start, length in spans for second in range(start, start + length)} & set(
        range(low, low + width)
    )
    assert clipped_union_s(starts, ends, float(low), float(low + width)) == len(covered)


@pytest.mark.parametrize(("warm_up", "cool_down"), [(0.6, 0.4), (1.0, 0.0), (-0.1, 0.0)])
def test_a_window_that_leaves_nothing_is_refused(warm_up: float, cool_down: float):
    """At least a tenth of the run must be measured."""
    with pytest.raises(ConfigError, match="warm-up"):
        Window(warm_up=warm_up, cool_down=cool_down).check()
