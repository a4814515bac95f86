"""The fast simulator and the slow, obviously correct one agree on random small scenarios."""

import pytest
from hypothesis import HealthCheck, given, settings

from shared.simulation.scenario import Scenario
from tests.support.simulation import (
    assert_same_run,
    run_compiled,
    run_fast,
    run_reference,
    scenarios,
)

UNHURRIED = (HealthCheck.too_slow, HealthCheck.data_too_large)


@given(scenarios())
@settings(max_examples=300, deadline=None, suppress_health_check=UNHURRIED)
def test_same_decisions_at_the_same_times(scenario: Scenario) -> None:
    """Same instance, same order, same times within a nanosecond, for every call."""
    assert_same_run(run_fast(scenario), run_reference(scenario))


@given(scenarios())
@settings(max_examples=100, deadline=None, suppress_health_check=UNHURRIED)
def test_compiled_code_agrees_too(scenario: Scenario) -> None:
    """Machine code divides, rounds and compares as the interpreter does."""
    assert_same_run(run_compiled(scenario), run_reference(scenario))


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@given(scenarios())
@settings(max_examples=10_000, deadline=None, suppress_health_check=UNHURRIED)
def test_ten_thousand_scenarios(scenario: Scenario) -> None:
    """The same over 10,000 scenarios, interpreted and compiled."""
    reference = run_reference(scenario)
    assert_same_run(run_fast(scenario), reference)
    assert_same_run(run_compiled(scenario), reference)
