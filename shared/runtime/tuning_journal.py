"""What the tuner decided and why, for whoever listens: a log line, an experiment."""

from collections.abc import Callable

import msgspec


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One decision about one pool.

    Attributes:
        at_s: When, mesh clock.
        pool: Whose α.
        trigger: Why it was due: `first`, `schedule`, `change` or `degradation`.
        before: α until then.
        alpha: α from then on.
        is_change: Whether it differs.
        best_alpha: The predicted best, even when it is not adopted.
        reason: One sentence for people.
        num_queries: Queries judged.
        num_censored: How many of them were still running.
        observed_p95_s: Their P95 as measured, seconds; NaN: none had ended.
        simulated_p95_s: The same from the replay of the window as it was, seconds.
        calibration_error: |simulated / observed - 1|; None: unknown.
        num_alphas: How many α were tried.
        ineligible: Those that would give an instance far more work than it was seen to do.
    """

    at_s: float
    pool: str
    trigger: str
    before: float
    alpha: float
    is_change: bool
    best_alpha: float
    reason: str
    num_queries: int
    num_censored: int
    observed_p95_s: float
    simulated_p95_s: float
    calibration_error: float | None
    num_alphas: int
    ineligible: tuple[float, ...] = ()


Journal = Callable[[Decided], None]


def unheard(_: Decided) -> None:
    """Listen to nothing."""
