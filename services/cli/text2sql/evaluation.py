"""`hexflow eval`: a question file through the agent, and how well it did."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from services.cli.console import check_output, print_json, stderr_console, stdout_console
from services.cli.engine_options import (
    NOTHING_TO_SAY,
    OpenAIOption,
    RealEngineOption,
    real_choice_of,
)
from services.cli.interrupts import run_until_stopped
from services.cli.options import JsonOption, VerboseOption, configure_logs
from services.cli.progress import JobProgress
from services.cli.text2sql.ask import TraceOption
from services.cli.text2sql.databases import database_named
from services.cli.text2sql.mesh import AgentPlan, open_agent_mesh, unseen
from services.cli.text2sql.scoring import Score, same_rows, summary
from services.text2sql.recording import trace_of
from services.text2sql.samples.writing import (
    SAMPLES,
    Question,
    QuestionFile,
    read_questions,
    sample_questions,
)
from services.text2sql.sql.database import Database
from services.text2sql.sql.errors import SqlError
from shared.contracts.messages import QueryRequest, QueryResult
from shared.domain.near_names import did_you_mean
from shared.errors import ConfigError
from shared.simulation.trace_file import dump_trace

SCRIPTED_TIME_SCALE = 4.0
GOLD_ROWS = 1_000

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class EvalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask, and where.

    Attributes:
        agent: The mesh and its agent.
        questions: With their databases.
        slo_s: Deadline of each, workload seconds.
        concurrency: Most questions at a time.
    """

    agent: AgentPlan
    questions: tuple[Question, ...]
    slo_s: float
    concurrency: int


async def evaluate(plan: EvalPlan, console: Console, *, quiet: bool) -> list[Score]:
    """Ask every question, and compare with what its gold statement gives.

    Raises:
        ConfigError: A database cannot be used, or a gold statement cannot run.
    """
    async with AsyncExitStack() as stack:
        databases = {
            name: await stack.enter_async_context(Database.open(name, url))
            for name, url in plan.agent.databases.items()
        }
        asking = await stack.enter_async_context(open_agent_mesh(plan.agent, console))
        progress = JobProgress(console, quiet=quiet)
        advance = stack.enter_context(progress.stage("questions", len(plan.questions)))
        slots = asyncio.Semaphore(plan.concurrency)
        scores: list[Score] = []

        async def one(question: Question) -> None:
            async with slots:
                result = await asking(_request(plan, question), unseen)
            scores.append(await _score(databases[question.database], question, result))
            advance()

        async with asyncio.TaskGroup() as group:
            for question in plan.questions:
                group.create_task(one(question), name=f"question-{question.id}")
    order = {question.id: place for place, question in enumerate(plan.questions)}
    return sorted(scores, key=lambda score: order[score.question.id])


def _request(plan: EvalPlan, question: Question) -> QueryRequest:
    return QueryRequest(
        query_id=f"eval-{question.id[:40]}-{secrets.token_hex(6)}",
        question=question.question,
        hint=question.hint,
        database=question.database,
        slo_s=plan.slo_s,
        max_rows=GOLD_ROWS,
    )


async def _score(database: Database, question: Question, result: QueryResult) -> Score:
    try:
        gold = await database.run(question.sql, max_rows=GOLD_ROWS)
    except SqlError as exc:
        raise ConfigError(f"the SQL of question {question.id!r} cannot run: {exc}") from exc
    is_right = result.kind == "completed" and same_rows(result.rows, gold)
    first = [one for one in result.attempts if one.candidate == 0 and one.round == 0]
    return Score(
        question=question,
        result=result,
        is_right=is_right,
        was_wrong_at_first=not first or not await _gives(database, first[0].sql, question.sql),
    )


async def _gives(database: Database, sql: str, gold: str) -> bool:
    """Return whether a statement gives what the gold statement gives."""
    if " ".join(sql.split()) == " ".join(gold.split()):
        return True
    try:
        found = await database.run(sql, max_rows=GOLD_ROWS)
        right = await database.run(gold, max_rows=GOLD_ROWS)
    except SqlError:
        return False
    return same_rows(found.rows, right)


def load_questions(files: Sequence[str]) -> list[QuestionFile]:
    """Return the question files that a command names; those of the samples by default.

    Raises:
        ConfigError: One cannot be read.
    """
    return [_questions_named(name) for name in files or sorted(SAMPLES)]


def _questions_named(name: str) -> QuestionFile:
    if name in SAMPLES:
        return sample_questions(name)
    if not Path(name).exists():
        raise ConfigError(
            f"{name}: no such file, and no sample ({', '.join(sorted(SAMPLES))})"
            f"{did_you_mean(name, SAMPLES)}"
        )
    return read_questions(Path(name))


def _plan_questions(
    files: Sequence[QuestionFile], limit: int | None
) -> tuple[dict[str, str], tuple[Question, ...]]:
    """Return the databases by name, and the questions with theirs filled in."""
    databases: dict[str, str] = {}
    found: list[Question] = []
    for file in files:
        for one in file.questions[:limit]:
            name, url = database_named(one.database or file.database)
            if databases.setdefault(name, url) != url:
                raise ConfigError(f"two databases of the question files are called {name!r}")
            found.append(msgspec.structs.replace(one, database=name))
    if len({one.id for one in found}) < len(found):
        raise ConfigError("two questions have the same id")
    return databases, tuple(found)


@app.command()
def command(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE...]",
            help="Question files (TOML or JSON), or samples: bazaar, league. Default: both.",
        ),
    ] = None,
    scripted: Annotated[
        bool,
        typer.Option(
            "--scripted",
            help="Answer with the scripted model: deterministic, for tests of the agent itself.",
        ),
    ] = False,
    engine: RealEngineOption = None,
    openai: OpenAIOption = None,
    model: Annotated[str, typer.Option(help="Model to ask for, where several are served.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions of each file.")] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1_000, help="Questions under way at a time.")
    ] = 4,
    slo: Annotated[
        float, typer.Option(min=1.0, help="Deadline of each, workload seconds.")
    ] = 300.0,
    schema_tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of schema in a prompt; 0: what fits.")
    ] = 0,
    trace: TraceOption = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run a question file through the agent; report execution accuracy, latency and cost.

    An answer is right when its rows are those of the question's own SQL.
    """
    configure_logs(verbose=verbose)
    check_output(trace)
    if scripted and (openai or model or engine):
        raise ConfigError("--scripted answers by itself: leave --engine, --openai and --model out")
    engines = None if scripted else real_choice_of(engine, openai, NOTHING_TO_SAY, model=model)
    databases, questions = _plan_questions(load_questions(files or ()), limit)
    plan = EvalPlan(
        agent=AgentPlan(
            databases=databases,
            engines=engines,
            questions=questions if scripted else (),
            model=model,
            time_scale=SCRIPTED_TIME_SCALE if scripted else 1.0,
            schema_tokens=schema_tokens,
            max_open=concurrency,
        ),
        questions=questions,
        slo_s=slo,
        concurrency=concurrency,
    )
    console = stderr_console()
    scores = run_until_stopped(lambda _: evaluate(plan, console, quiet=json), is_graceful=False)
    if trace is not None:
        trace.write_text(dump_trace(trace_of([one.result for one in scores])), encoding="utf-8")
    found = summary(scores)
    if json:
        print_json(found)
    else:
        stdout_console().print(_table(found))
        for wrong in found["wrong"]:
            console.print(f"wrong: {wrong['id']} ({wrong['kind']} {wrong['reason']})", style="dim")


def _table(found: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("questions", str(found["questions"]))
    table.add_row("execution accuracy", f"{found['execution_accuracy']:.1%}")
    table.add_row("unanswered", str(found["unanswered"]))
    table.add_row("first candidates wrong", str(found["first_candidates_wrong"]))
    table.add_row("of these corrected", str(found["corrected"]))
    for name in ("p50_s", "p95_s", "p99_s"):
        value = found[name]
        table.add_row(name.upper().replace("_S", ""), "–" if value is None else f"{value:.1f} s")
    table.add_row("within SLO", f"{found['attainment']:.1%}")
    table.add_row("calls per question", f"{found['calls_per_query']:.1f}")
    table.add_row("tokens in per question", f"{found['input_tokens_per_query']:.0f}")
    table.add_row("tokens out per question", f"{found['output_tokens_per_query']:.0f}")
    return table
