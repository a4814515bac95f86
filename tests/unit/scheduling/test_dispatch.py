"""Who gets a call."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.dispatch import (
    beta_s2,
    cost_on,
    floored_queue_s,
    flow_score,
    is_eligible,
    plan,
    tie_break,
)
from shared.scheduling.policies import make_policy
from shared.scheduling.prefix import PrefixCacheModel
from tests.support.scheduling import chain, make_call, make_view

times = st.floats(0.05, 1e4)
alphas = st.floats(0.0, 1.0)


def test_score_of_a_worked_example() -> None:
    """α 0.2, β 100 s², t_queue 10 s, t_comp 5 s: 0.8 · 100 / 10 - 0.2 · 5 = 7."""
    assert flow_score(0.2, 100.0, 10.0, 5.0) == pytest.approx(7.0)


def test_beta_gives_both_terms_the_unit_of_seconds() -> None:
    """β is the mean cost squared."""
    assert beta_s2(12.0) == 144.0


@pytest.mark.parametrize(("backlog_s", "expected_s"), [(0.0, 0.05), (0.05, 0.05), (3.0, 3.0)])
def test_an_idle_instance_has_a_floored_queue(backlog_s: float, expected_s: float) -> None:
    """An empty queue counts as 0.05 s, so that the score stays finite."""
    assert floored_queue_s(backlog_s) == expected_s


@given(alpha=alphas, beta=times, t_queue_s=times, t_comp_s=times, more_s=times)
def test_score_falls_with_queue_and_cost(
    alpha: float, beta: float, t_queue_s: float, t_comp_s: float, more_s: float
) -> None:
    """A longer queue or a higher cost never makes an instance more attractive."""
    score = flow_score(alpha, beta, t_queue_s, t_comp_s)
    assert math.isfinite(score)
    assert flow_score(alpha, beta, t_queue_s + more_s, t_comp_s) <= score
    assert flow_score(alpha, beta, t_queue_s, t_comp_s + more_s) <= score


@given(queue_s=times, one_s=times, other_s=times)
def test_the_ends_of_alpha_look_at_one_term_each(
    queue_s: float, one_s: float, other_s: float
) -> None:
    """α = 0 ignores the cost of the call, α = 1 ignores the queue."""
    assert flow_score(0.0, 9.0, queue_s, one_s) == flow_score(0.0, 9.0, queue_s, other_s)
    assert flow_score(1.0, 9.0, queue_s, one_s) == flow_score(1.0, 9.0, queue_s * 2, one_s)


def test_ties_spread_over_instances() -> None:
    """1,000 calls on an idle, equal fleet do not herd: every instance gets about a quarter."""
    views = [make_view(name) for name in "abcd"]
    policy = make_policy("hexgen-flow", 0.1)
    chosen = Counter(
        plan(policy, [make_call(f"r{number}")], views, {}, 0.0).assignments[0].choice.instance_id
        for number in range(1_000)
    )
    assert set(chosen) == set("abcd")
    assert max(chosen.values()) < 320


def test_tie_break_separates_its_two_ids() -> None:
    """The pair (`ab`, `c`) is not the pair (`a`, `bc`)."""
    assert tie_break("ab", "c") != tie_break("a", "bc")


@pytest.mark.parametrize(
    ("call_fields", "view_fields", "eligible"),
    [
        ({"model": "m"}, {"model": "m"}, True),
        ({"model": "m"}, {"model": "n"}, False),
        ({"model": "lora"}, {"model": "m", "adapters": ("lora",)}, True),
        ({"features": ("tools",)}, {}, False),
        ({"features": ("tools",)}, {"features": ("tools", "structured_output")}, True),
        ({"context_tokens": 1_000}, {"max_context_tokens": 1_000}, True),
        ({"context_tokens": 1_001}, {"max_context_tokens": 1_000}, False),
        ({"context_tokens": 1_001}, {"kv_tokens": 1_000}, False),
    ],
)
def test_eligibility_needs_model_features_and_room(
    call_fields: dict[str, object], view_fields: dict[str, object], eligible: bool
) -> None:
    """An instance offers the model or adapter, every feature, and room for the context."""
    assert is_eligible(make_call(**call_fields), make_view(**view_fields)) is eligible


def test_a_call_without_eligible_instance_is_rejected_with_the_reason() -> None:
    """It is neither assigned nor left waiting."""
    call = make_call(model="absent")
    result = plan(make_policy("hexgen-flow", 0.1), [call], [make_view()], {}, 0.0)
    assert result.rejections == [(call, "no_eligible_instance")]
    assert not result.assignments
    assert not result.unassigned


@pytest.mark.parametrize("policy", ["hexgen-flow", "vllm", "least-outstanding"])
def test_a_retry_avoids_the_instance_that_failed_it(policy: str) -> None:
    """An instance that fails at once is idle, and yet does not get its failures back."""
    views = [make_view("a"), make_view("b", backlog_s=500.0, num_running=9)]
    calls = [make_call(f"r{number}", avoid=("a",)) for number in range(4)]
    result = plan(make_policy(policy, 0.1), calls, views, {}, 0.0)
    assert {one.choice.instance_id for one in result.assignments} == {"b"}


def test_a_retry_goes_back_where_there_is_no_other_instance() -> None:
    """A fleet of one tries again there."""
    result = plan(
        make_policy("hexgen-flow", 0.1), [make_call(avoid=("a",))], [make_view("a")], {}, 0.0
    )
    assert [one.choice.instance_id for one in result.assignments] == ["a"]


@pytest.mark.parametrize(
    ("expected", "idle_room", "busy_room", "chosen"),
    [
        (2_183, 2_048, 4_096, "busy"),  # it alone holds what is predicted
        (2_183, 1_024, 2_048, "busy"),  # neither does: the larger one
        (900, 1_024, 2_048, "idle"),  # both do
        (0, 1_024, 2_048, "idle"),  # the count is the producer's own
    ],
)
def test_a_prompt_of_unknown_length_goes_where_it_likely_fits(
    expected: int, idle_room: int, busy_room: int, chosen: str
) -> None:
    """An engine's refusal is final, so a small idle instance gets no call that seems too long."""
    views = [
        make_view("idle", max_context_tokens=idle_room),
        make_view("busy", max_context_tokens=busy_room, num_running=9, backlog_s=500.0),
    ]
    call = make_call(context_tokens=545, expected_context_tokens=expected)
    result = plan(make_policy("least-outstanding", 0.1), [call], views, {}, 0.0)
    assert [one.choice.instance_id for one in result.assignments] == [chosen]


def test_no_instance_at_all_rejects() -> None:
    """An empty fleet is no crash."""
    result = plan(make_policy("vllm", 0.0), [make_call()], [], {}, 0.0)
    assert len(result.rejections) == 1


def test_an_assignment_counts_before_the_next_call() -> None:
    """Twelve equal calls planned at once on four equal idle instances: three for each."""
    calls = [make_call(f"r{number}") for number in range(12)]
    views = [make_view(name) for name in "abcd"]
    result = plan(make_policy("hexgen-flow", 0.1), calls, views, {}, 0.0)
    shares = Counter(one.choice.instance_id for one in result.assignments)
    assert shares == dict.fromkeys("abcd", 3)


def test_an_assignment_warms_its_instance_for_the_next_call() -> None:
    """The second call's cost counts the first one's template as cached."""
    call = make_call(prefix=chain(("t", 640)))
    prefixes = {"a": PrefixCacheModel(10_000)}
    result = plan(make_policy("vllm", 0.0), [call, call], [make_view("a")], prefixes, 0.0)
    cached = [one.cost.cached_tokens for one in result.assignments]
    assert cached == [0, 640]
    assert result.assignments[1].cost.t_comp_s < result.assignments[0].cost.t_comp_s


def test_cost_counts_the_learned_speed() -> None:
    """An instance found twice as slow costs twice as much."""
    call = make_call()
    plain = cost_on(call, make_view(), None)
    slow = cost_on(call, make_view(speed_factor=2.0), None)
    assert slow.t_comp_s == pytest.approx(2.0 * plain.t_comp_s)


@given(
    backlogs=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=6),
    decodes=st.lists(st.floats(0.01, 0.2), min_size=6, max_size=6),
    alpha=alphas,
    data=st.data(),
)
def test_plan_does_not_depend_on_the_order_of_instances(
    backlogs: list[float], decodes: list[float], alpha: float, data: st.DataObject
) -> None:
    """Any permutation of the fleet gives the same assignments."""
    views = [
        make_view(f"i{number}", backlog_s=backlog_s, decode_s=decodes[number])
        for number, backlog_s in enumerate(backlogs)
    ]
    calls = [make_call(f"r{number}") for number in range(4)]
    shuffled = data.draw(st.permutations(views))
    policy = make_policy("hexgen-flow", alpha)
    assert plan(policy, calls, views, {}, 0.0) == plan(policy, calls, shuffled, {}, 0.0)


@given(
    models=st.lists(st.sampled_from("mn"), min_size=0, max_size=4),
    wanted=st.lists(st.sampled_from("mno"), max_size=6),
)
def test_plan_conserves_calls(models: list[str], wanted: list[str]) -> None:
    """Every call is assigned, rejected or unassigned, exactly once."""
    views = [make_view(f"i{number}", model=model) for number, model in enumerate(models)]
    calls = [make_call(f"r{number}", model=model) for number, model in enumerate(wanted)]
    result = plan(make_policy("hexgen-flow", 0.1), calls, views, {}, 0.0)
    ids = [one.call.request_id for one in result.assignments]
    ids += [call.request_id for call, _ in result.rejections]
    ids += [call.request_id for call in result.unassigned]
    assert sorted(ids) == sorted(call.request_id for call in calls)


def test_an_assignment_names_what_else_looked_quick() -> None:
    """The instances not chosen are told with their backlog and the call's cost there, at most 4."""
    views = [make_view(f"i{number}", backlog_s=float(number)) for number in range(7)]
    result = plan(make_policy("hexgen-flow", 0.1), [make_call("r")], views, {}, 0.0)
    (assignment,) = result.assignments
    assert assignment.choice.instance_id == "i0"
    assert list(assignment.others) == ["i1", "i2", "i3", "i4"]
    assert assignment.others["i3"] == (3.0, assignment.cost.t_comp_s)
