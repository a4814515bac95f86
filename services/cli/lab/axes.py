"""Parts that the lab's plots are made of."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from services.cli.lab.comparison import Comparison
from services.cli.lab.intervals import Interval, interval
from services.cli.lab.setting import Cell, Setting
from services.cli.lab.styles import BOUND, GREY, Style

DPI = 110
LONG_LABEL = 18


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure; sizes in inches."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure


def draw_lines(axes: Axes, found: Comparison, setting: Setting, name: str) -> None:
    """Draw one measure of every policy against the rate, with confidence bands."""
    rates = found.rates_qps(setting)
    for place, contender in reversed(list(enumerate(found.contenders()))):
        style = Style(contender, place)
        cells = [Cell(setting=setting, rate_qps=rate) for rate in rates]
        values = [interval(found.values(cell, contender, name)) for cell in cells]
        axes.plot(
            rates,
            [value.mean for value in values],
            style.line,
            color=style.colour,
            linewidth=style.width,
            marker=style.marker,
            markersize=4.5,
            markerfacecolor=style.fill,
            label=contender.label,
            zorder=3.0 if place == 0 else 2.0,
        )
        axes.fill_between(
            rates,
            [value.low for value in values],
            [value.high for value in values],
            color=style.colour,
            alpha=0.12,
            linewidth=0,
        )


def draw_offered(axes: Axes, found: Comparison, setting: Setting) -> None:
    """Draw what arrives and what could be served at most."""
    rates, capacity = found.rates_qps(setting), found.capacity_qps[setting]
    axes.plot(rates, rates, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)))
    middle = rates[len(rates) // 2]
    axes.annotate(
        "all that arrives",
        (middle, middle),
        xytext=(-4, 6),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=GREY,
    )
    axes.axhline(capacity, color=BOUND, linewidth=1.2, linestyle="--")
    axes.set_ylim(0.0, 1.08 * max(capacity, rates[-1]))


def finish_load(axes: Axes, found: Comparison, setting: Setting) -> None:
    """Label the rate axis, with the share of the upper bound on top."""
    rates, capacity = found.rates_qps(setting), found.capacity_qps[setting]
    tidy(axes)
    axes.set_xlabel("arrivals, queries/s")
    spread = max(rates[-1], capacity) - rates[0]
    axes.set_xlim(rates[0] - 0.03 * spread, max(rates[-1], capacity) + 0.05 * spread)
    axes.axvline(capacity, color=BOUND, linewidth=1.2, linestyle="--")
    axes.annotate(
        "upper bound",
        (capacity, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(-3, 0),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="bottom",
        fontsize=8,
        color=BOUND,
    )
    axes.secondary_xaxis(
        "top",
        functions=(lambda x: np.asarray(x) / capacity, lambda x: np.asarray(x) * capacity),
    ).xaxis.set_major_formatter(PercentFormatter(1.0))


def draw_bars(
    axes: Axes,
    places: np.ndarray[Any, Any],
    values: Sequence[Interval],
    colours: Sequence[str],
    height: float,
    *,
    alpha: float = 1.0,
    write: Callable[[float], str] | None = None,
) -> None:
    """Draw horizontal bars with intervals and values, as `write` writes them."""
    means = [value.mean if math.isfinite(value.mean) else 0.0 for value in values]
    halves = [value.half if math.isfinite(value.half) else 0.0 for value in values]
    axes.barh(places, means, height, color=colours, alpha=alpha)
    axes.errorbar(means, places, xerr=halves, fmt="none", ecolor="#333333", elinewidth=1.0)
    # Wide intervals of few seeds must not squeeze the bars.
    limit = 1.3 * max(*means, 1e-9)
    for place, value, mean, half in zip(places, values, means, halves, strict=True):
        text = (write or short)(mean) if math.isfinite(value.mean) else "none"
        axes.annotate(
            text,
            (min(mean + half, 0.9 * limit), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    tidy(axes)
    axes.set_xlim(0.0, limit)


def legend_below(figure: Figure, axes: Axes, *, is_reversed: bool = False) -> None:
    """Put the legend of a panel under the figure, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if is_reversed:
        handles, labels = handles[::-1], labels[::-1]
    columns = 7 if max(map(len, labels)) <= LONG_LABEL else 5
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False
    )


def short(value: float) -> str:
    """Return a number of about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def log_seconds(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers at 1, 2 and 5.

    It spans the lines; confidence bands may reach beyond.
    """
    values = [np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()]
    drawn = np.concatenate(values) if values else np.empty(0)
    drawn = drawn[np.isfinite(drawn) & (drawn > 0.0)]
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if len(drawn):
        axes.set_ylim(float(drawn.min()) / 1.2, float(drawn.max()) * 1.2)


def tidy(axes: Axes) -> None:
    """Take away what distracts."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, alpha=0.25)
    axes.set_axisbelow(True)
