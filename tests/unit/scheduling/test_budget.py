"""The split of a query's SLO over its stages."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.budget import stage_budget_s

seconds = st.floats(0.0, 1e6)
positive = st.floats(1e-3, 1e6)


def test_a_stage_gets_its_share_of_what_is_left() -> None:
    """With 90 of 100 s left, a 10 s stage before 20 s of work gets a third: 30 s."""
    assert stage_budget_s(100.0, 10.0, 10.0, 20.0) == pytest.approx(30.0)


def test_the_last_stage_gets_everything_left() -> None:
    """Nothing follows, so nothing is kept back."""
    assert stage_budget_s(100.0, 40.0, 7.0, 0.0) == 60.0


@pytest.mark.parametrize(("elapsed_s", "expected_s"), [(100.0, 0.0), (130.0, -30.0)])
def test_an_expired_budget_is_not_shared(elapsed_s: float, expected_s: float) -> None:
    """A late query's stage gets the whole negative remainder, whatever its share would be."""
    assert stage_budget_s(100.0, elapsed_s, 1.0, 99.0) == expected_s


def test_no_expected_time_at_all_leaves_everything() -> None:
    """Zero expected times divide by nothing; the stage may use what is left."""
    assert stage_budget_s(100.0, 25.0, 0.0, 0.0) == 75.0


@given(
    slo_s=positive,
    spent=st.floats(0.0, 0.999),
    stages_s=st.lists(st.floats(1e-2, 1e4), min_size=1, max_size=12),
)
def test_budgets_of_a_chain_add_up_to_what_remains(
    slo_s: float, spent: float, stages_s: list[float]
) -> None:
    """If every stage uses exactly its budget, the chain ends exactly at the deadline."""
    start_s = elapsed_s = slo_s * spent
    total_s = 0.0
    for index, stage_s in enumerate(stages_s):
        budget_s = stage_budget_s(slo_s, elapsed_s, stage_s, sum(stages_s[index + 1 :]))
        assert budget_s >= 0.0
        total_s += budget_s
        elapsed_s += budget_s
    assert total_s == pytest.approx(slo_s - start_s, rel=1e-9, abs=1e-9)


@given(slo_s=positive, elapsed_s=seconds, stage_s=seconds, later_s=seconds, more_s=positive)
def test_budget_is_monotone_and_finite(
    slo_s: float, elapsed_s: float, stage_s: float, later_s: float, more_s: float
) -> None:
    """More SLO never shrinks a budget; more elapsed time or work to come never grows it."""
    budget_s = stage_budget_s(slo_s, elapsed_s, stage_s, later_s)
    slack = 1e-9 * max(1.0, abs(budget_s))
    assert math.isfinite(budget_s)
    assert budget_s <= max(0.0, slo_s - elapsed_s) + slack
    assert stage_budget_s(slo_s + more_s, elapsed_s, stage_s, later_s) >= budget_s - slack
    assert stage_budget_s(slo_s, elapsed_s + more_s, stage_s, later_s) <= budget_s + slack
    if stage_s + later_s > 0.0:
        assert stage_budget_s(slo_s, elapsed_s, stage_s, later_s + more_s) <= budget_s + slack
