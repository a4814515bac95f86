"""Reads what models answer, however they wrap it; nonsense gives nothing, never an error."""

import json
import re
from collections.abc import Sequence
from typing import Any

MAX_LINES = 20
_FENCE = re.compile(r"```[ \t]*(\w*)[ \t]*\n?(.*?)(?:```|$)", re.DOTALL)
_START = re.compile(
    r"\bSELECT\s|\bWITH\s+(?:RECURSIVE\s+)?\w+\s*(?:\([^()]*\)\s*)?AS\s*\(", re.IGNORECASE
)
_THOUGHT = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)
_BULLET = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s*")


def read_sql(answer: str) -> str:
    """Return the statement in an answer: of JSON, the last fence, or what begins with SELECT.

    Returns:
        An empty text when there is none. More than one statement stays as it is: what may run is
        not decided here.
    """
    answer = _THOUGHT.sub("", answer)
    value = _json_in(answer)
    if isinstance(value, dict) and isinstance(value.get("sql"), str):
        return _trimmed(value["sql"])
    fences = [(kind.lower(), text) for kind, text in _FENCE.findall(answer) if text.strip()]
    named = [text for kind, text in fences if kind in ("sql", "sqlite", "postgresql", "postgres")]
    if named:
        return _trimmed(named[-1])
    if fences:
        return _trimmed(fences[-1][1])
    start = _START.search(answer)
    return _trimmed(answer[start.start() :].split("\n\n")[0]) if start else ""


def read_choice(answer: str, choices: Sequence[str]) -> str:
    """Return the first of the choices that an answer names; empty when none."""
    text = _THOUGHT.sub("", answer).lower().replace(" ", "_").replace("-", "_")
    found = [(text.find(choice.lower()), choice) for choice in choices]
    named = [(place, choice) for place, choice in found if place >= 0]
    return min(named)[1] if named else ""


def read_list(answer: str) -> tuple[str, ...]:
    """Return the items of a JSON list, of bullet lines, or of a line with commas."""
    answer = _THOUGHT.sub("", answer)
    value = _json_in(answer)
    if isinstance(value, dict):
        value = next((one for one in value.values() if isinstance(one, list)), None)
    if isinstance(value, list):
        items = [str(one).strip() for one in value if isinstance(one, str | int | float)]
    else:
        lines = [line for line in answer.replace("```", "\n").splitlines() if line.strip()]
        if len(lines) == 1 and "," in lines[0]:
            lines = lines[0].split(",")
        items = [_BULLET.sub("", line).strip(" \t\"'") for line in lines]
    return tuple(dict.fromkeys(item for item in items if item))[:MAX_LINES]


def read_letters(answer: str, count: int) -> frozenset[int]:
    """Return the candidates that an answer names by their letters, as indices.

    Args:
        answer: Like `A`, `A and B`, `["B"]` or `none`.
        count: How many candidates there are.
    """
    text = _THOUGHT.sub("", answer)
    if re.search(r"\bnone\b", text, re.IGNORECASE):
        return frozenset()
    letters = re.findall(r"\b([A-Z]{1,6})\b", text)
    found = {ord(letter) - ord("A") for word in letters for letter in word}
    return frozenset(index for index in found if 0 <= index < count)


def _json_in(text: str) -> Any:
    for opening, closing in (("{", "}"), ("[", "]")):
        start, end = text.find(opening), text.rfind(closing)
        if 0 <= start < end:
            try:
                return json.loads(text[start : end + 1])
            except (ValueError, RecursionError):
                continue
    return None


def _trimmed(sql: str) -> str:
    return sql.strip().rstrip(";").strip()
