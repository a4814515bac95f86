"""`edf` and `llf`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.policies import make_policy
from shared.scheduling.policies.llf import laxity_s
from shared.scheduling.policy import Cost
from tests.support.scheduling import make_call, make_view

# Two jobs at time 0: A needs 1 s by 10 s, B needs 8 s by 12 s.
JOBS = {"A": (10.0, 1.0), "B": (12.0, 8.0)}


def _order(name: str) -> list[str]:
    policy = make_policy(name, 0.0)
    scores = {
        job: policy.queue_score(make_call(job, deadline_s=deadline_s), t_comp_s)
        for job, (deadline_s, t_comp_s) in JOBS.items()
    }
    return sorted(scores, key=scores.__getitem__)


def test_edf_takes_the_earlier_deadline() -> None:
    """10 s is before 12 s, however long the jobs are."""
    assert _order("edf") == ["A", "B"]
    late_but_due = make_call(ready_at_s=50.0, deadline_s=55.0)
    assert make_policy("edf", 0.0).queue_score(late_but_due, 1.0) == 55.0


def test_llf_takes_the_smaller_laxity() -> None:
    """Laxities are 10 - 1 = 9 s and 12 - 8 = 4 s: B cannot wait as long as A."""
    assert laxity_s(10.0, 0.0, 1.0) == 9.0
    assert laxity_s(12.0, 0.0, 8.0) == 4.0
    assert _order("llf") == ["B", "A"]


@given(
    now_s=st.floats(0.0, 1e5),
    deadlines_s=st.lists(st.integers(0, 10_000), min_size=2, max_size=2),
    costs_s=st.lists(st.integers(1, 1_000), min_size=2, max_size=2),
)
def test_the_order_by_laxity_never_changes_while_calls_wait(
    now_s: float, deadlines_s: list[int], costs_s: list[int]
) -> None:
    """All waiting calls lose laxity alike, so the constant scores order them at any instant."""
    now_s = float(int(now_s))
    policy = make_policy("llf", 0.0)
    pairs = list(zip(deadlines_s, costs_s, strict=True))
    one, other = (policy.queue_score(make_call(deadline_s=d), c) for d, c in pairs)
    lax_one, lax_other = (laxity_s(d, now_s, c) for d, c in pairs)
    assert (one < other) == (lax_one < lax_other)


@pytest.mark.parametrize("name", ["edf", "llf"])
def test_stage_budgets_play_no_part(name: str) -> None:
    """Only the query's deadline counts, not how it was split."""
    policy = make_policy(name, 0.0)
    scores = {policy.queue_score(make_call(t_slo_s=t), 3.0) for t in (1.0, 20.0, -5.0)}
    assert len(scores) == 1


@pytest.mark.parametrize("name", ["edf", "llf"])
def test_dispatch_goes_by_the_number_of_calls(name: str) -> None:
    """The instance with the fewest calls in progress gets the call."""
    views = [make_view("a", num_running=2), make_view("b", num_running=1, backlog_s=500.0)]
    costs = {"a": Cost(t_comp_s=1.0), "b": Cost(t_comp_s=9.0)}
    choice = make_policy(name, 0.0).choose(make_call(), views, costs, 0.0)
    assert choice is not None
    assert choice.instance_id == "b"
