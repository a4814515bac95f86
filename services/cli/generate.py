"""`hexflow generate`: write a generated workload as a trace file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from services.cli.console import counted, stderr_console
from services.cli.workload import generated
from shared.errors import ConfigError
from shared.simulation.traces import dump_authors_trace

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def write(
    num: Annotated[int, typer.Option("--num", "-n", help="Number of queries.")] = 100,
    mode: Annotated[
        str, typer.Option(help="natural: 70% need no revision; stress: 0-10 revisions, uniform.")
    ] = "natural",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal files.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: stdout.")
    ] = None,
) -> None:
    """Write Text-to-SQL queries that match published statistics, as a JSON trace."""
    queries = generated(num, mode, seed)
    text = dump_authors_trace(queries)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text)
    except OSError as exc:
        raise ConfigError(f"{output} cannot be written: {exc.strerror or exc}") from exc
    num_calls = sum(query.num_calls for query in queries)
    size = f"{counted(len(queries), 'query')}, {counted(num_calls, 'call')}"
    stderr_console().print(f"{output}: {size}")
