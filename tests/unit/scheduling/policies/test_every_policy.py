"""What holds for every policy in the registry."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.scheduling.policies import REGISTRY, make_policy
from shared.scheduling.policy import Choice, Cost, InstanceView, Policy, WaitingCall
from tests.support.scheduling import make_call, make_view

# Round-robin goes by the order in which instances are offered; `plan` offers them sorted by id.
ORDER_DEPENDENT = frozenset({"vllm", "rr+pq"})

some_examples = settings(max_examples=40)
every_policy = pytest.mark.parametrize("name", sorted(REGISTRY))

Step = tuple[WaitingCall, list[InstanceView], dict[str, Cost], float]


@st.composite
def views(draw: st.DrawFn) -> list[InstanceView]:
    """Draw one to five instances in any state."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        num_waiting = draw(st.integers(0, 40))
        heads = st.none() | st.floats(-1e6, 1e6)
        found.append(
            make_view(
                f"i{number}",
                decode_s=draw(st.floats(0.0, 0.2)),
                backlog_s=draw(st.floats(0.0, 1e5)),
                num_waiting=num_waiting,
                num_running=draw(st.integers(0, 64)),
                capacity=draw(st.integers(1, 64)),
                speed_factor=draw(st.floats(0.1, 10.0)),
                kv_used_tokens=draw(st.integers(0, 100_000)),
                head_score=draw(heads) if num_waiting else None,
            )
        )
    return found


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """Draw calls that become ready one after the other, each with the views of its moment."""
    found: list[Step] = []
    now_s = draw(st.floats(0.0, 1e6))
    for number in range(draw(st.integers(1, 5))):
        now_s += draw(st.floats(0.0, 100.0))
        t_slo_s = draw(st.floats(-1e4, 1e4))
        input_tokens = draw(st.integers(1, 30_000))
        call = make_call(
            f"r{number}",
            tenant=draw(st.sampled_from("uvw")),
            input_tokens=input_tokens,
            output_tokens=draw(st.floats(0.0, 4_000.0)),
            ready_at_s=now_s,
            t_slo_s=t_slo_s,
            deadline_s=now_s + t_slo_s,
        )
        offered = draw(views())
        costs = {
            view.spec.instance_id: Cost(
                t_comp_s=draw(st.floats(1e-6, 1e4)),
                cached_tokens=draw(st.integers(0, input_tokens - 1)),
            )
            for view in offered
        }
        found.append((call, offered, costs, now_s))
    return found


def _decide(policy: Policy, todo: list[Step]) -> list[tuple[Choice | None, float]]:
    decisions = []
    for call, offered, costs, now_s in todo:
        choice = policy.choose(call, offered, costs, now_s)
        t_comp_s = costs[choice.instance_id].t_comp_s if choice else 1.0
        decisions.append((choice, policy.queue_score(call, t_comp_s)))
    return decisions


@every_policy
@some_examples
@given(todo=steps(), alpha=st.floats(0.0, 1.0))
def test_it_chooses_one_of_the_instances_offered(name: str, todo: list[Step], alpha: float) -> None:
    """No policy invents an instance."""
    for (choice, _), (_, offered, _, _) in zip(
        _decide(make_policy(name, alpha), todo), todo, strict=True
    ):
        ids = {view.spec.instance_id for view in offered}
        assert choice is None or choice.instance_id in ids


@every_policy
@some_examples
@given(todo=steps(), alpha=st.floats(0.0, 1.0))
def test_all_its_numbers_are_finite(name: str, todo: list[Step], alpha: float) -> None:
    """Idle, overfull and unknown instances, zero output and late queries give finite numbers."""
    for choice, score in _decide(make_policy(name, alpha), todo):
        assert math.isfinite(score)
        if choice is not None:
            assert math.isfinite(choice.score)
            assert math.isfinite(choice.t_queue_s)


@every_policy
@some_examples
@given(todo=steps(), alpha=st.floats(0.0, 1.0))
def test_the_same_history_gives_the_same_decisions(
    name: str, todo: list[Step], alpha: float
) -> None:
    """Nothing is drawn at random and no clock is read."""
    first = _decide(make_policy(name, alpha), todo)
    assert _decide(make_policy(name, alpha), todo) == first


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - ORDER_DEPENDENT))
@some_examples
@given(todo=steps(), alpha=st.floats(0.0, 1.0), data=st.data())
def test_the_order_of_the_instances_offered_does_not_matter(
    name: str, todo: list[Step], alpha: float, data: st.DataObject
) -> None:
    """Any permutation of the views gives the same decisions, except for round-robin."""
    shuffled = [
        (call, data.draw(st.permutations(offered)), costs, now_s)
        for call, offered, costs, now_s in todo
    ]
    expected = _decide(make_policy(name, alpha), todo)
    for (choice, score), (wanted, wanted_score) in zip(
        _decide(make_policy(name, alpha), shuffled), expected, strict=True
    ):
        assert score == wanted_score
        assert choice is not None
        assert wanted is not None
        assert choice.instance_id == wanted.instance_id
        assert choice.score == pytest.approx(wanted.score)


@every_policy
@some_examples
@given(todo=steps(), t_comp_s=st.floats(1e-6, 1e4))
def test_a_queue_score_is_constant(name: str, todo: list[Step], t_comp_s: float) -> None:
    """Asked again for a call just bound, a policy gives the same position."""
    policy = make_policy(name, 0.1)
    for call, offered, costs, now_s in todo:
        policy.choose(call, offered, costs, now_s)
        score = policy.queue_score(call, t_comp_s)
        assert policy.queue_score(call, t_comp_s) == score


@every_policy
def test_it_lets_calls_in(name: str) -> None:
    """None of these policies refuses a call: their sources do not either."""
    assert make_policy(name, 0.1).admit(make_call(), [make_view()], 0.0) is None


@every_policy
def test_a_new_alpha_is_taken_without_complaint(name: str) -> None:
    """Policies without α ignore it."""
    policy = make_policy(name, 0.1)
    policy.set_alpha(0.7)
    choice = policy.choose(make_call(), [make_view()], {"a": Cost(t_comp_s=1.0)}, 0.0)
    assert choice is not None
    assert choice.alpha in {None, 0.7}
