"""`earliest-finish`: estimated end under batching."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import LatencyModel
from shared.scheduling.policies import make_policy
from shared.scheduling.policies.earliest_finish import decode_slowdown, stretch, time_to_start_s
from shared.scheduling.policy import Cost, InstanceView
from tests.support.scheduling import make_call, make_view


def _choose(views: list[InstanceView], t_comps: dict[str, float]) -> str:
    costs = {name: Cost(t_comp_s=t_comp_s) for name, t_comp_s in t_comps.items()}
    choice = make_policy("earliest-finish", 0.0).choose(make_call(), views, costs, 0.0)
    assert choice is not None
    return choice.instance_id


def test_stretch_is_in_balance_with_the_prefill_of_others() -> None:
    """5 others, a tenth of each call is prefill: stretched by 1.5, prefill takes a third.

    In balance: each of 5 others spends 0.1 t of prefill every 1.5 t, together 1/3 of the time, and
    1 / (1 - 1/3) is 1.5 again.
    """
    assert stretch(5, 0.1) == pytest.approx(1.5)
    busy = 5 * 0.1 / stretch(5, 0.1)
    assert 1.0 / (1.0 - busy) == pytest.approx(stretch(5, 0.1))


def test_a_step_of_a_batch_is_longer_than_a_step_alone() -> None:
    """Weights 30 ms, 1 ms per sequence, 1,000 KV tokens of 1 µs: 4 together 38 ms, alone 32 ms."""
    slowdown = decode_slowdown(4, 1_000.0, 0.030, 0.0, 0.001, 1e-6, 0.0)
    assert slowdown == pytest.approx(0.038 / 0.032)


def test_a_step_of_two_lacks_the_quick_way_of_one() -> None:
    """2 ms more for a batch: 2 together 34 + 2 ms, alone 32 ms."""
    slowdown = decode_slowdown(2, 1_000.0, 0.030, 0.0, 0.001, 1e-6, 0.002)
    assert slowdown == pytest.approx(0.036 / 0.032)


def test_a_model_without_times_is_not_slowed_down() -> None:
    """All coefficients zero: no division by zero."""
    assert decode_slowdown(4, 1_000.0, 0.0, 0.0, 0.0, 0.0, 0.0) == 1.0


def test_a_free_place_in_the_batch_means_no_wait() -> None:
    """3 of 4 places taken: the call starts at once, whatever the backlog."""
    assert time_to_start_s(3, 4, 500.0, 0.1) == 0.0


def test_a_full_batch_makes_calls_wait_for_ends() -> None:
    """5 in progress, 4 places: two must end first.

    Calls take 10 s alone and 10 · (1 + 3 · 0.1) = 13 s in the batch, so one ends every 3.25 s.
    """
    assert time_to_start_s(5, 4, 50.0, 0.1) == pytest.approx(2 * 3.25)


@given(
    num=st.integers(0, 200),
    slots=st.integers(1, 64),
    mean_s=st.floats(0.0, 100.0),
    share=st.floats(0.0, 1.0),
)
def test_one_more_call_in_progress_never_shortens_the_wait(
    num: int, slots: int, mean_s: float, share: float
) -> None:
    """Of calls of equal size, more mean a later start."""
    less = time_to_start_s(num, slots, num * mean_s, share)
    more = time_to_start_s(num + 1, slots, (num + 1) * mean_s, share)
    assert 0.0 <= less <= more * (1 + 1e-12) + 1e-12


def test_an_idle_pool_gives_the_call_to_the_fastest() -> None:
    """Nobody else is there, so only the call's own time counts."""
    assert _choose([make_view("a"), make_view("b")], {"a": 9.0, "b": 4.0}) == "b"


def test_a_long_backlog_in_a_roomy_batch_does_not_frighten() -> None:
    """One long call runs on the fast instance: the call joins the batch there."""
    views = [
        make_view("a", num_running=1, backlog_s=300.0, capacity=64),
        make_view("b", capacity=64),
    ]
    assert _choose(views, {"a": 4.0, "b": 9.0}) == "a"


def test_a_full_fast_instance_loses_to_an_idle_slow_one() -> None:
    """Ten calls for one place are a long wait."""
    views = [
        make_view("a", num_running=1, num_waiting=9, backlog_s=100.0, capacity=1),
        make_view("b", capacity=64),
    ]
    assert _choose(views, {"a": 4.0, "b": 9.0}) == "b"


def test_memory_limits_the_batch_too() -> None:
    """64 places but KV memory for two such calls: two in progress are full."""
    views = [
        make_view("a", num_running=2, backlog_s=20.0, capacity=64, kv_tokens=2_200),
        make_view("b", num_running=2, backlog_s=20.0, capacity=64, kv_tokens=220_000),
    ]
    assert _choose(views, {"a": 5.0, "b": 8.0}) == "b"


def test_the_prefill_share_is_learned_from_the_calls_bound() -> None:
    """Calls that are nearly all prefill make company costly.

    With 4 others on a, a call of 4 s there ends after 4 · (1 + 4p) s, on idle b after 12 s: a is
    better while p is below a half.
    """
    policy = make_policy("earliest-finish", 0.0)
    idle = [make_view("a")]
    prefill_only = make_call(input_tokens=20_000, output_tokens=1.0)
    for _ in range(50):
        policy.choose(prefill_only, idle, {"a": Cost(t_comp_s=4.0)}, 0.0)
    views = [make_view("a", num_running=4, capacity=64, backlog_s=16.0), make_view("b")]
    costs = {"a": Cost(t_comp_s=4.0), "b": Cost(t_comp_s=12.0)}
    choice = policy.choose(make_call(), views, costs, 0.0)
    assert choice is not None
    assert choice.instance_id == "b"
    assert _choose(views, {"a": 4.0, "b": 12.0}) == "a"


def _estimate_s(view: InstanceView, cost: Cost) -> float:
    choice = make_policy("earliest-finish", 0.0).choose(make_call(), [view], {"a": cost}, 0.0)
    assert choice is not None
    return -choice.score


def test_alone_a_call_takes_its_own_time() -> None:
    """On an idle instance the estimate is t_comp."""
    assert _estimate_s(make_view(), Cost(t_comp_s=3.5)) == pytest.approx(3.5)


def test_decoding_slows_down_with_the_batch() -> None:
    """0.2 s prefill and 3.3 s decode; 3 others; steps of 10 + 4 · 1 ms instead of 10 + 1 ms.

    Prefill share 0.2 / 3.5: (1 + 3 · 0.2 / 3.5) · (0.2 + 3.3 · 14 / 11).
    """
    latency = LatencyModel(prefill_s_per_token=1 / 5_000, weights_s=0.01, seq_s=0.001)
    view = make_view(num_running=3, capacity=64, backlog_s=9.0, latency=latency)
    expected_s = (1 + 3 * 0.2 / 3.5) * (0.2 + 3.3 * 14 / 11)
    assert _estimate_s(view, Cost(t_comp_s=3.5)) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("cached_tokens", "speed_factor", "prefill_s"), [(0, 1.0, 0.2), (500, 1.0, 0.1), (0, 2.0, 0.4)]
)
def test_prefill_counts_what_is_not_cached_at_the_speed_found(
    cached_tokens: int, speed_factor: float, prefill_s: float
) -> None:
    """1,000 prompt tokens at 5,000 per second; the share of prefill stretches among 4 others."""
    view = make_view(
        decode_s=0.001, num_running=4, capacity=64, backlog_s=9.0, speed_factor=speed_factor
    )
    cost = Cost(t_comp_s=2.0, cached_tokens=cached_tokens)
    assert _estimate_s(view, cost) == pytest.approx((1 + 4 * prefill_s / 2.0) * 2.0)


def test_queues_are_ordered_by_urgency() -> None:
    """The queue score is the latest start."""
    assert make_policy("earliest-finish", 0.0).queue_score(make_call(), 7.0) == 23.0
