"""Policies: worked examples, and what holds for every policy in the registry."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.scheduling.dispatch import plan
from shared.scheduling.policies import DEFAULT_POLICY, REGISTRY, make_policy
from shared.scheduling.policy import Cost
from tests.support.scheduling import make_call, make_view


def _choose(name: str, alpha: float, backlogs: dict[str, float], t_comps: dict[str, float]) -> str:
    views = [make_view(key, backlog_s=backlogs[key]) for key in sorted(backlogs)]
    costs = {key: Cost(t_comp_s=t_comps[key]) for key in backlogs}
    choice = make_policy(name, alpha).choose(make_call(), views, costs, 0.0)
    assert choice is not None
    return choice.instance_id


def test_flow_prefers_the_short_queue_at_small_alpha() -> None:
    """α 0: β cancels, the shortest queue wins although the instance is slow."""
    assert _choose("hexgen-flow", 0.0, {"a": 10.0, "b": 5.0}, {"a": 1.0, "b": 9.0}) == "b"


def test_flow_prefers_the_fast_instance_at_alpha_one() -> None:
    """α 1: only the cost counts, however long the queue."""
    assert _choose("hexgen-flow", 1.0, {"a": 100.0, "b": 5.0}, {"a": 1.0, "b": 9.0}) == "a"


def test_flow_weighs_queue_against_cost() -> None:
    """Mean cost 6 s gives β 36 s²; at α 0.5: a scores 0.5·36/12 - 2 = -0.5, b 0.5·36/9 - 4 = -2.

    With a's queue at 36 s it scores 0.5 - 2 = -1.5, still ahead; at 72 s 0.25 - 2 = -1.75.
    """
    costs = {"a": 4.0, "b": 8.0}
    assert _choose("hexgen-flow", 0.5, {"a": 12.0, "b": 9.0}, costs) == "a"
    assert _choose("hexgen-flow", 0.5, {"a": 72.0, "b": 9.0}, costs) == "a"
    assert _choose("hexgen-flow", 0.5, {"a": 72.0, "b": 4.0}, costs) == "b"


def test_flow_reports_the_terms_of_its_choice() -> None:
    """The choice names α, β, t_queue and the score that won."""
    views = [make_view("a", backlog_s=10.0)]
    choice = make_policy("hexgen-flow", 0.2).choose(
        make_call(), views, {"a": Cost(t_comp_s=5.0)}, 0.0
    )
    assert choice is not None
    assert (choice.alpha, choice.beta_s2, choice.t_queue_s) == (0.2, 25.0, 10.0)
    assert choice.score == pytest.approx(0.8 * 25.0 / 10.0 - 0.2 * 5.0)


def test_flow_uses_a_new_alpha_at_once() -> None:
    """After set_alpha the same state is decided by the new weight."""
    policy = make_policy("hexgen-flow", 0.0)
    views = [make_view("a", backlog_s=100.0), make_view("b", backlog_s=5.0)]
    costs = {"a": Cost(t_comp_s=1.0), "b": Cost(t_comp_s=9.0)}
    before = policy.choose(make_call(), views, costs, 0.0)
    policy.set_alpha(1.0)
    after = policy.choose(make_call(), views, costs, 0.0)
    assert before is not None
    assert after is not None
    assert (before.instance_id, after.instance_id) == ("b", "a")


@pytest.mark.parametrize("name", ["vllm", "rr+pq"])
def test_round_robin_takes_instances_in_turn(name: str) -> None:
    """Five calls on three instances: a, b, c, a, b."""
    views = [make_view(key) for key in "abc"]
    calls = [make_call(f"r{number}") for number in range(5)]
    result = plan(make_policy(name, 0.0), calls, views, {}, 0.0)
    assert [one.choice.instance_id for one in result.assignments] == list("abcab")


@pytest.mark.parametrize(
    ("name", "score"),
    [("hexgen-flow", 23.0), ("rr+pq", 23.0), ("wb+fcfs", 10.0), ("vllm", 10.0)],
)
def test_queue_score_is_latest_start_or_ready_time(name: str, score: float) -> None:
    """Ready at 10 with 20 s for 7 s of work: by urgency 23, first come first served 10."""
    assert make_policy(name, 0.1).queue_score(make_call(), 7.0) == score


def test_the_default_policy_exists() -> None:
    """The default is in the registry."""
    assert DEFAULT_POLICY in REGISTRY


def test_an_unknown_policy_names_the_known_ones() -> None:
    """The error lists what can be chosen."""
    with pytest.raises(ConfigError, match="hexgen-flow"):
        make_policy("hexgenflow", 0.1)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf])
def test_alpha_outside_its_range_is_refused(alpha: float) -> None:
    """α lies in 0..1."""
    with pytest.raises(ConfigError, match="alpha"):
        make_policy("hexgen-flow", alpha)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_policy_is_registered_under_its_own_name(name: str) -> None:
    """The registry's key is the policy's name."""
    assert make_policy(name, 0.1).name == name


@pytest.mark.parametrize("name", sorted(REGISTRY))
@given(
    backlogs=st.lists(st.floats(0.0, 1e4), min_size=1, max_size=5),
    lengths=st.lists(
        st.tuples(st.integers(1, 30_000), st.floats(0.0, 4_000.0)), min_size=1, max_size=6
    ),
    t_slo_s=st.floats(-1e4, 1e4),
    alpha=st.floats(0.0, 1.0),
    data=st.data(),
)
def test_every_policy_is_finite_and_blind_to_the_order_of_instances(
    name: str,
    backlogs: list[float],
    lengths: list[tuple[int, float]],
    t_slo_s: float,
    alpha: float,
    data: st.DataObject,
) -> None:
    """Idle instances, zero output and expired budgets give finite scores; order never matters."""
    views = [
        make_view(f"i{number}", backlog_s=backlog_s, num_waiting=int(backlog_s > 0))
        for number, backlog_s in enumerate(backlogs)
    ]
    calls = [
        make_call(f"r{number}", input_tokens=prompt, output_tokens=output, t_slo_s=t_slo_s)
        for number, (prompt, output) in enumerate(lengths)
    ]
    shuffled = data.draw(st.permutations(views))
    result = plan(make_policy(name, alpha), calls, views, {}, 100.0)
    assert result == plan(make_policy(name, alpha), calls, shuffled, {}, 100.0)
    for one in result.assignments:
        assert math.isfinite(one.choice.score)
        assert math.isfinite(one.queue_score)
        assert one.choice.instance_id in {view.spec.instance_id for view in views}
