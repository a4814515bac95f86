"""The tuner's spans: one per look at the window that decides, and in it one per pool.

The root span `tune` is a trace of its own, as no single query is behind a decision. What is
published on `control` carries its context, so whoever applies a new α can go on from there.
"""

import math
from contextlib import AbstractContextManager

from shared.runtime.tracing import Span, Traces, Value, around_here
from shared.runtime.tuning_journal import Decided


def around_decisions(
    traces: Traces, *, trigger: str, num_queries: int
) -> AbstractContextManager[Span]:
    """Return the block in which a window is decided about.

    Args:
        traces: Where spans go.
        trigger: Why it is due.
        num_queries: Queries judged.
    """
    attributes: dict[str, Value | None] = {
        "hexflow.trigger": trigger,
        "hexflow.num_queries": num_queries,
    }
    return traces.around("tune", "internal", None, attributes=attributes)


def trace_decision(decided: Decided) -> None:
    """Add the span of one pool's decision to the block that runs."""
    error = decided.calibration_error
    attributes: dict[str, Value | None] = {
        "hexflow.pool": decided.pool,
        "hexflow.alpha.before": decided.before,
        "hexflow.alpha": decided.alpha,
        "hexflow.alpha.best": decided.best_alpha,
        "hexflow.alpha.num_tried": decided.num_alphas,
        "hexflow.is_change": decided.is_change,
        "hexflow.reason": decided.reason,
        "hexflow.num_queries": decided.num_queries,
        "hexflow.p95.observed_s": _finite(decided.observed_p95_s),
        "hexflow.p95.simulated_s": _finite(decided.simulated_p95_s),
        "hexflow.calibration_error": None if error is None else _finite(error),
    }
    with around_here("decide", "internal", attributes=attributes):
        pass  # it was decided before it is told


def _finite(value: float) -> float | None:
    """Return a number that every collector takes; None where there is none."""
    return value if math.isfinite(value) else None
