"""`qlm`: request groups and estimated waiting time."""

import pytest

from shared.scheduling.policies import make_policy
from shared.scheduling.policies.qlm import group_deadline_s, token_throughput, waiting_time_s
from shared.scheduling.policy import Cost, InstanceView
from tests.support.scheduling import make_call, make_view


def test_waiting_time_of_the_releases_own_numbers() -> None:
    """10 requests of 100 tokens at 300 tokens per second wait 3.33 s (qlm/config.yaml)."""
    assert waiting_time_s(10, 100.0, 300.0) == pytest.approx(10 / 3)


def test_throughput_of_a_full_batch() -> None:
    """64 sequences at 0.035 s a step are 1,829 tokens per second."""
    assert token_throughput(64, 1_000.0, 0.035, 0.0, 0.0, 0.0) == pytest.approx(64 / 0.035)


@pytest.mark.parametrize(
    ("deadline_s", "expected_s"), [(0.0, 0.0), (99.9, 0.0), (100.0, 100.0), (-0.1, -100.0)]
)
def test_deadlines_are_rounded_down_as_in_the_release(deadline_s: float, expected_s: float) -> None:
    """The release's granularity is 100 s and its rounding `//`."""
    assert group_deadline_s(deadline_s, 100.0) == expected_s


def test_calls_of_one_group_wait_as_they_came() -> None:
    """Deadlines at 31 s and 39 s are one group: equal scores, so arrival decides."""
    policy = make_policy("qlm", 0.0)
    scores = {policy.queue_score(make_call(ready_at_s=10.0, t_slo_s=t), 1.0) for t in (21.0, 29.0)}
    assert scores == {30.0}


def test_groups_wait_by_deadline() -> None:
    """A group due at 20 s goes before one due at 30 s, whoever came first."""
    policy = make_policy("qlm", 0.0)
    early = policy.queue_score(make_call(ready_at_s=10.0, t_slo_s=25.0), 1.0)
    late = policy.queue_score(make_call(ready_at_s=15.0, t_slo_s=9.0), 1.0)
    assert late < early


def _choose(views: list[InstanceView], t_comps: dict[str, float], output_tokens: float) -> str:
    costs = {name: Cost(t_comp_s=t_comp_s) for name, t_comp_s in t_comps.items()}
    call = make_call(output_tokens=output_tokens)
    choice = make_policy("qlm", 0.0).choose(call, views, costs, 0.0)
    assert choice is not None
    return choice.instance_id


def test_a_call_goes_where_it_is_estimated_to_end_first() -> None:
    """Instance a decodes 10 · 100 tokens per second, b 20 · 100: 40 calls take 4 s or 2 s.

    With 3 s of its own on a and 6 s on b, a ends first (7 s against 8 s); at 90 calls ahead b does
    (9 + 3 against 4.5 + 6 s).
    """
    for num_running, expected in ((40, "a"), (90, "b")):
        views = [
            make_view("a", decode_s=0.01, num_running=num_running, capacity=10),
            make_view("b", decode_s=0.01, num_running=num_running, capacity=20),
        ]
        assert _choose(views, {"a": 3.0, "b": 6.0}, 100.0) == expected


def test_the_batch_is_limited_by_memory() -> None:
    """Room for 4 calls of 2,000 tokens makes 4 · 100 tokens per second, not 64 · 100."""
    views = [
        make_view("a", decode_s=0.01, num_running=8, capacity=64, kv_tokens=8_000),
        make_view("b", decode_s=0.01, num_running=8, capacity=8, kv_tokens=80_000),
    ]
    assert _choose(views, {"a": 1.0, "b": 5.0}, 1_000.0) == "b"


def test_a_slow_instance_makes_calls_wait_longer() -> None:
    """5 calls of 100 tokens at 100 tokens per second are 5 s; found twice as slow, 10 s."""
    call, costs = make_call(output_tokens=100.0), {"a": Cost(t_comp_s=1.0)}
    for speed_factor, wait_s in ((1.0, 5.0), (2.0, 10.0)):
        view = make_view(decode_s=0.01, num_running=5, speed_factor=speed_factor)
        choice = make_policy("qlm", 0.0).choose(call, [view], costs, 0.0)
        assert choice is not None
        assert choice.t_queue_s == pytest.approx(wait_s)


def test_expected_output_is_the_mean_of_the_predictions_so_far() -> None:
    """After calls of 100 and 300 tokens a call ahead counts 200: 5 of them wait 10 s at 100/s."""
    policy = make_policy("qlm", 0.0)
    views = [make_view("a", decode_s=0.01, num_running=5, capacity=1)]
    costs = {"a": Cost(t_comp_s=1.0)}
    waits = []
    for output_tokens in (100.0, 300.0):
        choice = policy.choose(make_call(output_tokens=output_tokens), views, costs, 0.0)
        assert choice is not None
        waits.append(choice.t_queue_s)
    assert waits == [pytest.approx(5.0), pytest.approx(10.0)]
