"""Predictions of lengths and times."""

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.profile import StageEstimate, WorkflowShape
from shared.scheduling.budget import stage_budget_s
from shared.scheduling.latency import service_s
from shared.scheduling.profiles import MAX_CACHED_POOLS, Predictor, default_shapes
from tests.support.scheduling import make_spec, make_view

SHAPE = WorkflowShape(
    workflow="w",
    stages={
        "draft": StageEstimate(
            input_tokens=1_000, output_tokens=101, max_output_tokens=201, siblings=2
        ),
        "answer": StageEstimate(input_tokens=1_000, output_tokens=51, num_seen=9),
    },
    remaining={"draft/0": {"draft": 0.5, "answer": 1.0}, "draft/1": {"answer": 1.0}},
)
stages = st.sampled_from(sorted(default_shapes()["text2sql"].stages))


def _predictor() -> Predictor:
    return Predictor({"w": SHAPE})


def test_a_stage_takes_as_long_as_its_longest_sibling() -> None:
    """1,000 prompt tokens in 0.2 s, then 200 more tokens of 0.035 s."""
    assert _predictor().stage_s("w", "draft", 0, [make_spec()]) == pytest.approx(0.2 + 7.0)


def test_a_stage_is_averaged_over_the_instances() -> None:
    """Decode of 0.03 and 0.05 s per token is on average 0.04."""
    pool = [make_spec("a", decode_s=0.03), make_spec("b", decode_s=0.05)]
    assert _predictor().stage_s("w", "draft", 0, pool) == pytest.approx(0.2 + 8.0)


def test_remaining_time_sums_what_is_expected_to_follow() -> None:
    """After the first draft half a draft and one answer: 3.6 + 1.95 s."""
    predictor, pool = _predictor(), [make_spec()]
    assert predictor.remaining_s("w", "draft", 0, pool) == pytest.approx(3.6 + 1.95)
    assert predictor.remaining_s("w", "draft", 1, pool) == pytest.approx(1.95)
    assert predictor.remaining_s("w", "draft", 7, pool) == pytest.approx(1.95)


def test_isolated_time_is_the_first_stage_and_all_that_follows() -> None:
    """The whole query alone: 7.2 s and 5.55 s."""
    assert _predictor().isolated_s("w", "draft", [make_spec()]) == pytest.approx(7.2 + 5.55)


def test_a_learned_speed_factor_scales_the_time() -> None:
    """An instance found three times slower triples the prediction."""
    views = [make_view("a", speed_factor=3.0)]
    assert _predictor().stage_s("w", "draft", 0, views) == pytest.approx(3 * 7.2)


def test_a_new_shape_counts_at_once() -> None:
    """Cached times do not outlive the shape they came from."""
    predictor, pool = _predictor(), [make_spec()]
    before = predictor.stage_s("w", "answer", 0, pool)
    answer = StageEstimate(input_tokens=1_000, output_tokens=101)
    predictor.learn(WorkflowShape(workflow="w", stages={"answer": answer}))
    assert predictor.stage_s("w", "answer", 0, pool) > 1.5 * before


def test_a_changed_instance_counts_at_once() -> None:
    """Another spec or factor under the same id is another pool."""
    predictor = _predictor()
    first = predictor.stage_s("w", "draft", 0, [make_spec("a", decode_s=0.03)])
    second = predictor.stage_s("w", "draft", 0, [make_spec("a", decode_s=0.06)])
    third = predictor.stage_s("w", "draft", 0, [make_view("a", decode_s=0.06, speed_factor=2.0)])
    assert first < second < third


def test_equal_pools_share_their_times() -> None:
    """Specs decoded anew with every state message do not cost a new computation."""
    predictor = _predictor()
    one = predictor.fleet_times([make_spec("a"), make_spec("b")])
    assert predictor.fleet_times([make_spec("b"), make_spec("a")]) is one


def test_memory_is_bounded_however_often_speeds_change() -> None:
    """10,000 different speed factors keep at most a fixed number of pools."""
    predictor, spec = _predictor(), make_spec()
    tracemalloc.start()
    for number in range(10_000):
        view = make_view(spec=spec, speed_factor=1.0 + number * 1e-4)
        predictor.stage_s("w", "draft", 0, [view])
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert current < MAX_CACHED_POOLS * 20_000


def test_memory_is_bounded_whatever_producers_call_their_workflows() -> None:
    """Ids inside the names of workflows and stages fill no memory, and times stay the same."""
    predictor, pool = _predictor(), [make_spec()]
    expected_s = predictor.isolated_s("w", "draft", pool)

    def ask(first: int) -> int:
        for number in range(first, first + 20_000):
            predictor.isolated_s(f"w-{number}", f"s-{number}", pool)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        warm_bytes = ask(0)
        grown_bytes = ask(20_000) - warm_bytes
    finally:
        tracemalloc.stop()
    assert grown_bytes < 500_000
    assert predictor.isolated_s("w", "draft", pool) == expected_s


def test_an_empty_pool_still_has_finite_times() -> None:
    """Before any instance is known shares are computed on a reference instance."""
    assert 0.0 < _predictor().stage_s("w", "draft", 0, []) < math.inf


def test_output_is_learned_and_capped_by_what_is_allowed() -> None:
    """101 expected tokens, but never more than `max_tokens`."""
    predictor = _predictor()
    assert predictor.output_tokens("w", "draft") == 101
    assert predictor.output_tokens("w", "draft", max_tokens=16) == 16


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (None, 1_000),
        (1_500, 1_500),
        (250, 250),
        (4_000, 4_000),
        (249, 1_000),
        (4_001, 1_000),
        (0, 1_000),
        (-5, 1_000),
        (10**12, 1_000),
    ],
)
def test_a_claimed_length_is_believed_within_a_factor_of_four(
    estimate: int | None, expected: int
) -> None:
    """Around the learned 1,000 tokens 250 to 4,000 are believed, else the learned mean is used."""
    assert _predictor().input_tokens("w", "draft", estimate) == expected


def test_a_prompt_at_hand_is_the_reference() -> None:
    """80,000 bytes are about 20,000 tokens, whatever the stage's mean and a false claim say."""
    predictor = _predictor()
    assert predictor.input_tokens("w", "draft", None, prompt_bytes=80_000) == 20_000
    assert predictor.input_tokens("w", "draft", 18_000, prompt_bytes=80_000) == 18_000
    assert predictor.input_tokens("w", "draft", 10, prompt_bytes=80_000) == 20_000


@pytest.mark.parametrize(
    ("estimate", "prompt_bytes", "least"),
    [
        (None, 8_712, 544),  # a prompt that has 859 tokens
        (None, 8_355, 522),  # 1,671 times a word of one token
        (2_100, 8_712, 2_100),  # the producer counted
        (9_000, 8_712, 544),  # its count is too far off to be believed
        (None, 3, 1),
        (None, 0, 1),  # pictures only: nothing is known of their length
        (700, None, 700),
        (None, None, 1_000),  # replayed, without a text: the stage's mean
    ],
)
def test_a_text_surely_has_a_sixteenth_of_its_bytes_in_tokens(
    estimate: int | None, prompt_bytes: int | None, least: int
) -> None:
    """Only a producer's count, or what so much text must have, rules instances out."""
    assert _predictor().least_input_tokens("w", "draft", estimate, prompt_bytes) == least


def test_bytes_per_token_are_learned() -> None:
    """Where the engine counts 2 bytes per token, 8,000 bytes are 4,000 tokens."""
    draft = StageEstimate(input_tokens=1_000, output_tokens=10, bytes_per_token=2.0)
    predictor = Predictor({"w": WorkflowShape(workflow="w", stages={"draft": draft})})
    assert predictor.input_tokens("w", "draft", prompt_bytes=8_000) == 4_000


def test_an_absurd_claim_about_an_unknown_stage_is_clamped_to_the_context() -> None:
    """Nothing is known, so the claim is used, but no longer than any context."""
    predictor = _predictor()
    assert predictor.input_tokens("new", "call", 5_000) == 5_000
    assert predictor.input_tokens("new", "call", 10**12, limit_tokens=32_768) == 32_768
    assert predictor.input_tokens("new", "call", -7) == 1


def test_an_unknown_workflow_keeps_half_of_the_time_back() -> None:
    """One more stage like the present one is expected: its share of 100 s is 50 s."""
    predictor, pool = _predictor(), [make_spec()]
    stage_s = predictor.stage_s("new", "call", 0, pool)
    remaining_s = predictor.remaining_s("new", "call", 0, pool)
    assert stage_budget_s(100.0, 0.0, stage_s, remaining_s) == pytest.approx(50.0)


def test_an_unknown_stage_of_a_known_workflow_is_like_the_others() -> None:
    """It is expected to be of mean length, with the mean of what follows other stages."""
    predictor, pool = Predictor(), [make_spec()]
    outputs = [stage.output_tokens for stage in predictor.shapes["text2sql"].stages.values()]
    assert predictor.output_tokens("text2sql", "new") == pytest.approx(sum(outputs) / len(outputs))
    first_s = predictor.remaining_s("text2sql", "information_retriever", 0, pool)
    assert 0.0 < predictor.remaining_s("text2sql", "new", 0, pool) < first_s


@given(stage=stages, iteration=st.integers(0, 10_000), data=st.data())
def test_times_do_not_depend_on_the_order_of_instances(
    stage: str, iteration: int, data: st.DataObject
) -> None:
    """Any permutation of the pool predicts bit for bit the same, finite and not negative."""
    pool = [make_spec(f"i{n}", decode_s=0.01 + 0.007 * n) for n in range(5)]
    shuffled = data.draw(st.permutations(pool))
    one, other = Predictor(), Predictor()
    times = (
        one.stage_s("text2sql", stage, iteration, pool),
        one.remaining_s("text2sql", stage, iteration, pool),
    )
    assert times == (
        other.stage_s("text2sql", stage, iteration, shuffled),
        other.remaining_s("text2sql", stage, iteration, shuffled),
    )
    assert all(math.isfinite(time_s) and time_s >= 0.0 for time_s in times)


@given(cached=st.floats(0.0, 5_000.0), input_tokens=st.floats(0.0, 5_000.0), caching=st.booleans())
def test_warm_templates_count_only_where_prefixes_are_cached(
    cached: float, input_tokens: float, caching: bool
) -> None:
    """An instance without a prefix cache pays for the whole prompt."""
    estimate = StageEstimate(input_tokens=input_tokens, output_tokens=1, cached_tokens=cached)
    predictor = Predictor({"w": WorkflowShape(workflow="w", stages={"s": estimate})})
    cold_s = service_s(make_spec(), input_tokens=input_tokens, cached_tokens=0, output_tokens=1)
    found_s = predictor.stage_s("w", "s", 0, [make_spec(prefix_caching=caching)])
    assert 0.0 < found_s <= cold_s
    if not caching:
        assert found_s == cold_s
