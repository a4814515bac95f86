"""`prefix-queue`: the scorers of llm-d's router."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.policies import make_policy
from shared.scheduling.policies.prefix_queue import (
    kv_share,
    prefix_share,
    queue_share,
    scorer_sum,
)
from shared.scheduling.policy import Cost, InstanceView
from tests.support.scheduling import make_call, make_view


@pytest.mark.parametrize(("num_waiting", "expected"), [(10, 0.0), (5, 0.5), (0, 1.0)])
def test_queue_scores_of_the_sources_own_example(num_waiting: int, expected: float) -> None:
    """Queues of 10, 5 and 0 calls score 0, 0.5 and 1 (queue_test.go)."""
    assert queue_share(num_waiting, 0, 10) == expected


@pytest.mark.parametrize("num_waiting", [0, 5])
def test_equal_queues_score_one(num_waiting: int) -> None:
    """All queues alike are neutral, empty or not (queue_test.go)."""
    assert queue_share(num_waiting, num_waiting, num_waiting) == 1.0


@pytest.mark.parametrize(("blocks", "expected"), [(5, 0.5), (2, 0.2)])
def test_prefix_scores_of_the_sources_own_example(blocks: int, expected: float) -> None:
    """5 and 2 of 10 blocks matched score 0.5 and 0.2 (prefix/plugin_test.go)."""
    assert prefix_share(blocks * 16, 10 * 16, 16) == expected


def test_a_prompt_shorter_than_a_block_has_no_prefix() -> None:
    """Nothing can match, so the score is 0."""
    assert prefix_share(0, 15, 16) == 0.0


@pytest.mark.parametrize(("used", "expected"), [(0, 1.0), (80, 0.2), (100, 0.0), (130, 0.0)])
def test_memory_score_is_the_free_share(used: int, expected: float) -> None:
    """1 - usage, and never below 0 when more is reported than there is."""
    assert kv_share(used, 100) == pytest.approx(expected)


def test_default_weights() -> None:
    """Queue 2, memory 2, prefix 3: a perfect instance scores 7."""
    assert scorer_sum(1.0, 1.0, 1.0) == 7.0
    assert scorer_sum(0.5, 0.25, 0.2) == pytest.approx(1.0 + 0.5 + 0.6)


@given(
    waiting=st.integers(0, 100),
    more=st.integers(0, 100),
    used=st.integers(0, 10**6),
    cached=st.integers(0, 10_000),
    rest=st.integers(1, 10_000),
)
def test_every_scorer_stays_between_zero_and_one(
    waiting: int, more: int, used: int, cached: int, rest: int
) -> None:
    """Scores are normalised, whatever the state."""
    assert 0.0 <= queue_share(waiting, 0, waiting + more) <= 1.0
    assert 0.0 <= kv_share(used, 95_000) <= 1.0
    assert 0.0 <= prefix_share(cached, cached + rest, 16) <= 1.0


def _choose(views: list[InstanceView], cached: dict[str, int]) -> str:
    costs = {
        view.spec.instance_id: Cost(
            t_comp_s=1.0, cached_tokens=cached.get(view.spec.instance_id, 0)
        )
        for view in views
    }
    call = make_call(input_tokens=1_600)
    choice = make_policy("prefix-queue", 0.0).choose(call, views, costs, 0.0)
    assert choice is not None
    return choice.instance_id


def test_a_cached_prefix_attracts_a_call() -> None:
    """Equal otherwise: the instance that holds half of the prompt wins by 1.5."""
    assert _choose([make_view("a"), make_view("b")], {"a": 800}) == "a"


def test_a_long_queue_outweighs_part_of_a_prefix() -> None:
    """a: queue 0 + memory 2 + prefix 1.5 = 3.5; b: queue 2 + memory 2 = 4."""
    assert _choose([make_view("a", num_waiting=8), make_view("b")], {"a": 800}) == "b"


def test_a_whole_prefix_outweighs_a_long_queue() -> None:
    """a: 0 + 2 + 3 = 5 beats b's 4: a known weakness of adding normalised scores."""
    assert _choose([make_view("a", num_waiting=8), make_view("b")], {"a": 1_600}) == "a"


def test_full_memory_repels_a_call() -> None:
    """a: 2 + 0.2 + 0; b: 2 + 1.8 + 0."""
    views = [
        make_view("a", kv_used_tokens=900, kv_tokens=1_000),
        make_view("b", kv_used_tokens=100, kv_tokens=1_000),
    ]
    assert _choose(views, {}) == "b"


def test_running_calls_do_not_count_as_a_queue() -> None:
    """The queue scorer reads waiting calls only."""
    views = [make_view("a", num_running=60), make_view("b", num_waiting=1)]
    assert _choose(views, {}) == "a"
    assert _choose(views, {"b": 800}) == "a"  # one waiting call of at most one: queue score 0
