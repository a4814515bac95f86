"""How well questions were answered: accuracy by execution, latency, cost."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from services.cli.console import finite
from services.cli.text2sql.shown import latency_s
from services.text2sql.samples.writing import Question
from services.text2sql.sql.database import Rows
from shared.contracts.messages import QueryResult
from shared.scheduling.attainment import percentile

TOLERANCE = 1e-6


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One question's result beside what is right.

    Attributes:
        question: The question.
        result: What came back.
        is_right: Whether its rows are those of the gold statement.
        was_wrong_at_first: Whether the first candidate's first statement was another one and did
            not give the right rows, or none.
    """

    question: Question
    result: QueryResult
    is_right: bool
    was_wrong_at_first: bool


def same_rows(found: Sequence[Sequence[Any]], gold: Rows) -> bool:
    """Return whether rows are the right ones; their order counts where the gold statement has one.

    Numbers are compared with a tolerance, columns by their position.
    """
    if len(found) != len(gold.rows):
        return False
    first, second = list(found), list(gold.rows)
    if not gold.is_ordered:
        first, second = sorted(first, key=_sort_key), sorted(second, key=_sort_key)
    return all(
        len(row) == len(other) and all(map(_same, row, other))
        for row, other in zip(first, second, strict=True)
    )


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(value == other)


def _sort_key(row: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"{value:.6g}" if isinstance(value, float) else str(value) for value in row)


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Return the figures of a question set; times are workload seconds."""
    results = [one.result for one in scores]
    num = max(1, len(results))
    times = [latency_s(one) for one in results]
    corrected = sum(one.is_right and one.was_wrong_at_first for one in scores)
    calls = [call for one in results for call in one.calls]
    return {
        "questions": len(results),
        "execution_accuracy": sum(one.is_right for one in scores) / num,
        "unanswered": sum(one.kind == "unanswered" for one in results),
        "kinds": dict(Counter(one.kind for one in results)),
        "first_candidates_wrong": sum(one.was_wrong_at_first for one in scores),
        "corrected": corrected,
        "p50_s": finite(percentile(times, 50)),
        "p95_s": finite(percentile(times, 95)),
        "p99_s": finite(percentile(times, 99)),
        "attainment": sum(
            one.kind == "completed" and latency_s(one) <= one.slo_s for one in results
        )
        / num,
        "calls_per_query": len(calls) / num,
        "input_tokens_per_query": sum(call.usage.input_tokens for call in calls) / num,
        "output_tokens_per_query": sum(call.usage.output_tokens for call in calls) / num,
        "database_s_per_query": sum(one.database_s for one in results) / num,
        "stages": dict(Counter(call.stage for call in calls)),
        "wrong": [
            {
                "id": one.question.id,
                "kind": one.result.kind,
                "reason": one.result.reason,
                "sql": one.result.sql,
            }
            for one in scores
            if not one.is_right
        ],
    }
