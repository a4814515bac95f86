"""The plot of an adaptation over time: α with its reasons, P95, and how far the replay was off."""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from services.cli.adapt_results import START_ALPHA, Adapted
from services.cli.tuning_plots import BLUE, GREEN, GREY, ORANGE, alpha_axis, wrapped
from shared.scheduling.attainment import percentile

RED = "#b3261e"
ROLLING = 200
BELIEVED, WANTED = 0.2, 0.05
MOST_SHOWN = 0.5

Edges = Sequence[float]


def adaptation_figure(adapted: Adapted) -> Figure:
    """Return panels over time: α, P95 against the best constant, calibration error; the reasons."""
    figure = Figure(figsize=(13.0, 10.0), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(1.0, _height(adapted)))
    plots, reasons = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    panels = plots.subplots(3, 1, sharex=True, height_ratios=(1.1, 1.0, 0.5))
    _write_reasons(reasons, adapted)
    end_s = max([at_s for at_s, _ in adapted.latencies] + [1.0])
    edges = [phase.starts_s for phase in adapted.phases] + [end_s]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, alpha=0.25)
        for edge in edges[1:-1]:
            axes.axvline(edge, color=GREY, linestyle=":", linewidth=1.0)
    _draw_alpha(panels[0], adapted, edges)
    _draw_p95(panels[1], adapted, edges)
    _draw_calibration(panels[2], adapted)
    panels[2].set_xlabel("workload seconds")
    return figure


def _draw_alpha(axes: Axes, adapted: Adapted, edges: Edges) -> None:
    changes = [one for one in adapted.decisions if one.is_change]
    times_s = [0.0, *[one.at_s for one in changes], edges[-1]]
    values = [START_ALPHA, *[one.alpha for one in changes]]
    axes.step(times_s, [*values, values[-1]], where="post", color=BLUE, linewidth=2, label="α live")
    for phase, (start_s, stop_s) in zip(adapted.phases, pairwise(edges), strict=True):
        label = "best constant of the phase" if start_s == edges[0] else "_"
        axes.hlines(phase.best_alpha, start_s, stop_s, ORANGE, "--", linewidth=1.5, label=label)
        axes.annotate(
            wrapped(phase.name, 22),
            ((start_s + stop_s) / 2, 1.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=8,
        )
    _draw_kept(axes, adapted)
    for number, one in enumerate(changes, 1):
        axes.annotate(
            str(number),
            (one.at_s, (one.before + one.alpha) / 2.0),
            ha="center",
            va="center",
            fontsize=8,
            bbox={"boxstyle": "circle", "facecolor": "white", "edgecolor": BLUE},
        )
    for moment in adapted.moments:
        if moment.what == "speed":
            axes.axvline(moment.at_s, color=GREEN, linewidth=0.9, alpha=0.7)
    axes.plot([], [], color=GREEN, linewidth=0.9, label="an instance's speed or hit rate learned")
    alpha_axis(axes, "y")
    axes.set_ylim(-0.0005, 2.2)
    axes.set_ylabel("α")
    axes.legend(fontsize=7, loc="lower left", framealpha=0.9)


def _height(adapted: Adapted) -> float:
    """Return the height of the reasons, compared with the plots."""
    return 0.05 + 0.02 * sum(one.is_change for one in adapted.decisions)


def _write_reasons(part: SubFigure, adapted: Adapted) -> None:
    """Write why α changed, a line a change."""
    changes = [one for one in adapted.decisions if one.is_change]
    lines = [
        f"{number:2d}  {one.at_s:8,.0f} s  {one.before:7.3g} → {one.alpha:<7.3g} "
        f"{one.trigger:11s} {one.reason}; {one.num_queries} queries, "
        f"replay off by {one.calibration_error or 0.0:.1%}"
        for number, one in enumerate(changes, 1)
    ]
    part.text(
        0.03,
        0.95,
        "\n".join(lines) or "α was never changed",
        va="top",
        fontsize=8,
        family="monospace",
    )


def _draw_kept(axes: Axes, adapted: Adapted) -> None:
    """Mark the decisions that left α as it was, by why."""
    kept = [one for one in adapted.decisions if not one.is_change]
    for label, marker, color, word in (
        ("kept: it is the predicted best", ".", BLUE, "predicted best"),
        ("kept: the gain is not sure, or within the margin", "|", GREY, "margin"),
        ("kept: the replay is not believed", "x", RED, "off by"),
    ):
        found = [one for one in kept if word in one.reason]
        axes.plot(
            [one.at_s for one in found],
            [one.alpha for one in found],
            marker,
            color=color,
            markersize=7,
            label=label,
        )


def _draw_p95(axes: Axes, adapted: Adapted, edges: Edges) -> None:
    latencies = adapted.latencies
    axes.plot(
        [at_s for at_s, _ in latencies],
        [latency_s for _, latency_s in latencies],
        ".",
        color=GREY,
        markersize=1.5,
        alpha=0.25,
        label="a query, by its arrival",
    )
    ends = range(ROLLING, len(latencies) + 1)
    axes.plot(
        [latencies[end - 1][0] for end in ends],
        [percentile([s for _, s in latencies[end - ROLLING : end]], 95) for end in ends],
        color=BLUE,
        linewidth=1.8,
        label=f"P95 of {ROLLING} queries, live",
    )
    for phase, (start_s, stop_s) in zip(adapted.phases, pairwise(edges), strict=True):
        axes.hlines(
            phase.best_p95_s,
            phase.judged_from_s,
            stop_s,
            ORANGE,
            linewidth=2.5,
            label="best constant α, exhaustive simulation" if start_s == edges[0] else "_",
        )
    axes.set_yscale("log")
    axes.set_ylabel("end-to-end time, seconds")
    axes.legend(fontsize=7, loc="upper left", framealpha=0.9)


def _draw_calibration(axes: Axes, adapted: Adapted) -> None:
    errors = [
        (one.at_s, min(MOST_SHOWN, one.calibration_error))
        for one in adapted.decisions
        if one.calibration_error is not None
    ]
    axes.plot([at_s for at_s, _ in errors], [error for _, error in errors], "o", color=BLUE)
    axes.axhline(WANTED, color=GREEN, linewidth=1.0, label="5%")
    axes.axhline(BELIEVED, color=RED, linewidth=1.0, label="20%: not believed above")
    axes.set_ylim(0.0, MOST_SHOWN + 0.02)
    axes.set_ylabel("replay off by")
    axes.legend(fontsize=7, loc="upper left", framealpha=0.9)
