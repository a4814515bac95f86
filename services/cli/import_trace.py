"""`hexflow import`: make a trace from OpenTelemetry GenAI spans or from a table of calls."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from services.cli.console import counted, print_json, stderr_console
from services.cli.options import JsonOption
from services.cli.workload import read_file
from shared.errors import ConfigError
from shared.simulation.importing import (
    AttributeNames,
    Imported,
    Recording,
    Summary,
    assemble,
    read_csv,
    read_otel,
)
from shared.simulation.trace_file import dump_trace

SHOWN_PROBLEMS = 20
SHOWN_NAMES = 12
FORMATS = ("auto", "csv", "otel")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def import_trace(
    file: Annotated[Path, typer.Argument(help="Spans (OTLP/JSON, JSON Lines) or a CSV table.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Trace to write; default: stdout.")
    ] = None,
    input_format: Annotated[
        str, typer.Option("--format", help="auto, csv or otel; auto looks at the first character.")
    ] = "auto",
    query_attr: Annotated[
        str,
        typer.Option(metavar="NAME", help="Attribute or column that groups calls into queries."),
    ] = "",
    stage_attr: Annotated[
        str, typer.Option(metavar="NAME", help="Attribute or column that names the stage.")
    ] = "",
    tenant_attr: Annotated[
        str, typer.Option(metavar="NAME", help="Attribute or column that names the tenant.")
    ] = "",
    workflow_attr: Annotated[
        str, typer.Option(metavar="NAME", help="Attribute or column that names the workflow.")
    ] = "",
    slo_attr: Annotated[
        str, typer.Option(metavar="NAME", help="Attribute or column with the deadline in seconds.")
    ] = "",
    model: Annotated[
        str | None,
        typer.Option(help="Model of every call, whatever was recorded; 'default' fits any fleet."),
    ] = None,
    tolerance_s: Annotated[
        float,
        typer.Option(min=0, max=60, help="Overlap that still counts as one after the other."),
    ] = 0.0,
    prefixes: Annotated[
        bool, typer.Option(help="Infer shared prompt prefixes from cached token counts.")
    ] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail when any row or span is unusable.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make a trace to simulate and replay from what your system recorded.

    The summary goes to stderr, or with --json to stdout (then --output is needed).
    """
    if json and output is None:
        raise ConfigError("--json prints the summary on stdout: give the trace a file (--output)")
    names = AttributeNames(
        query=query_attr,
        stage=stage_attr,
        tenant=tenant_attr,
        workflow=workflow_attr,
        slo=slo_attr,
    )
    with stderr_console().status(f"reading {file}"):
        recording = read_recording(file, input_format, names)
        _check_strict(recording, strict=strict)
        imported = assemble(recording, model=model, tolerance_s=tolerance_s, with_prefixes=prefixes)
    _write(imported, output)
    if json:
        print_json(as_json(imported.summary))
    else:
        for line in as_lines(imported.summary):
            stderr_console().print(line, soft_wrap=True, markup=False)


def read_recording(file: Path, input_format: str, names: AttributeNames) -> Recording:
    """Return the calls in a file.

    Raises:
        ConfigError: The file cannot be read, or the format is unknown.
    """
    if input_format not in FORMATS:
        raise ConfigError(f"--format {input_format!r}: known are {', '.join(FORMATS)}")
    data = read_file(file)
    is_json = data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")
    if input_format == "otel" or (input_format == "auto" and is_json):
        return read_otel(data, str(file), names)
    return read_csv(data, str(file), names)


def _check_strict(recording: Recording, *, strict: bool) -> None:
    if strict and recording.problems:
        first = recording.problems[0]
        more = len(recording.problems) - 1
        tail = f" (and {more} more)" if more else ""
        raise ConfigError(f"{first.place}: {first.reason}{tail}")


def _write(imported: Imported, output: Path | None) -> None:
    text = dump_trace(imported.queries)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{output} cannot be written: {exc.strerror or exc}") from exc


def as_json(summary: Summary) -> dict[str, Any]:
    """Return the command's JSON object."""
    content: dict[str, Any] = msgspec.to_builtins(summary)
    return content


def as_lines(summary: Summary) -> list[str]:
    """Return the summary for people."""
    rate = f", {summary.rate_qps:.4g} queries/s" if summary.rate_qps is not None else ""
    size = (
        f"{counted(summary.num_queries, 'query')}, {counted(summary.num_stages, 'stage')}, "
        f"{counted(summary.num_calls, 'call')} over {summary.span_s:.6g} s{rate}"
    )
    lines = [
        f"{summary.source}: {summary.kind}, rows or spans: {summary.num_rows:,}",
        size,
        f"models: {_counts(summary.calls_by_model)}",
        f"tenants: {_counts(summary.queries_by_tenant)}",
        f"workflows: {_counts(summary.queries_by_workflow)}",
        f"stages: {_counts(summary.calls_by_stage)}",
    ]
    lines += [f"inferred: {note}" for note in summary.inferred]
    lines += [f"left out: {count} {why}" for why, count in summary.skipped.items()]
    lines += [f"warning: {warning}" for warning in summary.warnings]
    return lines + _problem_lines(summary)


def _problem_lines(summary: Summary) -> list[str]:
    problems = summary.problems
    if not problems:
        return []
    short = counted(summary.incomplete_queries, "query")
    lines = [f"unusable: {len(problems)}, which leaves {short} short"]
    lines += [f"  {one.place}: {one.reason}" for one in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"  and {len(problems) - SHOWN_PROBLEMS} more (all of them with --json)")
    return lines


def _counts(counts: dict[str, int]) -> str:
    most = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{name} {count}" for name, count in most[:SHOWN_NAMES]]
    if len(most) > SHOWN_NAMES:
        shown.append(f"and {len(most) - SHOWN_NAMES} more")
    return ", ".join(shown)
