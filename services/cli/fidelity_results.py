"""What fidelity found: errors of the simulator at each load, as JSON, a table and a picture."""

import math
from statistics import mean
from typing import Any

import msgspec
from matplotlib.figure import Figure
from rich.table import Table

from services.cli import plots
from services.cli.console import finite
from services.cli.fidelity_runs import RunTimings
from services.cli.profiling import Profile, profile_json

NOISE_BOUND = 0.05
METRICS = (
    "call_latency_median_error",
    "call_latency_mean_error",
    "call_latency_p95_error",
    "ttft_median_error",
    "tpot_median_error",
    "query_p95_error",
)
GOALS = {"call_latency_median_error": 0.03, "ttft_median_error": 0.1, "query_p95_error": 0.1}


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """One load.

    Attributes:
        load: Share of the knee.
        rate_qps: Queries per second.
        errors: Metric -> error of the simulator, a share of what was measured.
        noise: How far equal real runs were apart in their median call, or the experiments in
            theirs, if that is more; not a number where there was only one run.
        real: The real runs.
        simulated: The simulated one.
        profile: What the simulator knew: the experiments around the real runs.
    """

    load: float
    rate_qps: float
    errors: dict[str, float]
    noise: float
    real: tuple[RunTimings, ...]
    simulated: RunTimings
    profile: Profile

    @property
    def is_void(self) -> bool:
        """Whether the machine was too noisy for the errors to mean anything, or may have been."""
        return not self.noise <= NOISE_BOUND


def metrics_of(run: RunTimings) -> dict[str, float]:
    """Return what is compared: metric -> seconds."""
    values = (
        run.call_latency_s(50),
        run.mean_call_latency_s(),
        run.call_latency_s(95),
        run.ttft_s(),
        run.tpot_s(),
        run.query_s(95),
    )
    return dict(zip(METRICS, values, strict=True))


def errors_of(simulated: RunTimings, real: list[RunTimings]) -> dict[str, float]:
    """Return the simulator's error in each metric against the mean of the real runs."""
    predicted, observed = metrics_of(simulated), [metrics_of(run) for run in real]
    errors = {}
    for name in METRICS:
        truth_s = mean(one[name] for one in observed)
        errors[name] = abs(predicted[name] - truth_s) / truth_s
    return errors


def noise_of(real: list[RunTimings]) -> float:
    """Return how far equal runs are apart: half the range over the mean, of median latencies."""
    medians = [run.call_latency_s(50) for run in real]
    return (max(medians) - min(medians)) / (2 * mean(medians))


def fidelity_json(results: list[LoadResult]) -> dict[str, Any]:
    """Return the command's JSON object."""
    return {
        "loads": [
            {
                "load": one.load,
                **{name: finite(round(value, 5)) for name, value in one.errors.items()},
                "repeat_noise": finite(round(one.noise, 5)),
                "is_void": one.is_void,
                "rate_qps": round(one.rate_qps, 5),
                "calls": len(one.simulated.calls),
                "profile": profile_json(one.profile),
            }
            for one in results
        ]
    }


def fidelity_table(results: list[LoadResult]) -> Table:
    """Return the errors per load, beside the noise."""
    table = Table(title="error of the simulator against the real engine", title_justify="left")
    table.add_column("load")
    for name in METRICS:
        table.add_column(name.removesuffix("_error").replace("_", " "), justify="right")
    table.add_column("repeat noise", justify="right")
    for one in results:
        cells = [_share(one.errors[name]) for name in METRICS]
        noise = _share(one.noise) if math.isfinite(one.noise) else "one run"
        table.add_row(f"{one.load:.0%}", *cells, noise + (" (void)" if one.is_void else ""))
    table.add_row("goal", *(f"{GOALS[n]:.0%}" if n in GOALS else "" for n in METRICS), "5%")
    return table


def load_text(result: LoadResult) -> str:
    """Return in a few lines what was compared at a load, and how good the profile was."""
    profile = result.profile
    real = " and ".join(f"{run.call_latency_s(50):.2f}" for run in result.real)
    fit, held_out = profile.fit.errors.latency_median, profile.held_out.latency_median
    return (
        f"{result.load:.0%}: median call {result.simulated.call_latency_s(50):.2f} s simulated, "
        f"{real} s real ({len(result.simulated.calls)} calls a run). Profile: "
        f"{profile.num_calls} calls, equal ones "
        f"±{_share(profile.noise)} apart; median error {_share(fit)} on those it was fitted on, "
        f"{_share(held_out)} on others."
    )


def _share(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "no values"


def fidelity_figure(results: list[LoadResult]) -> Figure:
    """Return the picture: call latencies, real and simulated, at each load."""
    width = max(6.0, 4.4 * len(results))  # narrower the title is cut off
    figure = Figure(figsize=(width, 4.0), dpi=130, layout="constrained")
    instance_id = results[0].profile.spec.instance_id
    figure.suptitle(f"{instance_id}: time of a call from ready to its last token")
    for axes, one in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, alpha=0.25)
        for index, run in enumerate(one.real):
            label = "real" if index == 0 else None
            axes.plot(*_steps(run), color=plots.COLOURS[0], alpha=0.7, label=label)
        axes.plot(*_steps(one.simulated), color=plots.COLOURS[1], label="simulated")
        axes.set(title=f"{one.load:.0%} of the knee", xlabel="seconds", ylabel="% of calls")
        axes.set_xlim(left=0)
        axes.legend(frameon=False)
    return figure


def _steps(run: RunTimings) -> tuple[list[float], list[float]]:
    ordered = sorted(call.end_s for call in run.calls)
    return ordered, [100.0 * (index + 1) / len(ordered) for index in range(len(ordered))]
