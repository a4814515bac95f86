"""The order in which calls wait."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.urgency import latest_start_s, urgency_s

seconds = st.floats(0.0, 1e5)
budgets = st.floats(-1e5, 1e5)
calls = st.tuples(seconds, budgets, seconds)


def test_urgency_of_a_worked_example() -> None:
    """5 s of work, 20 s of budget of which 12 s are gone: 3 s of room, so U is -3."""
    assert urgency_s(5.0, 20.0, 12.0) == -3.0


def test_latest_start_of_a_worked_example() -> None:
    """Ready at 100 with 20 s for 5 s of work: it must start by 115."""
    assert latest_start_s(100.0, 20.0, 5.0) == 115.0


@given(t_comp_s=seconds, t_slo_s=budgets, waited_s=seconds, more_s=st.floats(1e-3, 1e5))
def test_urgency_grows_with_waiting(
    t_comp_s: float, t_slo_s: float, waited_s: float, more_s: float
) -> None:
    """A call that waited longer is more urgent, by exactly the time waited."""
    before, after = (
        urgency_s(t_comp_s, t_slo_s, waited_s),
        urgency_s(t_comp_s, t_slo_s, waited_s + more_s),
    )
    assert after - before == pytest.approx(more_s, rel=1e-6, abs=1e-6)


@given(t_comp_s=seconds, t_slo_s=budgets, waited_s=seconds, more_s=st.floats(1e-3, 1e5))
def test_urgency_is_monotone_in_work_and_budget(
    t_comp_s: float, t_slo_s: float, waited_s: float, more_s: float
) -> None:
    """More work makes a call more urgent, more budget makes it less so."""
    urgency = urgency_s(t_comp_s, t_slo_s, waited_s)
    assert urgency_s(t_comp_s + more_s, t_slo_s, waited_s) > urgency
    assert urgency_s(t_comp_s, t_slo_s + more_s, waited_s) < urgency


@given(call=calls, age_s=seconds)
def test_latest_start_is_now_minus_urgency(call: tuple[float, float, float], age_s: float) -> None:
    """The constant score and the growing urgency say the same at any instant."""
    ready_at_s, t_slo_s, t_comp_s = call
    now_s = ready_at_s + age_s
    assert latest_start_s(ready_at_s, t_slo_s, t_comp_s) == pytest.approx(
        now_s - urgency_s(t_comp_s, t_slo_s, age_s), rel=1e-9, abs=1e-6
    )


@given(waiting=st.lists(calls, min_size=2, max_size=20), ages=st.tuples(seconds, seconds))
def test_ageing_never_changes_the_order(
    waiting: list[tuple[float, float, float]], ages: tuple[float, float]
) -> None:
    """Order by urgency at one instant, at a later one, and by latest start agree."""
    first_s = max(ready_at_s for ready_at_s, _, _ in waiting) + ages[0]

    def urgency_at(now_s: float, call: tuple[float, float, float]) -> float:
        return urgency_s(call[2], call[1], now_s - call[0])

    for one in waiting:
        for other in waiting:
            gap_s = latest_start_s(*one) - latest_start_s(*other)
            if gap_s < -1e-3:
                for now_s in (first_s, first_s + ages[1]):
                    assert urgency_at(now_s, one) > urgency_at(now_s, other)


@given(call=calls)
def test_an_expired_budget_still_gives_a_finite_place(call: tuple[float, float, float]) -> None:
    """Negative budgets order late calls instead of breaking the order."""
    assert math.isfinite(latest_start_s(*call))


def test_late_queries_stay_ordered_by_deadline() -> None:
    """Of two late calls with equal work, the one whose deadline passed earlier goes first.

    t_SLO of a late query is its remainder, so the latest start is deadline - t_comp.
    """
    earlier = latest_start_s(100.0, 90.0 - 100.0, 5.0)
    later = latest_start_s(80.0, 95.0 - 80.0, 5.0)
    assert earlier == 85.0
    assert later == 90.0
