"""What is read from models' answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.text2sql.chess.parsing import read_choice, read_letters, read_list, read_sql

TOOLS = ("extract_keywords", "retrieve_values", "done")


@pytest.mark.parametrize(
    ("answer", "sql"),
    [
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        ("Here:\n```SQL\nSELECT 1\n```\nor\n```sql\nSELECT 2\n```", "SELECT 2"),
        ("```\nSELECT 1\n```", "SELECT 1"),
        ("```sql\nSELECT 1", "SELECT 1"),
        ("<think>```sql\nSELECT 9\n```</think>SELECT 1;", "SELECT 1"),
        ('{"sql": "SELECT 1;"}', "SELECT 1"),
        (
            'Sure! {"sql": "WITH x AS (SELECT 1) SELECT * FROM x"}',
            "WITH x AS (SELECT 1) SELECT * FROM x",
        ),
        (
            "The answer is SELECT a FROM t\nWHERE b = 1\n\nIt counts.",
            "SELECT a FROM t\nWHERE b = 1",
        ),
        ("```sql\nDROP TABLE t; SELECT 1\n```", "DROP TABLE t; SELECT 1"),
        ("I do not know.", ""),
        ("I am happy to help you with that, one moment.", ""),
        ("Try WITH x(a) AS (SELECT 1) SELECT a FROM x", "WITH x(a) AS (SELECT 1) SELECT a FROM x"),
        ("", ""),
        ("<think>never ends SELECT 1", ""),
    ],
)
def test_a_statement_is_found_however_it_is_wrapped(answer: str, sql: str):
    """Fences, JSON and plain text; what may run is decided elsewhere."""
    assert read_sql(answer) == sql


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ("done", "done"),
        ("I would use `Extract Keywords` now.", "extract_keywords"),
        ("retrieve-values, then done", "retrieve_values"),
        ("whatever", ""),
    ],
)
def test_the_first_tool_named_is_the_choice(answer: str, choice: str):
    """Case, spaces and dashes do not matter."""
    assert read_choice(answer, TOOLS) == choice


@pytest.mark.parametrize(
    ("answer", "items"),
    [
        ('["Zürich", "orders"]', ("Zürich", "orders")),
        ('```json\n{"keywords": ["a", "b", "a"]}\n```', ("a", "b")),
        ("- one\n- two\n\n3. three", ("one", "two", "three")),
        ("Zürich, Bern, 'Genève'", ("Zürich", "Bern", "Genève")),
        ("", ()),
    ],
)
def test_lists_are_read_in_any_form(answer: str, items: tuple[str, ...]):
    """JSON, bullets, numbers, commas; without repetition."""
    assert read_list(answer) == items


@pytest.mark.parametrize(
    ("answer", "letters"),
    [("A", {0}), ("A and C", {0, 2}), ("AB", {0, 1}), ("None of them", set()), ("Z", set())],
)
def test_judges_name_candidates_by_letter(answer: str, letters: set[int]):
    """Letters that no candidate has are passed over."""
    assert read_letters(answer, 3) == letters


@given(st.text(max_size=300))
def test_nonsense_raises_nothing(answer: str):
    """Whatever a model says, reading it gives a value."""
    assert isinstance(read_sql(answer), str)
    assert read_choice(answer, TOOLS) in ("", *TOOLS)
    assert len(read_list(answer)) <= 20
    assert read_letters(answer, 2) <= {0, 1}
