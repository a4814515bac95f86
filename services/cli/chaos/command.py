"""`hexflow chaos`: kill anything, any time, and see whether every query still ends once."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from services.cli.chaos.faults import KINDS, SERVER_FAULTS, SHORT, parse_kinds
from services.cli.chaos.run import ChaosPlan, ChaosResult, chaos
from services.cli.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    print_json,
    stderr_console,
    stdout_console,
)
from services.cli.interrupts import run_until_stopped
from services.cli.options import (
    FleetOption,
    JsonOption,
    NamedKafkaOption,
    NamedRedisOption,
    VerboseOption,
    configure_logs,
    mesh_settings,
)
from shared.errors import ConfigError

DEFAULT_TIME_SCALE = 10.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def fault_table(result: ChaosResult) -> Table:
    """Return what each fault did."""
    table = Table(title="faults", title_justify="left")
    table.add_column("fault", no_wrap=True)
    for name in ("in flight", "running", "moved", "resumed", "recovery"):
        table.add_column(name, justify="right")
    for one in result.audit.effects:
        recovery = "–" if one.recovery_s is None else f"{one.recovery_s:.1f} s"
        counts = [str(n) for n in (one.in_flight, one.running, one.moved, one.resumed)]
        table.add_row(one.fault, *counts, recovery)
    return table


def verdict(result: ChaosResult) -> list[str]:
    """Return the reconciliation in words, one line each."""
    found = result.audit
    ends = ", ".join(f"{kind} {num}" for kind, num in found.queries.items())
    calls = (
        f"calls: {found.calls['submitted']} submitted, {found.calls['unanswered']} without an "
        f"outcome; {found.duplicates} duplicate outcomes on the topic, {found.redone_calls} "
        "bound or begun again"
    )
    wrong = (
        f"lost {found.queries['lost']} · answered twice {found.answered_twice} · acted on "
        f"another outcome than the first {found.not_first}"
    )
    lines = [f"queries: {ends}", calls, wrong]
    if result.unexpected:
        lines.append(f"ended although nobody killed them: {', '.join(result.unexpected)}")
    if result.left_out:
        lines.append(f"left out, as the servers are not ours: {', '.join(result.left_out)}")
    lines.append("every query ended once" if found.holds else "NOT every query ended once")
    return lines


@app.command()
def command(
    seed: Annotated[int, typer.Option(min=0, help="Of the faults and the workload.")] = 0,
    queries: Annotated[int, typer.Option(min=1, help="How many queries.")] = 200,
    faults: Annotated[
        str, typer.Option(metavar="KIND,...", help=f"Which: {', '.join(KINDS)}; default: all.")
    ] = "",
    short: Annotated[
        bool,
        typer.Option("--short", help=f"One victim per kind; default kinds {', '.join(SHORT)}."),
    ] = False,
    kafka: NamedKafkaOption = None,
    redis: NamedRedisOption = None,
    fleet: FleetOption = "hetero-1",
    time_scale: Annotated[
        float, typer.Option(min=0.001, max=1_000.0, help="Workload seconds per wall second.")
    ] = DEFAULT_TIME_SCALE,
    capacity: Annotated[
        int | None,
        typer.Option(min=1, help="Most calls an engine is given, so that others wait."),
    ] = 4,
    patience: Annotated[
        float,
        typer.Option(min=1, help="Wall seconds until the next query has to end, after the faults."),
    ] = 120.0,
    admission: Annotated[
        bool,
        typer.Option(
            "--admission", help="Let dispatchers turn away what cannot be done: counts as an end."
        ),
    ] = False,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for logs and journal; default: removed if fine.")
    ] = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Disturb a mesh of processes on real servers by a seeded plan, and audit what came of it.

    Starts Kafka (needs Java 17 and Maven) and Redis unless --kafka and --redis name them; servers
    of somebody else's are never stopped or flushed. Exits with 1 when a query was lost or answered
    twice.
    """
    configure_logs(verbose=verbose)
    if (kafka is None) != (redis is None):
        raise ConfigError("--kafka and --redis go together: the services need both")
    folder = logs or Path(tempfile.mkdtemp(prefix="hexflow-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    plan = ChaosPlan(
        seed=seed,
        num_queries=queries,
        kinds=parse_kinds(faults or (",".join(SHORT) if short else "")),
        short=short,
        fleet=fleet,
        time_scale=time_scale,
        capacity=capacity,
        patience_s=patience,
        settings=mesh_settings(kafka=kafka, redis=redis) if kafka else None,
        folder=folder,
        admission=admission,
    )
    console = stderr_console()
    if plan.settings is not None:
        console.print(f"never done to servers that others use: {', '.join(sorted(SERVER_FAULTS))}")
    result = run_until_stopped(lambda stop: chaos(plan, _reporter(), stop))
    _tell(plan, result, json=json)
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not result.audit.holds:
        console.print(f"logs and journal: {folder}", soft_wrap=True)
        raise typer.Exit(EXIT_FAILED)
    if logs is None:
        shutil.rmtree(folder, ignore_errors=True)


def _reporter() -> Callable[[str], None]:
    console = stderr_console()
    return lambda text: console.print(f"· {text}", style="dim", markup=False)


def _tell(plan: ChaosPlan, result: ChaosResult, *, json: bool) -> None:
    if json:
        print_json(result.to_json(plan))
        return
    stdout_console().print(fault_table(result))
    for line in verdict(result):
        stdout_console().print(line, markup=False, soft_wrap=True)
