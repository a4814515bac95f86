"""Plots of a comparison as one PNG."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.cli.tally import Tally
from shared.errors import ConfigError
from shared.scheduling.attainment import percentile

COLOURS = ("#0b6e99", "#d9730d", "#6b8e23", "#8b4d9f")
GREY = "#6b6b6b"


def comparison_figure(runs: Mapping[str, Tally], subtitle: str) -> Figure:
    """Return the figure: end-to-end times, time over SLO, and where the calls ran.

    Args:
        runs: Policy name -> what came back; the same queries under each.
        subtitle: What was run, one line.
    """
    figure = Figure(figsize=(13.0, 4.6), dpi=130, layout="constrained")
    figure.suptitle(f"The same queries under each policy\n{subtitle}", fontsize=11, linespacing=1.5)
    times, slo, places = figure.subplots(1, 3, width_ratios=(1.15, 1.15, 1.0))
    for axes in (times, slo, places):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="both" if axes is not places else "y", alpha=0.25)
        axes.set_axisbelow(True)
    for colour, (name, tally) in zip(COLOURS, runs.items(), strict=False):
        _draw_times(times, name, tally, colour)
        _draw_slo(slo, name, tally, colour)
    _finish_times(times)
    _finish_slo(slo)
    _draw_places(places, runs)
    return figure


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write a figure as PNG and return its path.

    Raises:
        ConfigError: The folder or file cannot be written.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror or exc}") from exc
    return path


def _steps(values: list[float], total: int) -> tuple[list[float], list[float]]:
    """Return an empirical distribution over `total` queries; those without a value never rise."""
    ordered = sorted(values)
    shares = [100.0 * (index + 1) / max(1, total) for index in range(len(ordered))]
    return [0.0, *ordered], [0.0, *shares]


def _draw_times(axes: Axes, name: str, tally: Tally, colour: str) -> None:
    values = [end.latency_s for end in tally.ends if end.completed]
    x, y = _steps(values, tally.queries["submitted"])
    p95_s = percentile(values, 95)
    label = f"{name}: P95 {p95_s:.0f} s" if values else name
    axes.step(x, y, where="post", color=colour, linewidth=2.0, label=label)
    if len(values) == tally.queries["submitted"] > 0:
        axes.plot([p95_s], [95.0], "o", color=colour, markersize=6)


def _finish_times(axes: Axes) -> None:
    axes.set_title("End-to-end time of a query", fontsize=10)
    axes.set_xlabel("workload seconds")
    axes.set_ylabel("% of queries answered within")
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", facecolor="white", framealpha=0.9, edgecolor="none")


def _draw_slo(axes: Axes, name: str, tally: Tally, colour: str) -> None:
    values = [end.latency_s / end.slo_s for end in tally.ends if end.completed]
    x, y = _steps(values, tally.queries["submitted"])
    attainment = 100.0 * tally.summary().attainment
    label = f"{name}: {attainment:.0f}% within SLO"
    axes.step(x, y, where="post", color=colour, linewidth=2.0, label=label)
    axes.plot([1.0], [attainment], "o", color=colour, markersize=6)


def _finish_slo(axes: Axes) -> None:
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1.0)
    axes.set_title("Time used, as a share of the query's SLO", fontsize=10)
    axes.set_xlabel("end-to-end time ÷ SLO")
    axes.set_ylabel("% of queries below")
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", facecolor="white", framealpha=0.9, edgecolor="none")


def _draw_places(axes: Axes, runs: Mapping[str, Tally]) -> None:
    instances = sorted({name for tally in runs.values() for name in tally.instances})
    width = 0.8 / max(1, len(runs))
    for index, (colour, (name, tally)) in enumerate(zip(COLOURS, runs.items(), strict=False)):
        counts = [tally.instances[i].calls if i in tally.instances else 0 for i in instances]
        left = np.arange(len(instances)) - 0.4 + width * (index + 0.5)
        axes.bar(left, counts, width, color=colour, label=name)
    axes.set_title("Calls per instance", fontsize=10)
    axes.set_xticks(np.arange(len(instances)), instances, fontsize=8)
    axes.set_ylabel("calls")
