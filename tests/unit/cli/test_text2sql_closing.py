"""What `hexflow ask` shows of statements, and its last line where there is no answer."""

from typing import Any

import pytest
from rich.console import Console

from services.cli.text2sql.shown import SHOWN_CHARS, closing_text, show_event
from shared.contracts.messages import QueryResult, SqlAttempt
from shared.contracts.query_events import QueryEvent


def ended(kind: str, *statements: str, **named: Any) -> QueryResult:
    """Return a question's end after some statements that did not run."""
    attempts = tuple(
        SqlAttempt(candidate=0, round=number, sql=sql, verdict="error", detail=f"fault {number}")
        for number, sql in enumerate(statements)
    )
    return QueryResult(query_id="q", kind=kind, attempts=attempts, slo_s=120.0, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "is_small", "text"),
    [
        (
            ended("unanswered", reason="no_statement"),
            True,
            (
                "No answer: the model wrote no SQL statement; it is a very small one, so ask a "
                "stronger one with --openai URL."
            ),
        ),
        (
            ended("unanswered", "SELECT x"),
            False,
            (
                "No answer: the one statement that the model wrote did not run: fault 0; ask a "
                "stronger one, or say more with --hint."
            ),
        ),
        (
            ended("unanswered", "SELECT x", "SELECT y", ""),
            False,
            (
                "No answer: none of the 2 statements that the model wrote ran; the last: fault 1; "
                "ask a stronger one, or say more with --hint."
            ),
        ),
        (
            ended("evicted", reason="deadline_passed"),
            True,
            (
                "No answer: the deadline of 120 s came before any statement had run; give it "
                "longer with --slo SECONDS, or ask a faster model with --openai URL."
            ),
        ),
        (
            ended("rejected", reason="unknown_database", detail="there is no database 'x'"),
            False,
            "No answer: the question ended rejected (there is no database 'x').",
        ),
    ],
)
def test_it_says_in_one_sentence_what_happened_and_what_to_do(
    result: QueryResult, is_small: bool, text: str
):
    """Whatever the end was, there is a next step for the person who asked."""
    assert closing_text(result, is_small=is_small) == text


def test_a_statement_of_pages_is_shown_short():
    """A small model that repeats itself does not push the rest off the screen."""
    console = Console(record=True, width=10_000)
    sql = "SELECT " + "player_id, " * 200
    show_event(console, QueryEvent(kind="sql", at_s=0.0, sql=sql, verdict="error", detail="no"))
    shown = console.export_text().strip()
    assert len(shown) < SHOWN_CHARS + 100
    assert shown.endswith("more characters): no")
