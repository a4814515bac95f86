"""Plots about α: P95 over α with its uncertainty, and an adaptation over time."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shared.scheduling.attainment import percentile
from shared.scheduling.judgement import Judgement, Replayed, p95_interval_s

if TYPE_CHECKING:
    from services.cli.adapt_results import Moment, PhaseResult

BLUE, ORANGE, GREEN, GREY = "#0b6e99", "#d9730d", "#6b8e23", "#6b6b6b"
LINEAR_BELOW = 0.003
START_ALPHA = 0.7
ROLLING = 100
TICKS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def alpha_axis(axes: Axes, which: str) -> None:
    """Make an axis logarithmic in α, with zero on it."""
    scale = {"x": axes.set_xscale, "y": axes.set_yscale}[which]
    scale("symlog", linthresh=LINEAR_BELOW)
    ticks = {"x": axes.set_xticks, "y": axes.set_yticks}[which]
    ticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()


def alpha_figure(runs: Sequence[Replayed], judgement: Judgement, current: float) -> Figure:
    """Return P95 over α with its 95% bootstrap band, the α in force and the one chosen."""
    decision = judgement.decision
    figure = Figure(figsize=(7.6, 4.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, alpha=0.25)
    ordered = sorted(runs, key=_alpha)
    alphas = [run.alpha for run in ordered]
    bands = [p95_interval_s(run.latencies_s) for run in ordered]
    lows, highs = [low for low, _ in bands], [high for _, high in bands]
    axes.fill_between(alphas, lows, highs, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(alphas, [run.p95_s for run in ordered], "o-", color=BLUE, markersize=4)
    barred = [run for run in ordered if run.alpha in judgement.ineligible]
    if barred:
        axes.plot(
            [run.alpha for run in barred],
            [run.p95_s for run in barred],
            "x",
            color=GREY,
            markersize=8,
            label="not eligible: more work than an instance was seen to do",
        )
    axes.axvline(current, color=GREY, linestyle="--", linewidth=1.2, label=f"in force: {current:g}")
    axes.axvline(decision.alpha, color=ORANGE, linewidth=1.6, label=f"chosen: {decision.alpha:.4g}")
    alpha_axis(axes, "x")
    axes.set_xlim(-0.001, 1.3)
    axes.set_xlabel("α")
    axes.set_ylabel("P95 end-to-end, seconds (band: 95% bootstrap)")
    axes.set_ylim(bottom=0)
    axes.set_title(_wrapped(decision.reason), fontsize=9)
    axes.legend(fontsize=8, loc="upper left", framealpha=0.9)
    return figure


def _alpha(run: Replayed) -> float:
    return run.alpha


def _wrapped(text: str, width: int = 90) -> str:
    if len(text) <= width:
        return text
    at = text.rfind(" ", 0, width)
    return f"{text[:at]}\n{_wrapped(text[at + 1 :], width)}"


def adaptation_figure(
    phases: "Sequence[PhaseResult]",
    moments: "Sequence[Moment]",
    latencies: Sequence[tuple[float, float]],
) -> Figure:
    """Return α with its reasons above, and P95 over time against the best constant below."""
    figure = Figure(figsize=(12.0, 7.4), dpi=130, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1.0, 1.1))
    end_s = max([at_s for at_s, _ in latencies] + [1.0])
    edges = [phase.starts_s for phase in phases] + [end_s]
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, alpha=0.25)
        for edge in edges[1:-1]:
            axes.axvline(edge, color=GREY, linestyle=":", linewidth=1.0)
    _draw_alpha(top, phases, moments, edges)
    _draw_p95(bottom, phases, latencies, edges)
    return figure


def _draw_alpha(
    axes: Axes, phases: "Sequence[PhaseResult]", moments: "Sequence[Moment]", edges: Sequence[float]
) -> None:
    alphas = [(moment.at_s, moment.value or 0.0) for moment in moments if moment.what == "alpha"]
    times_s = [0.0, *[at_s for at_s, _ in alphas], edges[-1]]
    values = [START_ALPHA, *[alpha for _, alpha in alphas]]
    axes.step(times_s, [*values, values[-1]], where="post", color=BLUE, linewidth=2, label="α live")
    for phase, (start_s, stop_s) in zip(phases, pairwise(edges), strict=True):
        label = "best constant of the phase" if start_s == edges[0] else "_"
        axes.hlines(phase.best_alpha, start_s, stop_s, ORANGE, "--", linewidth=1.5, label=label)
        axes.annotate(
            phase.name,
            ((start_s + stop_s) / 2, 1.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=8,
        )
    for number, moment in enumerate(m for m in moments if m.what == "alpha"):
        axes.annotate(
            _wrapped(moment.reason, 34),
            (moment.at_s, moment.value or 0.0),
            xytext=(6, -8 if number % 2 else 10),
            textcoords="offset points",
            fontsize=6,
            va="top" if number % 2 else "bottom",
        )
    for moment in moments:
        if moment.what == "speed":
            axes.axvline(moment.at_s, color=GREEN, linewidth=0.9, alpha=0.8)
    axes.plot([], [], color=GREEN, linewidth=0.9, label="an instance's speed or hit rate learned")
    alpha_axis(axes, "y")
    axes.set_ylim(-0.0005, 1.6)
    axes.set_ylabel("α")
    axes.legend(fontsize=7, loc="lower left", framealpha=0.9)


def _draw_p95(
    axes: Axes,
    phases: "Sequence[PhaseResult]",
    latencies: Sequence[tuple[float, float]],
    edges: Sequence[float],
) -> None:
    axes.plot(
        [at_s for at_s, _ in latencies],
        [latency_s for _, latency_s in latencies],
        ".",
        color=GREY,
        markersize=2,
        alpha=0.4,
        label="a query",
    )
    ends = range(ROLLING, len(latencies) + 1)
    axes.plot(
        [latencies[end - 1][0] for end in ends],
        [percentile([s for _, s in latencies[end - ROLLING : end]], 95) for end in ends],
        color=BLUE,
        linewidth=1.8,
        label=f"P95 of {ROLLING} queries, live",
    )
    for phase, (start_s, stop_s) in zip(phases, pairwise(edges), strict=True):
        is_first = start_s == edges[0]
        axes.hlines(
            phase.best_p95_s,
            (start_s + stop_s) / 2,
            stop_s,
            ORANGE,
            linewidth=2.5,
            label="best constant α, exhaustive simulation" if is_first else "_",
        )
    axes.set_yscale("log")
    axes.set_xlabel("workload seconds")
    axes.set_ylabel("end-to-end time, seconds")
    axes.legend(fontsize=7, loc="upper left", framealpha=0.9)
