"""The benchmark measures what it says."""

import itertools

import pytest

from shared.simulation.benchmark import measure_simulator, paper_scenario


def test_figures_come_from_the_clock() -> None:
    """With a clock that ticks once per look, a run takes one second."""
    ticks = itertools.count()
    figures = measure_simulator(lambda: float(next(ticks)), num_queries=50)
    assert figures.calls_per_s == figures.num_calls == figures.event_loop_calls_per_s
    assert figures.sweep_s == figures.ready_s == 1.0
    assert figures.sweep_alphas == 12
    assert figures.sweep_queries == 600
    assert figures.num_calls > 50 * 10
    assert figures.instants_per_call == pytest.approx(2, abs=1)


def test_long_runs_repeat_a_window() -> None:
    """The same seed gives the same queries; a repeated query shares its stages."""
    scenario = paper_scenario(601, 3)
    assert scenario == paper_scenario(601, 3)
    assert scenario.queries[0].stages is scenario.queries[600].stages
