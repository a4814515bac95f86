"""The plots of a comparison, one setting each."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from services.cli.lab.axes import (
    draw_bars,
    draw_lines,
    draw_offered,
    finish_load,
    legend_below,
    log_seconds,
    new_figure,
    tidy,
)
from services.cli.lab.comparison import TARGET, Comparison, Contender
from services.cli.lab.detail_figures import alpha_figure, instances_figure
from services.cli.lab.grids import setting_title
from services.cli.lab.intervals import interval
from services.cli.lab.setting import Cell, Setting
from services.cli.lab.styles import BOUND, GREY, Style
from services.cli.lab.tightest import TARGETS

ABLATION = ("hexgen-flow", "wb+fcfs", "rr+pq", "vllm")


def figures_of(found: Comparison, setting: Setting) -> dict[str, Figure]:
    """Return the plots of one setting by short name."""
    figures = {
        "load": load_figure(found, setting),
        "limits": limits_figure(found, setting),
        "instances": instances_figure(found, setting),
    }
    present = [one for one in found.contenders() if one.policy in ABLATION]
    if len({one.policy for one in present}) > 2:
        figures["ablation"] = ablation_figure(found, setting, present)
    if any(curve.cell.setting == setting for curve in found.alpha_curves):
        figures["alpha"] = alpha_figure(found, setting)
    return figures


def overview_figure(found: Comparison) -> Figure:
    """Return how close each policy comes to the upper bound, one row per setting."""
    settings, contenders = found.plan.settings, found.contenders()
    figure = new_figure(
        10.5, 1.9 + 0.5 * len(settings), "How much of the upper bound each policy sustains"
    )
    axes = figure.subplots()
    places = np.arange(len(settings))[::-1]
    for place, contender in reversed(list(enumerate(contenders))):
        style = Style(contender, place)
        shares = [
            interval(found.sustained_qps(one, contender)).mean / found.bound_qps(one, contender)
            for one in settings
        ]
        # Rows are spread a little, so that equal policies do not hide each other.
        spread = 0.5 * (0.5 - (place + 0.5) / len(contenders))
        axes.plot(
            [share or np.nan for share in shares],
            places + spread,
            style.marker,
            color=style.colour,
            markersize=11 if place == 0 else 7.5,
            markerfacecolor=style.fill,
            label=contender.label,
            zorder=2.0 if place == 0 else 3.0,
        )
    tidy(axes)
    axes.set_yticks(places, [setting_title(one) for one in settings])
    axes.set_ylim(-0.6, len(settings) - 0.4)
    axes.set_xlim(left=0.0, right=1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.axvline(1.0, color=BOUND, linewidth=1.2, linestyle="--")
    axes.set_xlabel(
        f"rate up to which {TARGET:.0%} stay within their SLO, of the fleet's fluid capacity"
    )
    legend_below(figure, axes, is_reversed=True)
    return figure


def load_figure(found: Comparison, setting: Setting) -> Figure:
    """Return P95, attainment and goodput against the rate."""
    figure = new_figure(13.5, 5.0, f"{setting_title(setting)}: mean and 95% interval over seeds")
    p95, attained, goodput = figure.subplots(1, 3)
    draw_lines(p95, found, setting, "p95_s")
    draw_lines(attained, found, setting, "attainment")
    draw_lines(goodput, found, setting, "goodput_qps")
    log_seconds(p95)
    p95.set_title("P95 end-to-end time, seconds (log scale)", fontsize=10)
    attained.axhline(TARGET, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    attained.set_ylim(0.0, 1.02)
    attained.yaxis.set_major_formatter(PercentFormatter(1.0))
    attained.set_title("Queries answered within their SLO", fontsize=10)
    draw_offered(goodput, found, setting)
    goodput.set_title("Goodput: queries/s within SLO", fontsize=10)
    for axes in (p95, attained, goodput):
        finish_load(axes, found, setting)
    legend_below(figure, p95, is_reversed=True)
    return figure


def limits_figure(found: Comparison, setting: Setting) -> Figure:
    """Return how far each policy gets: sustained rate and tightest SLO."""
    contenders = found.contenders()
    figure = new_figure(12.0, 1.6 + 0.34 * len(contenders), setting_title(setting))
    rates, scales = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(contenders))[::-1]
    colours = [Style(one, place).colour for place, one in enumerate(contenders)]
    draw_bars(rates, places, [found.sustained(setting, one) for one in contenders], colours, 0.62)
    capacity = found.capacity_qps[setting]
    rates.axvline(capacity, color=BOUND, linestyle="--", linewidth=1.2)
    rates.annotate(
        f"upper bound {capacity:.3f}",
        (capacity, places[0] + 0.55),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=BOUND,
        fontsize=8,
    )
    rates.set_xlim(right=max(1.08 * capacity, rates.get_xlim()[1]))
    rates.set_yticks(places, [one.label for one in contenders])
    rates.set_xlabel("queries/s")
    rates.set_title(f"Rate up to which {TARGET:.0%} stay within their SLO", fontsize=10)
    for target, shift, alpha in zip(TARGETS, (0.17, -0.17), (1.0, 0.45), strict=True):
        values = [interval(found.scales[setting, one][target]) for one in contenders]
        draw_bars(scales, places + shift, values, colours, 0.32, alpha=alpha)
    whose = "a query's" if found.plan.setup.slo_base == "own" else "the mean"
    scales.set_xlabel(f"multiple of {whose} isolated time")
    scales.set_title(
        f"Tightest SLO met by {TARGETS[0]:.0%} (full) and {TARGETS[1]:.0%} (pale) "
        f"at {found.focus_qps[setting]:.3g} queries/s",
        fontsize=10,
    )
    return figure


def ablation_figure(found: Comparison, setting: Setting, present: Sequence[Contender]) -> Figure:
    """Return what each half of the paper's policy brings, at the focus rate."""
    cell = Cell(setting=setting, rate_qps=found.focus_qps[setting])
    capacity = found.capacity_qps[setting]
    title = (
        f"What dispatching (WB) and the urgency queue (PQ) bring: {setting_title(setting)}, "
        f"{cell.rate_qps:.3g} queries/s ({cell.rate_qps / capacity:.0%} of the upper bound)"
    )
    figure = new_figure(12.0, 0.9 + 0.36 * len(present) + 0.6, title)
    panels: tuple[tuple[Axes, str, str], ...] = tuple(
        zip(
            figure.subplots(1, 3, sharey=True),
            ("p95_s", "attainment", "goodput_qps"),
            ("P95, seconds", "within SLO", "goodput, queries/s"),
            strict=True,
        )
    )
    places = np.arange(len(present))[::-1]
    colours = [Style(one, place).colour for place, one in enumerate(present)]
    for axes, name, label in panels:
        values = [interval(found.values(cell, one, name)) for one in present]
        is_share = name == "attainment"
        write = "{:.1%}".format if is_share else None
        draw_bars(axes, places, values, colours, 0.62, write=write)
        axes.set_title(label, fontsize=10)
        if is_share:
            axes.set_xlim(0.0, 1.12)
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    panels[0][0].set_yticks(places, [one.label for one in present])
    return figure
