"""One run as a picture: what every instance had in its batch, and how many queries were open."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from services.cli.lab.axes import new_figure, tidy
from services.cli.lab.styles import GREY
from shared.simulation.results import RunResult
from shared.simulation.scenario import Scenario

COLOURS = ("#0b6e99", "#d9730d", "#2f7d32", "#8b4d9f", "#b58900", "#ad1457", "#5c6bc0", "#6d4c41")
MAX_STAGES = len(COLOURS) - 1
OTHER = "other stages"

Floats = np.ndarray[Any, np.dtype[np.float64]]


def gantt_figure(result: RunResult, scenario: Scenario, title: str) -> Figure:
    """Return the picture of a run.

    Every bar is a call in an engine's batch, from its first computed token to its last; a pale
    line before it is its wait since it became ready. Calls lie on the lowest free row.

    Args:
        result: The run.
        scenario: What was run.
        title: Heading.
    """
    stages = stage_names(result, scenario)
    shown = list(dict.fromkeys(stages))[:MAX_STAGES]
    colour_of = dict(zip(shown, COLOURS, strict=False))
    rows = [lanes(*_spans(result, place)) for place in range(len(result.fleet))]
    depths = [int(lane.max()) + 1 if len(lane) else 1 for lane in rows]
    figure = new_figure(13.0, 2.4 + sum(0.5 + 0.055 * depth for depth in depths), title)
    panels = figure.subplots(
        len(result.fleet) + 1, 1, sharex=True, height_ratios=[*(8 + d for d in depths), 22]
    )
    for place, (axes, lane, depth) in enumerate(zip(panels, rows, depths, strict=False)):
        mine = _mine(result, place)
        colours = [colour_of.get(stages[index], COLOURS[-1]) for index in np.flatnonzero(mine)]
        starts, ends = _spans(result, place)
        axes.hlines(lane, result.ready_s[mine], starts, color="#dddddd", linewidth=0.6)
        axes.barh(lane, ends - starts, 0.9, left=starts, color=colours, linewidth=0)
        axes.set_ylim(-1, max(depth, 4))
        axes.set_ylabel(result.fleet[place].instance_id, rotation=0, ha="right", va="center")
        tidy(axes)
    _draw_open(panels[-1], result)
    names = [*shown, *([OTHER] if len(set(stages)) > len(shown) else [])]
    handles = [Patch(color=colour_of.get(name, COLOURS[-1]), label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return figure


def stage_names(result: RunResult, scenario: Scenario) -> list[str]:
    """Return every call's stage name."""
    return [
        scenario.queries[query].stages[stage].stage
        for query, stage in zip(result.call_query.tolist(), result.call_stage.tolist(), strict=True)
    ]


def lanes(starts: Floats, ends: Floats) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the lowest free row for every interval, in order of their starts."""
    found = np.zeros(len(starts), np.int64)
    free_at: list[float] = []
    for index in np.argsort(starts, kind="stable"):
        free = (lane for lane, free_s in enumerate(free_at) if free_s <= starts[index])
        lane = next(free, len(free_at))
        if lane == len(free_at):
            free_at.append(0.0)
        free_at[lane] = float(ends[index])
        found[index] = lane
    return found


def _draw_open(axes: Any, result: RunResult) -> None:
    ended = np.isfinite(result.end_s)
    instants = np.concatenate([result.arrival_s, result.end_s[ended]])
    changes = np.concatenate([np.ones(len(result.arrival_s)), -np.ones(int(ended.sum()))])
    order = np.argsort(instants, kind="stable")
    axes.step(instants[order], np.cumsum(changes[order]), where="post", color=GREY, linewidth=1.2)
    late = ended & ~result.is_within_slo
    if late.any():
        axes.plot(
            result.end_s[late],
            np.zeros(int(late.sum())),
            "|",
            color="#b00020",
            markersize=9,
            label="ended too late",
        )
        axes.legend(loc="upper left", fontsize=8, frameon=False)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("open\nqueries", rotation=0, ha="right", va="center")
    axes.set_xlabel("seconds")
    tidy(axes)


def _mine(result: RunResult, place: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mine: np.ndarray[Any, np.dtype[np.bool_]] = (result.call_instance == place) & np.isfinite(
        result.call_end_s
    )
    return mine


def _spans(result: RunResult, place: int) -> tuple[Floats, Floats]:
    mine = _mine(result, place)
    return result.started_s[mine], result.call_end_s[mine]
