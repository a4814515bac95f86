"""Plots of what lies behind a comparison: the instances, and the search for α."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, PercentFormatter

from services.cli.lab.axes import legend_below, log_seconds, new_figure
from services.cli.lab.comparison import Comparison, Contender
from services.cli.lab.grids import setting_title
from services.cli.lab.setting import Cell, Setting
from services.cli.lab.steady import Measured
from services.cli.lab.styles import BOUND, Style

Pick = Callable[[Measured, str], float]


def instances_figure(found: Comparison, setting: Setting) -> Figure:
    """Return how busy each instance is at the focus rate, and how much it batches."""
    cell = Cell(setting=setting, rate_qps=found.focus_qps[setting])
    contenders = found.contenders()
    names = sorted(found.rows(cell, contenders[0])[0].measured.instances)
    figure = new_figure(
        13.0, 4.6, f"Instances at {cell.rate_qps:.3g} queries/s: {setting_title(setting)}"
    )
    busy, batch, tokens = figure.subplots(1, 3)
    width = 0.84 / len(contenders)
    for place, contender in enumerate(contenders):
        style = Style(contender, place)
        left = np.arange(len(names)) - 0.42 + width * (place + 0.5)
        for axes, pick in ((busy, _utilisation), (batch, _batch), (tokens, _token_share)):
            heights = [_mean_over_seeds(found, cell, contender, name, pick) for name in names]
            axes.bar(
                left,
                heights,
                width,
                color=style.fill,
                edgecolor=style.colour,
                linewidth=0.8,
                label=contender.label,
            )
    for axes, title in (
        (busy, "time with work in the batch"),
        (batch, "calls in the batch, mean"),
        (tokens, "share of all generated tokens"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xticks(np.arange(len(names)), names, fontsize=8)
        if axes is not batch:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend_below(figure, busy)
    return figure


def alpha_figure(found: Comparison, setting: Setting) -> Figure:
    """Return P95 over α at every rate, as tuning saw it."""
    curves = [curve for curve in found.alpha_curves if curve.cell.setting == setting]
    policies = list(dict.fromkeys(curve.policy for curve in curves))
    figure = new_figure(
        4.6 * len(policies) + 1.6, 4.6, f"P95 over α on tuning seeds\n{setting_title(setting)}"
    )
    rates = found.rates_qps(setting)
    panels = np.atleast_1d(figure.subplots(1, len(policies), sharey=True))
    shades = [(0.04 + 0.2 * t, 0.62 - 0.36 * t, 0.86 - 0.4 * t) for t in np.linspace(0, 1, 20)]
    for axes, policy in zip(panels, policies, strict=True):
        for curve in (one for one in curves if one.policy == policy):
            level = rates.index(curve.cell.rate_qps) / max(1, len(rates) - 1)
            share = curve.cell.rate_qps / found.capacity_qps[setting]
            colour = shades[round(level * (len(shades) - 1))]
            axes.plot(
                list(curve.p95_s),
                list(curve.p95_s.values()),
                ".-",
                color=colour,
                linewidth=1.2,
                label=f"{share:.0%}",
            )
            axes.plot([curve.alpha], [curve.p95_s[curve.alpha]], "o", color=BOUND, markersize=5)
        axes.set_xscale("symlog", linthresh=0.003, linscale=0.5)
        axes.set_xticks([0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0], None)
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.set_xlim(-0.0005, 1.15)
        log_seconds(axes)
        axes.set_title(f"{policy} (red: chosen)", fontsize=10)
        axes.set_xlabel("α")
    panels[0].set_ylabel("P95, seconds (log scale)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside right upper",
        title="load, of\nupper bound",
        fontsize=8,
        title_fontsize=8,
        frameon=False,
    )
    return figure


def _mean_over_seeds(
    found: Comparison, cell: Cell, contender: Contender, name: str, pick: Pick
) -> float:
    values = [pick(row.measured, name) for row in found.rows(cell, contender)]
    return sum(values) / len(values)


def _utilisation(measured: Measured, name: str) -> float:
    return measured.instances[name].utilisation


def _batch(measured: Measured, name: str) -> float:
    return measured.instances[name].batch


def _token_share(measured: Measured, name: str) -> float:
    total = sum(one.output_tokens for one in measured.instances.values())
    return measured.instances[name].output_tokens / total if total else 0.0
