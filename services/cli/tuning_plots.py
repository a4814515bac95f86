"""A plot of P95 over α with its uncertainty, and of the decision about it."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shared.scheduling.judgement import Judgement, Replayed, p95_interval_s

BLUE, ORANGE, GREEN, GREY = "#0b6e99", "#d9730d", "#6b8e23", "#6b6b6b"
LINEAR_BELOW = 0.003
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
    axes.set_title(wrapped(decision.reason), fontsize=9)
    axes.legend(fontsize=8, loc="upper left", framealpha=0.9)
    return figure


def _alpha(run: Replayed) -> float:
    return run.alpha


def wrapped(text: str, width: int = 90) -> str:
    """Return the text broken into lines of at most so many characters."""
    if len(text) <= width:
        return text
    at = text.rfind(" ", 0, width)
    return f"{text[:at]}\n{wrapped(text[at + 1 :], width)}"
