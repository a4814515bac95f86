"""Runs candidates on the real database, and looks for values that a question may name."""

import asyncio
import time

import msgspec

from services.text2sql.chess.linking import content_words, stems
from services.text2sql.chess.state import EMPTY, OK, UNREADABLE, Candidate, Work
from services.text2sql.sql.errors import SqlError
from services.text2sql.sql.schema import Column, Table
from shared.contracts.messages import SqlAttempt

MAX_KEYWORDS = 12
MAX_VALUES = 4
MAX_COLUMNS = 80
LARGEST_TABLE = 2_000_000
SEARCH_S = 10.0
MIN_CHARS = 3


async def try_sql(work: Work, candidate: Candidate, number: int, sql: str) -> None:
    """Run a statement, note what became of it, and tell.

    Args:
        work: The question.
        candidate: Whose statement it is.
        number: 0 for its first version, then the round of correction.
        sql: The statement as it was read; empty: there was none.
    """
    before = candidate.last
    attempt = await _attempt(work, candidate, number, sql)
    candidate.attempts.append(attempt)
    is_same = before is not None and (before.sql, before.verdict) == (attempt.sql, attempt.verdict)
    candidate.is_settled = is_same and bool(sql)
    await work.context.progress.tell(
        "sql",
        iteration=number,
        sql=attempt.sql,
        verdict=attempt.verdict,
        took_s=attempt.database_s,
        detail=attempt.detail,
    )


async def _attempt(work: Work, candidate: Candidate, number: int, sql: str) -> SqlAttempt:
    candidate.rows = None
    base = SqlAttempt(candidate=candidate.index, round=number, sql=sql, verdict=UNREADABLE)
    if not sql:
        return msgspec.structs.replace(base, detail="there was no SQL statement in the answer")
    began_s = time.monotonic()
    try:
        rows = await work.database.run(
            sql, max_rows=work.max_rows, timeout_s=max(0.1, work.context.remaining_wall_s)
        )
    except SqlError as exc:
        took_s = time.monotonic() - began_s
        return msgspec.structs.replace(
            base, verdict=exc.verdict, detail=str(exc)[:500], database_s=took_s
        )
    candidate.rows = rows
    is_empty = all(value is None for row in rows.rows for value in row)
    return msgspec.structs.replace(
        base,
        verdict=EMPTY if is_empty else OK,
        detail="" if not rows.rows or not is_empty else "every value is null",
        num_rows=len(rows.rows),
        database_s=rows.took_s,
    )


async def search_values(work: Work) -> None:
    """Look in the text columns for what the question may name; bounded in time."""
    wanted = _wanted(work)
    if not wanted:
        return
    try:
        async with asyncio.timeout(min(SEARCH_S, max(0.1, work.context.remaining_wall_s / 4))):
            for table, column in _places(work):
                found = await _search(work, table, column, wanted)
                if found:
                    work.values[table.name, column.name] = found
    except TimeoutError:
        await work.context.progress.tell("note", detail="the search for values ran out of time")


def _wanted(work: Work) -> tuple[str, ...]:
    request = work.context.request
    words = [*work.keywords, *content_words(f"{request.question} {request.hint}")]
    known = {name for table in work.database.schema.tables for name in stems(table.name)}
    found = [one.lower() for one in words if len(one) >= MIN_CHARS and not stems(one) <= known]
    return tuple(dict.fromkeys(found))[:MAX_KEYWORDS]


def _places(work: Work) -> list[tuple[Table, Column]]:
    found = [
        (table, column)
        for table in work.database.schema.tables
        for column in table.columns
        if column.is_text and not column.is_key
    ]
    return found[:MAX_COLUMNS]


async def _search(
    work: Work, table: Table, column: Column, wanted: tuple[str, ...]
) -> tuple[str, ...]:
    """Return values that contain, or are, one of the words; whole matches first."""
    if column.is_closed:
        found = tuple(one for one in column.samples if any(w in one.lower() for w in wanted))
    elif table.num_rows > LARGEST_TABLE:
        return ()
    else:
        try:
            found = await work.database.texts_like(table.name, column.name, wanted, limit=50)
        except SqlError:
            return ()
    whole = [one for one in found if one.strip().lower() in wanted]
    part = [one for one in found if one not in whole]
    return tuple([*whole, *part][:MAX_VALUES])
