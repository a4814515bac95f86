"""Learning what to expect of a workflow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain import text2sql
from shared.domain.profile import StageEstimate, WorkflowShape
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.scheduling.shapes import (
    default_shapes,
    expected_longest,
    remaining_after,
    shape_from_trace,
)
from shared.simulation.generator import generate
from tests.support.scheduling import chain, make_stage, make_trace_query


def _looping_query(query_id: str, rounds: int) -> TraceQuery:
    rounds_of = [make_stage("revise", iteration=number) for number in range(rounds)]
    return make_trace_query(
        query_id, make_stage("draft"), *rounds_of, make_stage("answer"), workflow="loop"
    )


def test_a_stage_is_learned_as_the_mean_of_its_calls() -> None:
    """Two occurrences, three calls: means per call, mean of the longest per occurrence."""
    trace = [
        make_trace_query("a", make_stage("draft", (100, 10), (200, 40)), workflow="w"),
        make_trace_query("b", make_stage("draft", (300, 70)), workflow="w"),
    ]
    estimate = shape_from_trace(trace)["w"].stages["draft"]
    assert estimate == StageEstimate(
        input_tokens=200.0,
        output_tokens=40.0,
        max_output_tokens=55.0,
        siblings=1.5,
        num_seen=3,
    )


def test_remaining_work_is_conditional_on_the_iteration() -> None:
    """Of four queries with 0, 1, 2 and 3 rounds: after round 0 one more is expected (0, 1, 2)."""
    trace = [_looping_query(f"q{rounds}", rounds) for rounds in range(4)]
    remaining = shape_from_trace(trace, prior_weight=0.0)["loop"].remaining
    assert remaining["draft/0"] == {"answer": 1.0, "revise": 1.5}
    assert remaining["revise/0"] == {"answer": 1.0, "revise": 1.0}
    assert remaining["revise/1"] == {"answer": 1.0, "revise": 0.5}
    assert remaining["revise/2"] == {"answer": 1.0}
    assert remaining["answer/0"] == {}


def test_few_samples_lean_on_the_iteration_before() -> None:
    """One sample of the last round counts a third beside two imaginary ones of the round before.

    Round 0 expects 1 more; round 1 has samples 0 and 1: (1 + 2 · 1) / (2 + 2) = 0.75; round 2 has
    the sample 0: (0 + 2 · 0.75) / (1 + 2) = 0.5.
    """
    trace = [_looping_query(f"q{rounds}", rounds) for rounds in range(4)]
    remaining = shape_from_trace(trace, prior_weight=2.0)["loop"].remaining
    assert remaining["revise/0"]["revise"] == pytest.approx(1.0)
    assert remaining["revise/1"]["revise"] == pytest.approx(0.75)
    assert remaining["revise/2"]["revise"] == pytest.approx(0.5)


def test_a_prior_counts_as_so_many_samples() -> None:
    """8 calls of 100 tokens and a prior of 200 tokens worth 2 calls: 120 tokens."""
    prior = WorkflowShape(
        workflow="w",
        stages={
            "draft": StageEstimate(input_tokens=200, output_tokens=20),
            "only in the prior": StageEstimate(input_tokens=5, output_tokens=5),
        },
        remaining={"draft/0": {"answer": 1.0}},
    )
    trace = [make_trace_query(f"q{n}", make_stage("draft"), workflow="w") for n in range(8)]
    learned = shape_from_trace(trace, priors={"w": prior}, prior_weight=2.0)["w"]
    assert learned.stages["draft"].input_tokens == pytest.approx(120.0)
    assert learned.stages["draft"].output_tokens == pytest.approx(12.0)
    assert learned.remaining["draft/0"]["answer"] == pytest.approx(0.2)
    assert learned.stages["only in the prior"] == prior.stages["only in the prior"]


def test_only_prefixes_of_several_queries_count_as_cached() -> None:
    """A template two queries share can be warm; a query's own text is cold on its first call."""
    trace = [
        make_trace_query(
            name,
            TraceStage(
                stage="draft",
                calls=(
                    TraceCall(
                        input_tokens=500,
                        output_tokens=10,
                        prefix=chain(("template", 200), (f"own-{name}", 100)),
                    ),
                ),
            ),
            workflow="w",
        )
        for name in ("a", "b")
    ]
    assert shape_from_trace(trace)["w"].stages["draft"].cached_tokens == 200.0


def test_remaining_work_of_a_dag_follows_the_longest_path() -> None:
    """A short lookup beside a long draft, both before the answer, is not on the critical path."""
    query = make_trace_query(
        "q",
        make_stage("plan", (100, 10)),
        make_stage("lookup", (100, 10), parents=(0,)),
        make_stage("draft", (100, 500), parents=(0,)),
        make_stage("answer", (100, 10), parents=(1, 2)),
        workflow="dag",
    )
    remaining = shape_from_trace([query])["dag"].remaining
    assert remaining["plan/0"] == {"answer": 1.0, "draft": 1.0}
    assert remaining["lookup/0"] == {"answer": 1.0}


def test_explicit_parents_of_a_chain_learn_the_same() -> None:
    """A chain written with parents has the shape of the chain without."""
    names = ["a", "b", "c", "d"]
    plain = make_trace_query("q", *(make_stage(name) for name in names))
    written = make_trace_query(
        "q",
        *(
            make_stage(name, parents=(index - 1,) if index else ())
            for index, name in enumerate(names)
        ),
    )
    assert shape_from_trace([plain]) == shape_from_trace([written])


@given(order=st.permutations(range(6)))
def test_learning_ignores_the_order_of_queries(order: list[int]) -> None:
    """Any permutation of the trace gives the same shape, up to rounding."""
    trace = generate(6, np.random.default_rng(5), "stress")
    one = shape_from_trace(trace)["text2sql"]
    other = shape_from_trace([trace[index] for index in order])["text2sql"]
    assert one.stages.keys() == other.stages.keys()
    for stage, estimate in one.stages.items():
        assert other.stages[stage].output_tokens == pytest.approx(estimate.output_tokens)
    for key, counts in one.remaining.items():
        assert other.remaining[key] == pytest.approx(counts)


def test_workflows_are_learned_apart() -> None:
    """Each workflow of a mixed trace has its own shape."""
    trace = [
        make_trace_query("a", make_stage("x"), workflow="one"),
        make_trace_query("b", make_stage("y"), workflow="two"),
    ]
    shapes = shape_from_trace(trace)
    assert {name: set(shape.stages) for name, shape in shapes.items()} == {
        "one": {"x"},
        "two": {"y"},
    }


def test_the_built_in_prior_has_the_published_means() -> None:
    """Every stage of text2sql is there with its published mean lengths."""
    shape = default_shapes()["text2sql"]
    assert set(shape.stages) == set(text2sql.STAGES)
    for stage, statistics in text2sql.STATISTICS.items():
        assert shape.stages[stage].input_tokens == statistics.input.mean
        assert shape.stages[stage].output_tokens == statistics.output.mean


def test_the_built_in_prior_knows_the_order_of_stages() -> None:
    """First comes everything; after the last unit test nothing."""
    remaining = default_shapes()["text2sql"].remaining
    first = remaining["information_retriever/0"]
    assert first["information_retriever"] == pytest.approx(3.0)
    assert first["generate_candidate"] == pytest.approx(1.0)
    assert first["revise"] == pytest.approx(0.6, abs=0.01)
    assert first["unit_tester"] == pytest.approx(3.0)
    assert remaining["unit_tester/2"] == {}
    assert "revise" not in remaining["unit_tester/0"]


def test_generated_queries_confirm_the_built_in_prior() -> None:
    """What is learned from 2,000 generated queries is what the prior says."""
    learned = shape_from_trace(generate(2_000, np.random.default_rng(3)))["text2sql"]
    prior = default_shapes()["text2sql"]
    for key in ("information_retriever/0", "generate_candidate/0", "revise/0", "unit_tester/1"):
        found_after, expected_after = learned.remaining[key], prior.remaining[key]
        for later in {*found_after, *expected_after}:
            expected = expected_after.get(later, 0.0)
            assert found_after.get(later, 0.0) == pytest.approx(expected, rel=0.1, abs=0.02)
    for stage, estimate in prior.stages.items():
        found = learned.stages[stage]
        assert found.input_tokens == pytest.approx(estimate.input_tokens, rel=0.02)
        assert found.max_output_tokens == pytest.approx(
            estimate.max_output_tokens, rel=0.1, abs=0.5
        )


def test_iterations_beyond_the_known_use_the_last() -> None:
    """`revise/40` was never seen: the last known iteration stands for it."""
    shape = default_shapes()["text2sql"]
    assert remaining_after(shape, "revise", 40) == shape.remaining["revise/9"]
    assert remaining_after(shape, "never seen", 0) is None


def test_an_endless_loop_keeps_a_bounded_shape() -> None:
    """500 rounds leave at most 64 entries per stage, so that a profile fits its message."""
    shape = shape_from_trace([_looping_query("q", 500)])["loop"]
    assert sum(key.startswith("revise/") for key in shape.remaining) == 64


@pytest.mark.parametrize(("siblings", "expected"), [(1.0, 50.0), (2.0, 66.425)])
def test_the_longest_of_several_draws(siblings: float, expected: float) -> None:
    """Uniform in 0..100, cut off at its 5th and 95th percentile: mean 50, longest of two 66.4."""
    lengths = text2sql.Lengths(50, 5, 50, 95)
    assert expected_longest(lengths, siblings) == pytest.approx(expected)


def test_the_longest_of_equal_lengths_is_that_length() -> None:
    """Without spread more siblings change nothing."""
    assert expected_longest(text2sql.Lengths(7, 7, 7, 7), 5.1) == pytest.approx(7.0)
