"""Generated queries against the published statistics."""

import numpy as np
import pytest

from shared.domain import text2sql
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.simulation.generator import generate
from shared.simulation.traces import dump_authors_trace

NATURAL = generate(4_000, np.random.default_rng(11))
STRESS = generate(2_000, np.random.default_rng(12), "stress")


def _lengths(queries: tuple[TraceQuery, ...], stage: str) -> np.ndarray:
    return np.array(
        [
            (call.input_tokens, call.output_tokens)
            for query in queries
            for one in query.stages
            if one.stage == stage
            for call in one.calls
        ]
    )


def _counts(queries: tuple[TraceQuery, ...], stage: str) -> list[int]:
    return [sum(one.stage == stage for one in query.stages) for query in queries]


@pytest.mark.parametrize("queries", [NATURAL, STRESS], ids=["natural", "stress"])
@pytest.mark.parametrize("stage", text2sql.STAGES)
def test_lengths_have_the_published_mean_and_percentiles(
    queries: tuple[TraceQuery, ...], stage: str
) -> None:
    """Means within 3%, 5th, 50th and 95th percentile within 3% or 12 tokens."""
    lengths = _lengths(queries, stage)
    statistics = text2sql.STATISTICS[stage]
    for column, expected in enumerate((statistics.input, statistics.output)):
        assert lengths[:, column].mean() == pytest.approx(expected.mean, rel=0.03, abs=1.0)
        found = np.percentile(lengths[:, column], [5, 50, 95])
        assert found == pytest.approx((expected.p5, expected.p50, expected.p95), rel=0.03, abs=12)


def test_calls_per_query_are_those_published() -> None:
    """Four retrievals, two candidates, three testers; 0 or 1 keyword and unit-test calls."""
    for query in NATURAL:
        calls = {
            stage: sum(len(one.calls) for one in query.stages if one.stage == stage)
            for stage in text2sql.STAGES
        }
        assert calls["information_retriever"] == 4
        assert calls["generate_candidate"] == 2
        assert calls["unit_tester"] == 3
        assert calls["extract_keywords"] in {0, 1}
        assert calls["generate_unit_test"] in {0, 1}
        assert calls["evaluate"] in ({3, 4, 5, 6} if calls["generate_unit_test"] else {0})


def test_natural_runs_need_no_revision_in_seven_of_ten() -> None:
    """About 70% without any, none above ten."""
    counts = _counts(NATURAL, "revise")
    assert counts.count(0) / len(counts) == pytest.approx(0.7, abs=0.03)
    assert max(counts) <= 10


def test_stress_runs_spread_revisions_evenly() -> None:
    """0 to 10 revisions, each count in about one query of eleven."""
    counts = _counts(STRESS, "revise")
    shares = [counts.count(number) / len(counts) for number in range(11)]
    assert sum(shares) == 1.0
    assert shares == pytest.approx([1 / 11] * 11, abs=0.03)


def test_stages_come_in_the_order_of_the_workflow() -> None:
    """Retrieval, candidates, revisions, then tests; iterations count up from 0."""
    order = [
        "information_retriever",
        "extract_keywords",
        *["information_retriever"] * 3,
        "generate_candidate",
        "unit_tester",
        "generate_unit_test",
        "unit_tester",
        "evaluate",
        "unit_tester",
    ]
    for query in STRESS:
        names = [one.stage for one in query.stages if one.stage != "revise"]
        optional = {"extract_keywords", "generate_unit_test", "evaluate"}
        skipped = optional - set(names)
        assert names == [name for name in order if name not in skipped]
        revisions = [one.iteration for one in query.stages if one.stage == "revise"]
        assert revisions == list(range(len(revisions)))
        first = [one.stage for one in query.stages].index("generate_candidate")
        assert all(one.stage == "revise" for one in query.stages[first + 1 :][: len(revisions)])


def test_candidates_of_a_query_differ_by_their_templates() -> None:
    """The same question under two templates: prompts differ by exactly 9,158 - 5,292 tokens."""
    for query in NATURAL:
        (stage,) = [one for one in query.stages if one.stage == "generate_candidate"]
        long, short = stage.calls
        assert long.input_tokens - short.input_tokens == 9_158 - 5_292
        assert (long.prefix[0].tokens, short.prefix[0].tokens) == (9_158, 5_292)


def test_lengths_of_a_query_hang_together() -> None:
    """Large schemas make both candidates and revisions long; candidates' outputs correlate."""
    rows = []
    for query in STRESS:
        calls = {one.stage: one.calls for one in query.stages}
        if "revise" in calls:
            long, short = calls["generate_candidate"]
            rows.append(
                (
                    short.input_tokens,
                    calls["revise"][0].input_tokens,
                    long.output_tokens,
                    short.output_tokens,
                )
            )
    correlations = np.corrcoef(np.array(rows).T)
    assert correlations[0, 1] > 0.6
    assert correlations[2, 3] > 0.5


def test_parallel_evaluations_are_nearly_equal() -> None:
    """Prompts of one query's evaluations differ by a dozen tokens at most."""
    for query in NATURAL:
        for stage in query.stages:
            if stage.stage == "evaluate":
                inputs = [call.input_tokens for call in stage.calls]
                assert max(inputs) - min(inputs) <= 12


def test_the_same_seed_gives_the_same_bytes() -> None:
    """Equal generators write equal traces, others do not."""
    texts = [dump_authors_trace(generate(20, np.random.default_rng(s))) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_every_prefix_fits_its_prompt() -> None:
    """Templates are part of the prompts."""
    for query in STRESS:
        for stage in query.stages:
            for call in stage.calls:
                assert 0 < sum(part.tokens for part in call.prefix) <= call.input_tokens


@pytest.mark.parametrize(("number", "mode"), [(0, "natural"), (-3, "natural"), (5, "wild")])
def test_impossible_requests_are_refused(number: int, mode: str) -> None:
    """At least one query, in a known mode."""
    with pytest.raises(ConfigError):
        generate(number, np.random.default_rng(0), mode)
