"""What the scripted model answers. It sees the prompt and nothing else.

It knows the right statement of each question of a question file, and how its first candidates are
to be wrong. It gives a statement only when the prompt shows every table, column and text value that
the right one needs: where schema linking dropped one, it answers something else, and the question
is answered wrongly. As a judge it names the candidates whose statement is the right one.
"""

import json
import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import sqlglot
from sqlglot import exp

from services.text2sql.chess import prompts
from services.text2sql.chess.linking import content_words
from services.text2sql.chess.parsing import read_sql
from services.text2sql.samples.writing import Question
from services.text2sql.scripted.faults import PROSE, RIGHT, faulty

UNKNOWN = "I cannot tell."
IGNORANT_SQL = "SELECT 'the schema that was shown does not hold it' AS answer"
_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)
_CANDIDATE = re.compile(r"^Candidate ([A-Z]):\n```sql\n(.*?)\n```", re.MULTILINE | re.DOTALL)
_STATEMENT = re.compile(r"^Statement:\n(?:```sql\n(.*?)\n```|\()", re.MULTILINE | re.DOTALL)
_TOOLS = re.compile(r"^Tools: (.*)$", re.MULTILINE)


class ScriptedModel:
    """Answers chat messages.

    Args:
        questions: What it knows.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self._known = {one.question: one for one in questions}

    def answer(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the answer to a chat; something useless to what it does not know."""
        system = str(messages[0].get("content", "")) if len(messages) > 1 else ""
        user = str(messages[-1].get("content", "")) if messages else ""
        found = _QUESTION.search(user)
        question = self._known.get(found.group(1)) if found else None
        if question is None:
            return UNKNOWN
        if system in prompts.CANDIDATE_SYSTEMS:
            return self._candidate(question, user, prompts.CANDIDATE_SYSTEMS.index(system))
        answer = {
            prompts.REVISE_SYSTEM: _revised,
            prompts.ROUTER_SYSTEM: _routed,
            prompts.KEYWORDS_SYSTEM: _keywords,
            prompts.TESTS_SYSTEM: _tests,
            prompts.JUDGE_SYSTEM: _judged,
            prompts.PICK_SYSTEM: _judged,
        }.get(system)
        return answer(question, user) if answer else UNKNOWN

    def _candidate(self, question: Question, user: str, way: int) -> str:
        if not is_shown(question.sql, user):
            return _fenced(IGNORANT_SQL)
        first = versions(question, way)[0]
        if first == PROSE:
            return first
        if way:  # the one that plans first
            return f"Join what is needed, filter, then count.\n{_fenced(first)}"
        return _fenced(first)


def versions(question: Question, way: int) -> list[str]:
    """Return what a candidate says at first, after one correction, and so on; the last is right."""
    faults = question.faults[way].split("+") if way < len(question.faults) else [RIGHT]
    wrong = [faulty(question.sql, fault) for fault in faults if fault != RIGHT]
    return [*wrong, faulty(question.sql, RIGHT)]


def is_shown(sql: str, prompt: str) -> bool:
    """Return whether a prompt shows every table, column and text value of a statement."""
    shown = _shown_columns(prompt)
    tree = sqlglot.parse_one(sql, read="sqlite")
    tables = {table.alias_or_name: table.name for table in tree.find_all(exp.Table)}
    aliases = {alias.alias for alias in tree.find_all(exp.Alias)}
    for column in tree.find_all(exp.Column):
        named = tables.get(column.table) if column.table else None
        places = [named] if named else list(tables.values())
        is_found = any(column.name in shown.get(place, ()) for place in places)
        if not is_found and column.name not in aliases:
            return False
    if not set(tables.values()) <= set(shown):
        return False
    texts = [one.name for one in tree.find_all(exp.Literal) if one.is_string and one.name]
    return all(text in prompt for text in texts)


def _shown_columns(prompt: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    columns: set[str] = set()
    for line in prompt.splitlines():
        if line.startswith("Table "):
            columns = found.setdefault(re.split(r"[ (:]", line[6:], maxsplit=1)[0], set())
        elif line.startswith("  "):
            columns.add(line.split()[0])
    return found


def _revised(question: Question, user: str) -> str:
    if not is_shown(question.sql, user):
        return _fenced(IGNORANT_SQL)
    found = _STATEMENT.search(user)
    tried = _plain(found.group(1) or PROSE) if found else ""
    for way in range(len(prompts.CANDIDATE_SYSTEMS)):
        known = versions(question, way)
        for before, after in pairwise(known):
            if _plain(before) == tried:
                return after if after == PROSE else _fenced(after)
    return _fenced(faulty(question.sql, RIGHT))


def _routed(question: Question, user: str) -> str:
    found = _TOOLS.search(user)
    tools = found.group(1).split(", ") if found else []
    kind = zlib.crc32(question.id.encode()) % 7
    if kind == 0:
        return UNKNOWN  # nonsense now and then
    if "generate_unit_test" in tools:
        return "done" if kind == 1 else "generate_unit_test"
    if "extract_keywords" in tools:
        return "retrieve_values" if kind == 2 else "I would use extract_keywords."
    if kind == 3 and "select_columns" in tools:
        return "select_columns"
    return tools[0] if tools else UNKNOWN


def _keywords(question: Question, user: str) -> str:
    del user
    return json.dumps(content_words(f"{question.question} {question.hint}"))


def _tests(question: Question, user: str) -> str:
    del user
    if zlib.crc32(question.id.encode()) % 5 == 0:
        return ""
    return "1. it has exactly the rows that are asked for\n2. it has no column too many"


def _judged(question: Question, user: str) -> str:
    right = _plain(question.sql)
    letters = [letter for letter, sql in _CANDIDATE.findall(user) if _plain(sql) == right]
    return ", ".join(letters) or "none"


def _fenced(sql: str) -> str:
    return f"```sql\n{sql};\n```"


def _plain(sql: str) -> str:
    return " ".join(read_sql(f"```sql\n{sql}\n```").split())
