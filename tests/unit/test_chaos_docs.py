"""Every rule of the design and every known fault has a test, and the page names it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/chaos.md").read_text()
ROW = re.compile(r"^\| (?P<what>[^|`]+) \| (?P<tests>`[^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(?P<file>tests/[\w/.]+)::(?P<test>\w+)`")
RULES = [str(number) for number in range(1, 13)]


def rows() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (what, named tests) of every row of the page that names tests."""
    return [(match["what"].strip(), NAMED.findall(match["tests"])) for match in ROW.finditer(PAGE)]


def functions_of(path: Path) -> set[str]:
    """Return the names of all functions in a file."""
    found = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, found)}


@pytest.mark.parametrize(("what", "named"), rows(), ids=lambda value: str(value)[:40])
def test_every_named_test_exists(what: str, named: list[tuple[str, str]]):
    """A row names at least one test, and each can be run."""
    assert named, what
    for file, test in named:
        assert test in functions_of(ROOT / file), f"{file} has no {test}"


def test_every_rule_has_a_row():
    """The twelve invariants of the design are all in the table."""
    numbers = {match for what, _ in rows() for match in re.findall(r"^(\d+)\.", what)}
    assert sorted(numbers, key=int) == RULES


def test_the_known_faults_are_all_there():
    """What comparable systems got wrong has a row each."""
    known = (
        "hard kill after pop",
        "backoff that becomes a deadline",
        "equal deadlines",
        "stuck after a broker restart",
        "dirty connection",
        "skipping an unfinished message",
        "poison",
        "hot key",
        "shutdown that hangs",
    )
    text = "\n".join(what for what, _ in rows())
    assert [fault for fault in known if fault not in text] == []
