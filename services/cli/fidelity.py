"""`hexflow fidelity`: does the simulator say what a real engine does?"""

import asyncio
import math
import os
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import msgspec
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from services.cli import plots
from services.cli.console import (
    EXIT_INTERRUPTED,
    finite,
    print_json,
    stderr_console,
    stdout_console,
)
from services.cli.engine_options import (
    CoreOption,
    ModelOption,
    OneOpenAIOption,
    RealEngineOption,
    on_one_core,
)
from services.cli.fidelity_runs import (
    RecordingTally,
    RunTimings,
    knee_qps,
    real_run,
    simulated_run,
    small_queries,
    with_arrivals,
)
from services.cli.interrupts import run_until_stopped, until_stopped, with_end
from services.cli.options import JsonOption, VerboseOption, configure_logs
from services.cli.profiling import Profile, errors_json, profile_engine
from services.cli.progress import JobProgress, live_progress
from services.cli.real_engines import (
    EngineChoice,
    Fleet,
    open_real,
)
from shared.adapters.clock import SystemClock
from shared.errors import ConfigError

NOISE_BOUND = 0.05
LEAST_LOAD = 0.01
METRICS = (
    "call_latency_median_error",
    "call_latency_mean_error",
    "call_latency_p95_error",
    "ttft_median_error",
    "tpot_median_error",
    "query_p95_error",
)
GOALS = {"call_latency_median_error": 0.03, "ttft_median_error": 0.1, "query_p95_error": 0.1}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class FidelityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to compare.

    Attributes:
        engines: The real engine.
        loads: Shares of the knee.
        num_queries: Queries per run.
        repeats: Real runs per load, at least two: their difference is the noise.
        seed: Of the workload.
    """

    engines: EngineChoice
    loads: tuple[float, ...]
    num_queries: int
    repeats: int
    seed: int


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """One load.

    Attributes:
        load: Share of the knee.
        rate_qps: Queries per second.
        errors: Metric -> error of the simulator, a share of what was measured.
        noise: How far equal real runs were apart, or equal calls of the profile, if that is more;
            not a number where there was only one run.
        real: The real runs.
        simulated: The simulated one.
    """

    load: float
    rate_qps: float
    errors: dict[str, float]
    noise: float
    real: tuple[RunTimings, ...]
    simulated: RunTimings

    @property
    def is_void(self) -> bool:
        """Whether the machine was too noisy for the errors to mean anything, or may have been."""
        return not self.noise <= NOISE_BOUND


async def measure_fidelity(
    plan: FidelityPlan, console: Console, stop: asyncio.Event
) -> tuple[Profile, list[LoadResult]]:
    """Profile an engine, then replay a workload on it and in the simulator at several loads.

    Raises:
        ConfigError: The engine cannot be had or profiled.
        TransientError: The engine did not answer every query.
    """
    whole = msgspec.structs.replace(plan.engines, is_bounded=False)
    async with open_real(whole, console) as engines:
        spec = engines.specs[0]
        async with engines.open_engine(spec, SystemClock()) as engine:
            profile = await until_stopped(
                profile_engine(engine, spec, JobProgress(console), plan.seed), stop
            )
        results = [
            await _at_load(plan, profile, engines, load, console, stop)
            for load in plan.loads
            if not stop.is_set()
        ]
    return profile, [one for one in results if one.real]


async def _at_load(
    plan: FidelityPlan,
    profile: Profile,
    engines: Fleet,
    load: float,
    console: Console,
    stop: asyncio.Event,
) -> LoadResult:
    spec = profile.spec
    queries = small_queries(spec, plan.num_queries, plan.seed + 1)
    rate_qps = load * knee_qps(queries, spec)
    arriving = with_arrivals(queries, spec, rate_qps, plan.seed)
    simulated = simulated_run(arriving, spec)
    real: list[RunTimings] = []
    for repeat in range(plan.repeats):
        tally = RecordingTally()
        label = f"load {load:.0%}, run {repeat + 1} of {plan.repeats}"
        async with live_progress(console, label, len(arriving), tally):
            found = await real_run(arriving, spec, engines.open_engine, stop, tally)
        if stop.is_set():
            break
        real.append(found)
    return LoadResult(
        load=load,
        rate_qps=rate_qps,
        errors=errors_of(simulated, real) if real else {},
        noise=max(profile.noise, noise_of(real)) if len(real) > 1 else math.nan,
        real=tuple(real),
        simulated=simulated,
    )


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


def fidelity_json(profile: Profile, results: list[LoadResult]) -> dict[str, Any]:
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
            }
            for one in results
        ],
        "profile": {
            "instance": msgspec.to_builtins(profile.spec),
            "errors": errors_json(profile.fit.errors),
            "held_out_errors": errors_json(profile.held_out),
            "repeat_noise": round(profile.noise, 5),
        },
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


def profile_text(profile: Profile) -> str:
    """Return in one line how good the profile is that the simulator had."""
    fit, held_out = profile.fit.errors.latency_median, profile.held_out.latency_median
    return (
        f"Its profile: {profile.num_calls} calls, equal ones ±{_share(profile.noise)} apart; "
        f"median error {_share(fit)} on those it was fitted on, {_share(held_out)} on others."
    )


def _share(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "no values"


def fidelity_figure(profile: Profile, results: list[LoadResult]) -> Figure:
    """Return the picture: call latencies, real and simulated, at each load."""
    width = max(6.0, 4.4 * len(results))  # narrower the title is cut off
    figure = Figure(figsize=(width, 4.0), dpi=130, layout="constrained")
    figure.suptitle(f"{profile.spec.instance_id}: time of a call from ready to its last token")
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


@app.command()
def command(
    engine: RealEngineOption = None,
    openai: OneOpenAIOption = None,
    model: ModelOption = "",
    loads: Annotated[
        str,
        typer.Option(help="Shares of the knee (the rate that saturates the engine), with commas."),
    ] = "0.3,0.6,0.9",
    queries: Annotated[int, typer.Option(min=5, help="Queries per run.")] = 60,
    repeats: Annotated[
        int, typer.Option(min=2, help="Real runs per load; their difference is the noise.")
    ] = 2,
    core: CoreOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload.")] = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for the plot.")] = Path("out"),
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Compare the simulator with a real engine on a workload that it was not fitted on.

    The engine is profiled, then the same queries run through the mesh on the real engine, several
    times, and once through the simulator, at shares of the rate that saturates it. A load is void
    where equal runs, or equal calls of the profile, differ by more than 5%: something else used the
    machine.
    """
    configure_logs(verbose=verbose)
    choice = on_one_core(
        engine, openai, core, "a simulated engine is the simulator itself", model=model
    )
    plan = FidelityPlan(
        engines=choice,
        loads=parse_loads(loads),
        num_queries=queries,
        repeats=repeats,
        seed=seed,
    )
    console = stderr_console()
    (profile, results), was_stopped = run_until_stopped(
        lambda stop: with_end(measure_fidelity(plan, console, stop), stop)
    )
    if not results:
        raise typer.Exit(EXIT_INTERRUPTED)
    picture = plots.save(fidelity_figure(profile, results), out, "fidelity.png")
    if json:
        print_json({**fidelity_json(profile, results), "plot": os.fspath(picture)})
    else:
        shown = stdout_console()
        shown.print(fidelity_table(results))
        shown.print(profile_text(profile), soft_wrap=True)
        shown.print(f"Plot: [bold]{picture}[/bold]", soft_wrap=True)
    if was_stopped:
        raise typer.Exit(EXIT_INTERRUPTED)


def parse_loads(text: str) -> tuple[float, ...]:
    """Return the loads of `0.3,0.6`.

    Raises:
        ConfigError: One is no number between 0 and 1.
    """
    try:
        loads = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as exc:
        raise ConfigError(f"--loads {text!r}: numbers separated by commas are needed") from exc
    if not loads:
        raise ConfigError("--loads is empty: name at least one share of the knee, such as 0.6")
    if not all(LEAST_LOAD <= load <= 1 for load in loads):
        msg = f"--loads {text!r}: shares of the knee are at least {LEAST_LOAD} and at most 1"
        raise ConfigError(msg)
    return loads
