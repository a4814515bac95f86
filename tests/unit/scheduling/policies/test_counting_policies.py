"""`least-outstanding` and `power-of-two`."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.dispatch import text_key
from shared.scheduling.policies import make_policy
from shared.scheduling.policies.power_of_two import two_candidates
from shared.scheduling.policy import Cost, InstanceView
from tests.support.scheduling import make_call, make_view


def _choose(name: str, views: list[InstanceView], request_id: str = "r") -> str:
    costs = {view.spec.instance_id: Cost(t_comp_s=1.0) for view in views}
    choice = make_policy(name, 0.0).choose(make_call(request_id), views, costs, 0.0)
    assert choice is not None
    return choice.instance_id


@pytest.mark.parametrize(("waiting", "running"), [((0, 3), (5, 1)), ((4, 0), (0, 3))])
def test_least_outstanding_counts_waiting_and_running_calls(
    waiting: tuple[int, int], running: tuple[int, int]
) -> None:
    """3 + 1 calls are fewer than 0 + 5, and 0 + 3 fewer than 4 + 0, whatever their work."""
    views = [
        make_view("a", num_waiting=waiting[0], num_running=running[0], backlog_s=1.0),
        make_view("b", num_waiting=waiting[1], num_running=running[1], backlog_s=900.0),
    ]
    assert _choose("least-outstanding", views) == "b"


def test_least_outstanding_spreads_ties() -> None:
    """1,000 calls on four idle instances do not herd."""
    views = [make_view(name) for name in "abcd"]
    chosen = Counter(_choose("least-outstanding", views, f"r{n}") for n in range(1_000))
    assert set(chosen) == set("abcd")
    assert max(chosen.values()) < 320


@pytest.mark.parametrize("num_instances", [2, 3, 7])
def test_every_ordered_pair_is_drawn_equally_often(num_instances: int) -> None:
    """As in Ray: each of the n · (n - 1) ordered pairs has the same probability."""
    num_pairs = num_instances * (num_instances - 1)
    pairs = Counter(two_candidates(key, num_instances) for key in range(5 * num_pairs))
    assert len(pairs) == num_pairs
    assert set(pairs.values()) == {5}


@given(key=st.integers(0, 2**31 - 1), num_instances=st.integers(2, 10_000))
def test_two_different_instances_are_drawn(key: int, num_instances: int) -> None:
    """Both exist and they differ."""
    first, second = two_candidates(key, num_instances)
    assert first != second
    assert min(first, second) >= 0
    assert max(first, second) < num_instances


def test_a_single_instance_is_the_choice() -> None:
    """Of one instance there is nothing to draw."""
    assert _choose("power-of-two", [make_view("a", num_running=9)]) == "a"


def test_of_two_instances_the_one_with_fewer_ongoing_calls_wins() -> None:
    """With two instances both are always drawn: 4 ongoing calls beat 5."""
    views = [make_view("a", num_running=5), make_view("b", num_waiting=4)]
    assert {_choose("power-of-two", views, f"r{n}") for n in range(50)} == {"b"}


def test_a_tie_goes_to_the_instance_drawn_first() -> None:
    """Equal queues: the first of the pair wins, which is each instance about half of the time."""
    views = [make_view("a", num_running=5), make_view("b", num_running=5)]
    ids = [f"r{number}" for number in range(1_000)]
    chosen = [_choose("power-of-two", views, request_id) for request_id in ids]
    assert chosen == ["ab"[two_candidates(text_key(request_id), 2)[0]] for request_id in ids]
    assert 400 < chosen.count("a") < 600


def test_the_busiest_of_three_is_never_chosen_and_the_idlest_two_times_in_three() -> None:
    """Queues 0, 1, 2: the idle one is in two of three pairs, the busiest loses every pair."""
    views = [make_view(name, num_running=number) for number, name in enumerate("abc")]
    chosen = Counter(_choose("power-of-two", views, f"r{n}") for n in range(3_000))
    assert chosen["c"] == 0
    assert 1_900 < chosen["a"] < 2_100


def test_the_same_call_draws_the_same_pair() -> None:
    """A retry of a call is no new draw."""
    views = [make_view(name) for name in "abcdefgh"]
    assert len({_choose("power-of-two", views, "r7") for _ in range(10)}) == 1


@pytest.mark.parametrize("name", ["least-outstanding", "power-of-two"])
def test_calls_wait_first_come_first_served(name: str) -> None:
    """The queue score is the instant of readiness."""
    assert make_policy(name, 0.0).queue_score(make_call(ready_at_s=17.0), 5.0) == 17.0
