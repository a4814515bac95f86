"""`hexflow doctor`: one screen that says what is wrong with a mesh and what to do."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from services.cli.console import EXIT_FAILED, counted, print_json, stderr_console, stdout_console
from services.cli.doctor.examination import examine
from services.cli.doctor.findings import Finding, diagnose, is_heard
from services.cli.doctor.snapshot import Snapshot
from services.cli.interrupts import run_until_stopped
from services.cli.options import (
    JsonOption,
    KafkaOption,
    RedisOption,
    configure_logs,
    mesh_settings,
)

SCREEN_FINDINGS = 8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def as_json(seen: Snapshot, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the command's JSON object."""
    return {
        "kafka": seen.address,
        "prefix": seen.prefix,
        "ok": not findings,
        "findings": [msgspec.to_builtins(finding) for finding in findings],
        "instances": {
            instance_id: {
                "phase": view.last.phase,
                "heard_s_ago": round(view.age_s, 1),
                "waiting": view.last.num_waiting,
                "running": view.last.num_running,
            }
            for instance_id, view in sorted(seen.instances.items())
        },
        "lag": {
            service: sum(view.last_lag for view in seen.partitions if view.service == service)
            for service in sorted({view.service for view in seen.partitions})
        },
        "dead_letters_recent": seen.dead_letters.recent,
    }


def summary(seen: Snapshot) -> str:
    """Return in one line what there is."""
    if seen.kafka_error:
        return f"Kafka {seen.address}: does not answer"
    heard = [view for view in seen.instances.values() if is_heard(view)]
    waiting = sum(view.last.num_waiting for view in heard)
    running = sum(view.last.num_running for view in heard)
    lag = sum(view.last_lag for view in seen.partitions)
    return (
        f"Kafka {seen.address}, prefix {seen.prefix!r}: {counted(len(heard), 'instance')} at "
        f"work, {counted(waiting, 'call')} waiting, {running} running, "
        f"{counted(lag, 'record')} unfinished"
    )


def show(console: Console, seen: Snapshot, findings: Sequence[Finding]) -> None:
    """Print the findings, at most a screen of them."""
    console.print(escape(summary(seen)), soft_wrap=True)
    for finding in findings[:SCREEN_FINDINGS]:
        head = f"[red]✗ {finding.problem}[/red] [bold]{escape(finding.subject)}[/bold]"
        console.print(f"{head}: {escape(finding.detail)}", soft_wrap=True)
        console.print(f"  → {escape(finding.advice)}", soft_wrap=True)
    left = len(findings) - SCREEN_FINDINGS
    if left > 0:
        console.print(f"... and {left} more: hexflow doctor --json has them all")
    if not findings:
        console.print("[green]✓ nothing is wrong[/green]")


@app.command()
def doctor(
    kafka: KafkaOption = None,
    redis: RedisOption = None,
    watch: Annotated[
        float,
        typer.Option(min=0.5, max=600, help="Wall seconds between the two looks."),
    ] = 4.0,
    json: JsonOption = False,
) -> None:
    """Look at a mesh and say what is wrong and what to do. Changes nothing.

    Looks twice, to tell what is slow from what stands still. Exits with 1 when something is wrong.
    """
    configure_logs(verbose=False)
    settings = mesh_settings(kafka=kafka, redis=redis)
    stderr_console().print(f"looking for {watch:g} s ...", style="dim")

    async def main(_: asyncio.Event) -> Snapshot:
        return await examine(settings, watch)

    seen = run_until_stopped(main, is_graceful=False)
    findings = diagnose(seen)
    if json:
        print_json(as_json(seen, findings))
    else:
        show(stdout_console(), seen, findings)
    if findings:
        raise typer.Exit(EXIT_FAILED)
