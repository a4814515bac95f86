"""`ratio`: the authors' released variant."""

import pytest

from shared.scheduling.policies import make_policy
from shared.scheduling.policies.ratio import ratio_score, work_weight
from shared.scheduling.policy import Cost, InstanceView, Policy
from tests.support.scheduling import make_call, make_spec, make_view

CANDIDATE_S = {"A100": 18.2363, "A6000": 34.2747}


def _view(instance_id: str, gpu: str) -> InstanceView:
    spec = make_spec(instance_id)
    return make_view(spec=type(spec)(instance_id=instance_id, gpu=gpu, latency=spec.latency))


def _bind(policy: Policy, views: list[InstanceView], number: int = 0) -> str:
    costs = {v.spec.instance_id: Cost(t_comp_s=CANDIDATE_S[v.spec.gpu]) for v in views}
    choice = policy.choose(make_call(f"r{number}"), views, costs, 0.0)
    assert choice is not None
    return choice.instance_id


def test_score_of_a_worked_example() -> None:
    """Released formula with the release's candidate times, α 0.2, work 100 s and 60 s.

    A6000: 0.2 · 18.2363 / 34.2747 - 0.8 · (60 · 0.5) / 100 = 0.1064 - 0.24.
    """
    weighted_s = 60.0 * work_weight("A6000")
    score = ratio_score(0.2, CANDIDATE_S["A6000"], CANDIDATE_S["A100"], weighted_s, 100.0)
    assert score == pytest.approx(0.2 * 0.532063 - 0.24, abs=1e-6)
    assert ratio_score(0.2, 18.0, 18.0, 100.0, 100.0) == pytest.approx(-0.6)


@pytest.mark.parametrize(("gpu", "weight"), [("A100", 1.0), ("L40S", 0.5), ("A6000", 0.5)])
def test_work_of_slow_hardware_counts_half(gpu: str, weight: float) -> None:
    """The release names two kinds of hardware."""
    assert work_weight(gpu) == weight


def test_the_first_call_goes_to_the_reference_instance() -> None:
    """While the first instance of the pool has no work, it gets the call."""
    policy = make_policy("ratio", 0.9)
    assert _bind(policy, [_view("a", "A6000"), _view("b", "A100")]) == "a"


def test_equal_instances_share_by_cumulative_work() -> None:
    """α 0.1 on two equal instances: in turn, the first of equals first."""
    policy = make_policy("ratio", 0.1)
    views = [_view("a", "A100"), _view("b", "A100")]
    assert [_bind(policy, views, number) for number in range(4)] == ["a", "b", "a", "b"]


def test_work_is_never_decremented() -> None:
    """An instance that is idle again still carries all it was ever given."""
    policy = make_policy("ratio", 0.1)
    alone = [_view("a", "A100")]
    for number in range(5):
        assert _bind(policy, alone, number) == "a"
    both = [_view("a", "A100"), _view("b", "A100")]  # both idle
    assert [_bind(policy, both, 9 + number) for number in range(5)] == ["b"] * 5


def test_the_queue_term_reported_is_the_cumulative_work() -> None:
    """Three calls of 18.2363 s leave 0, 18.2, 36.5 and then 54.7 s."""
    policy = make_policy("ratio", 0.1)
    views = [_view("a", "A100")]
    costs = {"a": Cost(t_comp_s=CANDIDATE_S["A100"])}
    terms = []
    for _ in range(4):
        choice = policy.choose(make_call(), views, costs, 0.0)
        assert choice is not None
        terms.append(choice.t_queue_s)
    assert terms == pytest.approx([number * CANDIDATE_S["A100"] for number in range(4)])


def test_alpha_one_sends_every_call_to_the_fastest() -> None:
    """Without the work term the cost ratio decides alone, after the reference's first call."""
    policy = make_policy("ratio", 1.0)
    views = [_view("a", "A6000"), _view("b", "A100")]
    assert [_bind(policy, views, number) for number in range(4)] == ["a", "b", "b", "b"]


def test_a_new_alpha_counts_at_once() -> None:
    """After set_alpha(0) cumulative work decides: b has 3 · 18.2 s against a's 34.3 s · 0.5."""
    policy = make_policy("ratio", 1.0)
    views = [_view("a", "A6000"), _view("b", "A100")]
    for number in range(4):
        _bind(policy, views, number)
    policy.set_alpha(0.0)
    assert _bind(policy, views, 5) == "a"


def test_queues_are_ordered_by_urgency() -> None:
    """The queue score is the latest start."""
    assert make_policy("ratio", 0.1).queue_score(make_call(), 7.0) == 23.0
