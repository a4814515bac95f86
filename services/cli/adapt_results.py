"""What an adaptation run came to: every phase beside its best constant α."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from services.cli.adaptation import Phase, scenario_of_phase
from services.cli.console import finite
from services.cli.tally import Tally
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.runtime.tuning_journal import Decided
from shared.scheduling.attainment import percentile
from shared.simulation.window_replay import sweep_scenario

START_ALPHA = 0.7
EXHAUSTIVE = (
    *(0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.03, 0.04, 0.07, 0.1, 0.14, 0.2, 0.28),
    *(0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0),
)
ADAPTED_AFTER = 1_200  # queries: two windows


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Something the tuner published.

    Attributes:
        at_s: Seconds since the run began.
        what: `alpha`, `speed` or `profile`.
        key: Pool, instance or workflow.
        value: α or factor; None for a profile.
        reason: Why, for people.
    """

    at_s: float
    what: str
    key: str
    value: float | None = None
    reason: str = ""


class PhaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """A phase, live and simulated.

    Attributes:
        name: For people.
        starts_s: Seconds since the run began.
        judged_from_s: Since when its queries are judged: two windows after its beginning.
        num_judged: How many those are.
        alpha: In force at its end.
        live_p95_s: Of the queries judged, seconds.
        tuned_p95_s: The same queries simulated under `alpha`, seconds.
        best_alpha: Best constant by exhaustive simulation.
        best_p95_s: Its P95, seconds.
        p95_by_alpha: All of them.
    """

    name: str
    starts_s: float
    judged_from_s: float
    num_judged: int
    alpha: float
    live_p95_s: float
    tuned_p95_s: float
    best_alpha: float
    best_p95_s: float
    p95_by_alpha: dict[str, float]


class Adapted(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Attributes:
        phases: In order.
        moments: What the tuner published.
        decisions: What it decided, α kept included.
        latencies: (arrival since the run began, end-to-end time) of every completed query, seconds.
        time_scale: Workload seconds per wall second.
        hop_s: Time of one message, workload seconds.
    """

    phases: tuple[PhaseResult, ...]
    moments: tuple[Moment, ...]
    decisions: tuple[Decided, ...]
    latencies: tuple[tuple[float, float], ...]
    time_scale: float
    hop_s: float


def judged_against_best(
    done: Sequence[tuple[Phase, tuple[TraceQuery, ...], float, Tally]],
    fleet: tuple[InstanceSpec, ...],
    moments: Sequence[Moment],
    hop_s: float,
) -> tuple[PhaseResult, ...]:
    """Return every phase with its best constant α by exhaustive simulation."""
    ends_s = [starts_s for _, _, starts_s, _ in done[1:]] + [math.inf]
    return tuple(
        _phase_result(phase, queries, starts_s, tally, fleet, _alpha_at(moments, end_s), hop_s)
        for (phase, queries, starts_s, tally), end_s in zip(done, ends_s, strict=True)
    )


def _alpha_at(moments: Sequence[Moment], at_s: float) -> float:
    alphas = [m.value for m in moments if m.what == "alpha" and m.at_s < at_s]
    return alphas[-1] if alphas and alphas[-1] is not None else START_ALPHA


def _phase_result(
    phase: Phase,
    queries: tuple[TraceQuery, ...],
    starts_s: float,
    tally: Tally,
    fleet: tuple[InstanceSpec, ...],
    alpha: float,
    hop_s: float,
) -> PhaseResult:
    first = min(ADAPTED_AFTER, len(queries) // 2)
    from_s = queries[first].arrival_s or 0.0
    began_s = min((end.arrival_s for end in tally.ends), default=0.0) - (
        queries[0].arrival_s or 0.0
    )
    live = [e.latency_s for e in tally.ends if e.completed and e.arrival_s - began_s >= from_s]
    scenario = scenario_of_phase(phase, queries, fleet, hop_s=hop_s)
    runs = sweep_scenario(scenario, sorted({*EXHAUSTIVE, alpha}))
    p95_s = {run.alpha: percentile(list(run.latencies_s[first:]), 95) for run in runs}
    best = min(p95_s, key=lambda one: (p95_s[one], one))
    return PhaseResult(
        name=phase.name,
        starts_s=starts_s,
        judged_from_s=starts_s + from_s,
        num_judged=len(queries) - first,
        alpha=alpha,
        live_p95_s=percentile(live, 95),
        tuned_p95_s=p95_s[alpha],
        best_alpha=best,
        best_p95_s=p95_s[best],
        p95_by_alpha={f"{one:.6g}": value for one, value in p95_s.items()},
    )


def best_constant(phases: Sequence[PhaseResult]) -> tuple[float, float]:
    """Return the constant α whose worst phase is least bad, and its P95 ÷ the best's there."""
    worst = {
        alpha: max(phase.p95_by_alpha[f"{alpha:.6g}"] / phase.best_p95_s for phase in phases)
        for alpha in EXHAUSTIVE
    }
    alpha = min(worst, key=lambda one: (worst[one], one))
    return alpha, worst[alpha]


def results_table(adapted: Adapted) -> Table:
    """Return the phases for people."""
    title = f"P95 of each phase's queries after the first {ADAPTED_AFTER:,} (or half), seconds"
    table = Table(title=title, title_justify="left")
    for name in ("phase", "α", "live", "simulated", "best α", "best", "live ÷ best", "sim ÷ best"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in adapted.phases:
        table.add_row(
            phase.name,
            f"{phase.alpha:.3g}",
            f"{phase.live_p95_s:.1f}",
            f"{phase.tuned_p95_s:.1f}",
            f"{phase.best_alpha:.3g}",
            f"{phase.best_p95_s:.1f}",
            f"{phase.live_p95_s / phase.best_p95_s:.2f}",
            f"{phase.tuned_p95_s / phase.best_p95_s:.2f}",
        )
    return table


def decisions_table(adapted: Adapted) -> Table:
    """Return every decision with its reason, for people."""
    table = Table(title="decisions", title_justify="left")
    for name in ("at", "trigger", "queries", "P95 seen", "replayed", "off by", "α", "reason"):
        table.add_column(name, justify="left" if name in {"trigger", "reason"} else "right")
    for one in adapted.decisions:
        error = one.calibration_error
        table.add_row(
            f"{one.at_s:,.0f} s",
            one.trigger,
            f"{one.num_queries} ({one.num_censored} running)",
            f"{one.observed_p95_s:.1f} s",
            f"{one.simulated_p95_s:.1f} s",
            "" if error is None else f"{error:.1%}",
            f"{one.before:.3g} → {one.alpha:.3g}" if one.is_change else f"{one.alpha:.3g}",
            one.reason,
        )
    return table


def adapted_json(adapted: Adapted) -> dict[str, Any]:
    """Return the JSON object of `hexflow adapt --json`."""
    alpha, worst = best_constant(adapted.phases)
    content: dict[str, Any] = msgspec.to_builtins(adapted)
    for phase in content["phases"]:
        phase["live_p95_s"] = finite(phase["live_p95_s"])
    del content["latencies"]
    return {**content, "best_constant_alpha": alpha, "best_constant_worst_ratio": worst}
