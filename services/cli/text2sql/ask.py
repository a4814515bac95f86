"""`hexflow ask`: one question about a database, through the whole mesh."""

import secrets
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from services.cli.console import (
    EXIT_FAILED,
    check_output,
    print_json,
    stderr_console,
    stdout_console,
)
from services.cli.engine_options import (
    NOTHING_TO_SAY,
    OpenAIOption,
    RealEngineOption,
    real_choice_of,
)
from services.cli.interrupts import run_until_stopped
from services.cli.options import (
    JsonOption,
    NamedKafkaOption,
    NamedRedisOption,
    VerboseOption,
    configure_logs,
    mesh_settings,
)
from services.cli.text2sql.databases import database_named, is_plain_name
from services.cli.text2sql.mesh import AgentPlan, open_agent_mesh
from services.cli.text2sql.shown import (
    closing_text,
    result_json,
    rows_table,
    show_event,
    time_table,
)
from services.text2sql.flow.definition import load_definition
from services.text2sql.recording import trace_of
from shared.contracts.messages import QueryRequest, QueryResult
from shared.contracts.query_events import QueryEvent
from shared.errors import ConfigError
from shared.simulation.trace_file import dump_trace

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", help="Also write the run as a trace for simulate and compare."),
]


class AskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask, and where.

    Attributes:
        agent: The mesh and its agent.
        request: The question.
        is_quiet: Whether nothing is shown meanwhile.
    """

    agent: AgentPlan
    request: QueryRequest
    is_quiet: bool


async def ask(plan: AskPlan, console: Console) -> QueryResult:
    """Ask one question and show what happens to it.

    Raises:
        ConfigError: A database, model or file cannot be used.
    """

    def show(event: QueryEvent) -> None:
        if not plan.is_quiet:
            show_event(console, event)

    async with open_agent_mesh(plan.agent, console) as asking:
        return await asking(plan.request, show)


@app.command()
def command(
    question: Annotated[str, typer.Argument(help="What to ask, in quotes.")],
    db: Annotated[
        str,
        typer.Option(
            metavar="URL|NAME",
            help="sqlite:///FILE, postgresql://USER@HOST:PORT/NAME, or the name of a sample: "
            "bazaar, league. With --kafka also: a name that the agents there know.",
        ),
    ],
    hint: Annotated[str, typer.Option(help="What one has to know beside the question.")] = "",
    engine: RealEngineOption = None,
    openai: OpenAIOption = None,
    model: Annotated[str, typer.Option(help="Model to ask for, where several are served.")] = "",
    kafka: NamedKafkaOption = None,
    redis: NamedRedisOption = None,
    slo: Annotated[float, typer.Option(min=1.0, help="Deadline, seconds.")] = 120.0,
    max_rows: Annotated[int, typer.Option(min=1, help="Most rows of the answer.")] = 100,
    workflow: Annotated[
        Path | None, typer.Option(help="Another definition (TOML) of the workflow.")
    ] = None,
    trace: TraceOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Ask a question about a database, in plain words; see the SQL, the rows, and the time.

    By default the whole mesh runs in this process, in front of llama.cpp with
    SmolLM2-135M-Instruct on this machine's CPU: a very small model, which proves the path and not
    the answers. With --openai URL a better one answers; with --kafka and --redis a mesh that runs
    already is asked. What the model writes is checked, and runs read-only.
    """
    configure_logs(verbose=verbose)
    check_output(trace)
    if not question.strip():
        raise ConfigError("there is no question")
    if (kafka is None) != (redis is None):
        raise ConfigError("--kafka and --redis go together")
    if kafka is not None and (engine or openai):
        raise ConfigError("--kafka asks a mesh that runs already: leave --engine and --openai out")
    engines = (
        None if kafka is not None else real_choice_of(engine, openai, NOTHING_TO_SAY, model=model)
    )
    if workflow is not None:
        load_definition(workflow)  # told now, and not when a model has been started
    is_theirs = kafka is not None and is_plain_name(db)
    name, url = (db, "") if is_theirs else database_named(db)
    plan = AskPlan(
        agent=AgentPlan(
            databases={} if is_theirs else {name: url},
            engines=engines,
            settings=mesh_settings(kafka=kafka, redis=redis) if kafka else None,
            model=model,
            workflow_files=(str(workflow),) if workflow else (),
        ),
        request=QueryRequest(
            query_id=f"ask-{secrets.token_hex(8)}",
            question=question,
            hint=hint,
            database=name,
            slo_s=slo,
            max_rows=max_rows,
            events=True,
        ),
        is_quiet=json,
    )
    result = run_until_stopped(lambda _: ask(plan, stderr_console()), is_graceful=False)
    if trace is not None:
        trace.write_text(dump_trace(trace_of([result])), encoding="utf-8")
    _show(result, json=json, is_small=openai is None and kafka is None)
    if result.kind != "completed":
        raise typer.Exit(EXIT_FAILED)


def _show(result: QueryResult, *, json: bool, is_small: bool) -> None:
    if json:
        print_json(result_json(result))
        return
    out, notes = stdout_console(), stderr_console()
    if result.kind == "completed":
        out.print(Text(result.sql))
        out.print(rows_table(result))
    if result.detail and result.kind == "completed":
        notes.print(Text(result.detail), style="yellow")
    notes.print(time_table(result))
    if result.kind != "completed":
        notes.print(Text(closing_text(result, is_small=is_small), style="red"))
