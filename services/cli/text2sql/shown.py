"""How questions, what happens to them and their answers look."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.contracts.messages import QueryCall, QueryResult
from shared.contracts.query_events import QueryEvent

SHOWN_ROWS = 20
SHOWN_CHARS = 500


def show_event(console: Console, event: QueryEvent) -> None:
    """Write one line about what happens."""
    if event.kind == "stage_ended":
        parallel = f" × {event.siblings}" if event.siblings > 1 else ""
        name = f"{event.stage} {event.iteration}{parallel}"
        line = f"  {name:<28} {event.took_s:6.2f} s  {event.output_tokens:4} tokens"
        console.print(Text(line), style="dim")
    elif event.kind == "sql":
        style = "green" if event.verdict == "ok" else "yellow"
        why = f": {event.detail}" if event.detail else ""
        statement = _shortened(" ".join(event.sql.split())) or "(no statement)"
        console.print(Text(f"    {event.verdict:<10} {statement}{why}", style=style))
    elif event.kind == "note":
        console.print(Text(f"    {event.detail}"), style="dim")


def _shortened(statement: str) -> str:
    """Return a statement as it is shown: a small model may repeat itself for pages."""
    more = len(statement) - SHOWN_CHARS
    return f"{statement[:SHOWN_CHARS]} … ({more:,} more characters)" if more > 0 else statement


def rows_table(result: QueryResult) -> Table:
    """Return the answer's rows."""
    table = Table()
    for name in result.columns:
        table.add_column(Text(name))
    for row in result.rows[:SHOWN_ROWS]:
        table.add_row(*(Text("" if value is None else str(value)) for value in row))
    more = len(result.rows) - SHOWN_ROWS
    if more > 0 or result.is_truncated:
        shown = min(len(result.rows), SHOWN_ROWS)
        table.caption = f"the first {shown}" + (
            f"; {more} more" if more > 0 else "; there are more"
        )
    return table


def time_table(result: QueryResult) -> Table:
    """Return where the time went: per stage in the queue and in the engine, and the rest."""
    table = Table(title="where the time went", title_justify="left")
    table.add_column("stage")
    for name in ("calls", "queue s", "engine s", "tokens in", "tokens out"):
        table.add_column(name, justify="right")
    for stage in stage_times(result):
        table.add_row(
            stage["stage"],
            str(stage["calls"]),
            f"{stage['queue_s']:.2f}",
            f"{stage['engine_s']:.2f}",
            str(stage["input_tokens"]),
            str(stage["output_tokens"]),
        )
    table.add_row("database", "", "", f"{result.database_s:.2f}", "", "")
    table.add_row("total", str(len(result.calls)), "", f"{latency_s(result):.2f}", "", "")
    return table


def closing_text(result: QueryResult, *, is_small: bool) -> str:
    """Return one sentence: why a question has no answer, and what to do.

    Args:
        result: How it ended.
        is_small: Whether the small model of the development machine was asked.
    """
    written = [one for one in result.attempts if one.sql]
    num = len(written)
    if result.kind == "evicted":
        happened = f"the deadline of {result.slo_s:g} s came before any statement had run"
        remedy = "give it longer with --slo SECONDS"
        return f"No answer: {happened}; {remedy}, or ask a faster model with --openai URL."
    if result.kind != "unanswered":
        return f"No answer: the question ended {result.kind} ({result.detail or result.reason})."
    if num == 0:
        happened = "the model wrote no SQL statement"
    else:
        last = f": {written[-1].detail}" if written[-1].detail else ""
        ran = "the one statement that the model wrote did not run"
        many = f"none of the {num} statements that the model wrote ran; the last"
        happened = f"{ran if num == 1 else many}{last}"
    remedy = "ask a stronger one, or say more with --hint"
    if is_small:
        remedy = "it is a very small one, so ask a stronger one with --openai URL"
    return f"No answer: {happened}; {remedy}."


def latency_s(result: QueryResult) -> float:
    """Return the time from a question's arrival to its end, seconds."""
    return result.finished_at_s - result.arrival_s


def stage_times(result: QueryResult) -> list[dict[str, Any]]:
    """Return, per stage, its calls, tokens, and times in queue and engine on its critical path."""
    rounds: dict[tuple[str, int], list[QueryCall]] = {}
    for call in result.calls:
        rounds.setdefault((call.stage, call.iteration), []).append(call)
    found: dict[str, dict[str, Any]] = {}
    for (stage, _), calls in rounds.items():
        entry = found.setdefault(
            stage,
            {
                "stage": stage,
                "calls": 0,
                "queue_s": 0.0,
                "engine_s": 0.0,
                "input_tokens": 0,
                "output_tokens": 0,
            },
        )
        last = max(calls, key=lambda call: call.times.finished_at_s or 0.0)
        queue_s, engine_s = _times(last)
        entry["calls"] += len(calls)
        entry["queue_s"] += queue_s
        entry["engine_s"] += engine_s
        entry["input_tokens"] += sum(call.usage.input_tokens for call in calls)
        entry["output_tokens"] += sum(call.usage.output_tokens for call in calls)
    return list(found.values())


def _times(call: QueryCall) -> tuple[float, float]:
    times = call.times
    if times.ready_at_s is None or times.started_at_s is None or times.finished_at_s is None:
        return 0.0, 0.0
    return (
        max(0.0, times.started_at_s - times.ready_at_s),
        max(0.0, times.finished_at_s - times.started_at_s),
    )


def result_json(result: QueryResult) -> dict[str, Any]:
    """Return a result for machines."""
    return {
        "kind": result.kind,
        "reason": result.reason,
        "detail": result.detail,
        "answer": result.answer,
        "sql": result.sql,
        "columns": list(result.columns),
        "rows": [list(row) for row in result.rows],
        "is_truncated": result.is_truncated,
        "attempts": [
            {
                "candidate": one.candidate,
                "round": one.round,
                "sql": one.sql,
                "verdict": one.verdict,
                "detail": one.detail,
            }
            for one in result.attempts
        ],
        "stages": stage_times(result),
        "latency_s": latency_s(result),
        "slo_s": result.slo_s,
        "database_s": result.database_s,
        "calls": len(result.calls),
    }
