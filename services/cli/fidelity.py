"""`hexflow fidelity`: does the simulator say what a real engine does?"""

import asyncio
import math
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.cli import plots
from services.cli.console import (
    EXIT_INTERRUPTED,
    check_writable,
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
from services.cli.fidelity_results import (
    LoadResult,
    errors_of,
    fidelity_figure,
    fidelity_json,
    fidelity_table,
    load_text,
    noise_of,
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
from services.cli.interrupts import run_until_stopped, unless_stopped, with_end
from services.cli.options import JsonOption, VerboseOption, configure_logs
from services.cli.profiling import Profile, merged, pace_noise, profile_engine
from services.cli.progress import JobProgress, live_progress
from services.cli.real_engines import (
    EngineChoice,
    Fleet,
    open_real,
)
from shared.adapters.clock import SystemClock
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError

FIGURE = "fidelity.png"
LEAST_LOAD = 0.01
VOID = (
    "void: something else used the machine or the engine meanwhile; measure again with nothing "
    "beside it, or with more --repeats"
)

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


async def measure_fidelity(
    plan: FidelityPlan, console: Console, stop: asyncio.Event
) -> list[LoadResult]:
    """Replay a workload on an engine and in the simulator; see `compare`.

    Raises:
        ConfigError: The engine cannot be had or profiled.
        TransientError: The engine did not answer every query.
    """
    whole = msgspec.structs.replace(plan.engines, is_bounded=False)
    async with open_real(whole, console) as engines:
        return await compare(engines, plan, console, stop)


async def compare(
    engines: Fleet, plan: FidelityPlan, console: Console, stop: asyncio.Event
) -> list[LoadResult]:
    """Replay a workload on an engine and in the simulator, at several loads.

    The engine is profiled before the first run and after every run: a machine that is shared
    changes its pace within minutes, and both sides are to see the same one.

    Args:
        engines: The engine; nothing else should use it meanwhile.
        plan: What to compare; its own choice of engines is not looked at.
        console: Where progress is shown.
        stop: Set when the user wants to stop: what was measured by then is returned.

    Raises:
        ConfigError: The engine cannot be profiled.
        TransientError: The engine did not answer every query.
    """
    results: list[LoadResult] = []
    measuring = _Measuring(plan, engines, console, stop)
    latest = await measuring.profile()
    if latest is None:
        return results
    queries = small_queries(latest.spec, plan.num_queries, plan.seed + 1)
    for load in plan.loads:
        found, latest = await measuring.at_load(load, queries, latest)
        if found is not None:
            results.append(found)
        if stop.is_set():
            break
    return results


class _Measuring:
    """Experiments and runs on one engine, in turn.

    Args:
        plan: What to compare.
        engines: The engine.
        console: Where progress is shown.
        stop: Set when the user wants to stop.
    """

    def __init__(
        self, plan: FidelityPlan, engines: Fleet, console: Console, stop: asyncio.Event
    ) -> None:
        self._plan = plan
        self._engines = engines
        self._console = console
        self._stop = stop
        self._num_profiles = 0

    async def profile(self) -> Profile | None:
        """Return what the engine does now; None where the user wanted to stop."""
        self._num_profiles += 1
        spec = self._engines.specs[0]
        async with self._engines.open_engine(spec, SystemClock()) as engine:
            work = profile_engine(
                engine,
                spec,
                JobProgress(self._console),
                self._plan.seed,
                f"profile-{self._num_profiles}",
            )
            return await unless_stopped(work, self._stop)

    async def at_load(
        self, load: float, queries: tuple[TraceQuery, ...], before: Profile
    ) -> tuple[LoadResult | None, Profile]:
        """Run a workload at a load; return what both sides said of it, and the last profile.

        Args:
            load: Share of the knee.
            queries: The workload.
            before: The profile just before.

        Returns:
            None instead of a result where the user wanted to stop before a run was done.
        """
        spec = before.spec
        rate_qps = load * knee_qps(queries, spec)
        arriving = with_arrivals(queries, spec, rate_qps, self._plan.seed)
        minutes = len(arriving) / rate_qps / 60.0
        self._console.print(
            f"load {load:.0%}: {len(arriving)} queries at {rate_qps:.2f} per second, "
            f"{self._plan.repeats} runs of {minutes:.0f} minutes",
            style="dim",
        )
        profiles, real = [before], list[RunTimings]()
        for repeat in range(self._plan.repeats):
            label = f"load {load:.0%}, run {repeat + 1} of {self._plan.repeats}"
            found = await self._run(arriving, spec, label)
            if found is None:
                break
            real.append(found)
            after = await self.profile()
            if after is None:
                break
            profiles.append(after)
        if not real:
            return None, before
        profile = await merged(self._engines.specs[0], profiles)
        # As many calls at a time as the real runs had, whatever the merged profile would allow.
        known = msgspec.structs.replace(profile.spec, max_num_seqs=spec.max_num_seqs)
        simulated = simulated_run(arriving, known)
        result = LoadResult(
            load=load,
            rate_qps=rate_qps,
            errors=errors_of(simulated, real),
            noise=max(pace_noise(profiles), noise_of(real)) if len(real) > 1 else math.nan,
            real=tuple(real),
            simulated=simulated,
            profile=profile,
        )
        return result, profiles[-1]

    async def _run(
        self, arriving: tuple[TraceQuery, ...], spec: InstanceSpec, label: str
    ) -> RunTimings | None:
        tally = RecordingTally()
        async with live_progress(self._console, label, len(arriving), tally):
            found = await real_run(arriving, spec, self._engines.open_engine, self._stop, tally)
        return None if self._stop.is_set() else found


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

    The same queries run through the mesh on the real engine, several times, and once through the
    simulator, at shares of the rate that saturates it. The engine is profiled before and after
    every run: what is simulated is its mean pace over that time. A load is void where equal runs,
    or the profiles, differ by more than 5%: something else used the machine.
    """
    configure_logs(verbose=verbose)
    choice = on_one_core(
        engine, openai, core, "a simulated engine is the simulator itself", model=model
    )
    check_writable(out / FIGURE)  # better told now than after an hour
    plan = FidelityPlan(
        engines=choice,
        loads=parse_loads(loads),
        num_queries=queries,
        repeats=repeats,
        seed=seed,
    )
    console = stderr_console()
    results, was_stopped = run_until_stopped(
        lambda stop: with_end(measure_fidelity(plan, console, stop), stop)
    )
    if not results:
        raise typer.Exit(EXIT_INTERRUPTED)
    shown = stdout_console()
    if not json:  # what was found comes first: the picture may fail
        shown.print(fidelity_table(results))
        if any(one.is_void for one in results):
            shown.print(VOID, style="yellow")
        for one in results:
            shown.print(load_text(one), soft_wrap=True)
    picture = plots.save(fidelity_figure(results), out, FIGURE)
    if json:
        print_json({**fidelity_json(results), "plot": os.fspath(picture)})
    else:
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
