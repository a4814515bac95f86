"""`hexflow tune`: what the tuner would decide about a recorded window, with the evidence."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from services.cli.console import finite, print_json, stderr_console, stdout_console
from services.cli.interrupts import run_until_stopped
from services.cli.options import FleetOption, JsonOption, NamedKafkaOption, OutOption, mesh_settings
from services.cli.remote import open_remote
from services.cli.tuning_window import (
    TuningWindow,
    events_text,
    is_window_file,
    read_events,
    read_mesh,
    window_of_events,
    window_of_trace,
)
from services.cli.workload import WorkloadParams, build_workload, load_fleet
from shared.contracts.messages import LatencyEvent
from shared.domain.instance import InstanceSpec
from shared.runtime.settings import MeshSettings
from shared.scheduling.judgement import Judgement, Replayed, judge, p95_interval_s
from shared.scheduling.policies import DEFAULT_ALPHA, DEFAULT_POLICY
from shared.scheduling.tuning import TuningRules
from shared.simulation.window_replay import (
    ReplayRequest,
    replay_window,
    scenario_of,
    sweep_scenario,
)

ADMISSIONS = (8, 16, 32, 64)
TOKEN_BUDGETS = (512, 1_024, 2_048, 4_096, 8_192)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """P95 under other settings than α, at the α chosen.

    Attributes:
        setting: Its name.
        value: What it was set to.
        p95_s: Predicted, seconds.
    """

    setting: str
    value: int
    p95_s: float


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and its evidence."""

    window: TuningWindow
    current: float
    runs: tuple[Replayed, ...]
    judgement: Judgement
    others: tuple[Recommendation, ...]


def tune(
    window: TuningWindow,
    fleet: tuple[InstanceSpec, ...],
    *,
    policy: str = DEFAULT_POLICY,
    current: float,
    rules: TuningRules,
    tries_others: bool = True,
) -> Tuned:
    """Return what the tuner would decide about a window.

    Raises:
        ConfigError: The window cannot be run on the fleet.
    """
    request = ReplayRequest(
        queries=window.queries,
        fleet=fleet,
        policy=policy,
        shapes=window.shapes,
        current=current,
        speed_factors=window.speed_factors,
        hop_s=window.hop_s,
    )
    answer = replay_window(request)
    judgement = judge(
        answer.runs,
        current=current,
        previous=None,
        observed=window.observed,
        rules=rules,
        as_it_was=answer.as_it_was,
    )
    best = judgement.decision.alpha
    others = _others(msgspec.structs.replace(request, current=best)) if tries_others else ()
    return Tuned(
        window=window, current=current, runs=answer.runs, judgement=judgement, others=others
    )


def _others(request: ReplayRequest) -> tuple[Recommendation, ...]:
    """Return P95 under other admission limits and prefill token budgets, one changed at a time."""
    longest = max(spec.max_num_seqs for spec in request.fleet)
    found = []
    for setting, values in (("admission", ADMISSIONS), ("max_batched_tokens", TOKEN_BUDGETS)):
        for value in values:
            is_possible = value <= longest if setting == "admission" else value >= longest
            if is_possible:
                changed = msgspec.structs.replace(request, **{setting: value})
                (run,) = sweep_scenario(scenario_of(changed), [request.current])
                found.append(Recommendation(setting=setting, value=value, p95_s=run.p95_s))
    return tuple(found)


async def _from_mesh(
    settings: MeshSettings, save: Path | None
) -> tuple[list[LatencyEvent], tuple[InstanceSpec, ...]]:
    async with open_remote(settings, None) as mesh:
        events = await read_mesh(mesh)
        if save is not None:
            await asyncio.to_thread(save.write_bytes, events_text(events))
        return events, mesh.fleet


def tuned_json(tuned: Tuned) -> dict[str, Any]:
    """Return the JSON object of `hexflow tune --json`."""
    decision, observed = tuned.judgement.decision, tuned.window.observed
    low_s, high_s = tuned.judgement.interval_s
    return {
        "source": tuned.window.source,
        "queries": len(tuned.window.queries),
        "cut": tuned.window.num_cut,
        "ignored": tuned.window.num_ignored,
        "current_alpha": tuned.current,
        "alpha": decision.alpha,
        "is_change": decision.is_change,
        "best_alpha": decision.best_alpha,
        "reason": decision.reason,
        "gain": decision.gain,
        "predicted_p95_s": decision.predicted_p95_s,
        "predicted_interval_s": [finite(low_s), finite(high_s)],
        "observed_p95_s": None if observed is None else finite(observed.p95_s),
        "calibration_error": tuned.judgement.calibration_error,
        "ineligible": list(tuned.judgement.ineligible),
        "speed_factors": tuned.window.speed_factors,
        "runs": [{"alpha": run.alpha, "p95_s": finite(run.p95_s)} for run in tuned.runs],
        "others": [msgspec.to_builtins(other) for other in tuned.others],
    }


def tuned_table(tuned: Tuned) -> Table:
    """Return predictions per α for people."""
    decision = tuned.judgement.decision
    table = Table(title=f"P95 of {len(tuned.window.queries):,} queries", title_justify="left")
    for name in ("α", "P95", "95% interval", ""):
        table.add_column(name, justify="left" if not name else "right")
    for run in tuned.runs:
        low_s, high_s = p95_interval_s(run.latencies_s)
        notes = [
            text
            for text, holds in (
                ("in force", run.alpha == tuned.current),
                ("chosen", run.alpha == decision.alpha),
                ("not eligible", run.alpha in tuned.judgement.ineligible),
            )
            if holds
        ]
        table.add_row(
            f"{run.alpha:.4g}",
            f"{run.p95_s:.1f} s",
            f"{low_s:.1f}-{high_s:.1f}",
            ", ".join(notes),
            style="bold" if run.alpha == decision.alpha else None,
        )
    return table


def others_table(tuned: Tuned) -> Table:
    """Return what other settings would bring."""
    table = Table(
        title=f"other settings, at α {tuned.judgement.decision.alpha:.4g}", title_justify="left"
    )
    for name in ("setting", "value", "P95"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for other in tuned.others:
        table.add_row(other.setting, f"{other.value:,}", f"{other.p95_s:.1f} s")
    return table


def _window(
    path: Path | None,
    fleet: tuple[InstanceSpec, ...],
    params: WorkloadParams,
    max_queries: int,
) -> TuningWindow:
    if path is not None and is_window_file(path):
        return window_of_events(read_events(path), fleet, path.name, max_queries=max_queries)
    workload = build_workload(params, fleet)
    return window_of_trace(workload.queries[-max_queries:], workload.name)


@app.command()
def command(
    window: Annotated[
        Path | None,
        typer.Argument(
            metavar="[WINDOW|TRACE]",
            help="Recorded latency events (one JSON object a line), or a trace.",
        ),
    ] = None,
    fleet: FleetOption = "hetero-1",
    kafka: NamedKafkaOption = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --kafka: keep the window here.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policy that is tuned.")] = DEFAULT_POLICY,
    alpha: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="α in force; default: what the window ran under."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="For a trace without arrivals: queries per second.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of a trace's arrivals and SLOs.")] = 0,
    queries: Annotated[int, typer.Option(min=1, help="Most queries; the latest are kept.")] = 600,
    min_queries: Annotated[int, typer.Option(min=1, help="Fewest for a decision.")] = 100,
    margin: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Least gain for a change.")
    ] = 0.03,
    out: OutOption = Path("out"),
    json: JsonOption = False,
) -> None:
    """Decide about α on a recorded window as the tuner does live, and show the evidence.

    The window's arrivals, structure and think times are replayed in the simulator under a grid of
    α, refined around the best. A change is advised only where the lower 95% bound of the gain
    (paired bootstrap) is above the margin, and the simulator reproduces what was measured.
    """
    rules = TuningRules(min_queries=min_queries, margin=margin)
    if kafka is not None:
        settings = mesh_settings(kafka=kafka)
        events, specs = run_until_stopped(lambda _: _from_mesh(settings, save))
        found = window_of_events(events, specs, f"the mesh at {kafka}", max_queries=queries)
    else:
        specs = load_fleet(fleet)
        params = WorkloadParams(
            trace=window,
            mode=None if window else "natural",
            rate_qps=rate,
            seed=seed,
            limit=None if window else queries,
        )
        found = _window(window, specs, params, queries)
    known = found.alpha if alpha is None else alpha
    current = DEFAULT_ALPHA if known is None else known
    with stderr_console().status(f"replaying {len(found.queries):,} queries"):
        tuned = tune(found, specs, policy=policy, current=current, rules=rules)
    _show(tuned, out, is_json=json)


def _show(tuned: Tuned, out: Path, *, is_json: bool) -> None:
    from services.cli.plots import save as save_figure  # noqa: PLC0415 - matplotlib takes a while
    from services.cli.tuning_plots import alpha_figure  # noqa: PLC0415

    path = save_figure(alpha_figure(tuned.runs, tuned.judgement, tuned.current), out, "tune.png")
    if is_json:
        print_json({**tuned_json(tuned), "plot": str(path)})
        return
    console = stdout_console()
    console.print(tuned_table(tuned))
    console.print(others_table(tuned))
    error = tuned.judgement.calibration_error
    if error is not None and tuned.window.observed is not None:
        console.print(
            f"measured P95 {tuned.window.observed.p95_s:.1f} s; the simulator is off by {error:.1%}"
        )
    decision = tuned.judgement.decision
    verdict = f"α {tuned.current:.4g} → {decision.alpha:.4g}" if decision.is_change else "no change"
    console.print(f"[bold]{verdict}[/bold]: {decision.reason}")
    console.print(f"Plot: {path}", soft_wrap=True)
