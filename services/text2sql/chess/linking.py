"""Schema linking: which tables, columns and values a question is about, within a token budget.

Everything is kept where the whole schema fits. Else tables are taken by how much of their names,
comments and values the question mentions, with those that join them; of each table the keys stay,
then the columns that score, then others while there is room.
"""

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from services.text2sql.sql.schema import Column, Schema, Table

BYTES_PER_TOKEN = 4
MAX_TABLES = 10
SHOWN_SAMPLES = 3
Place = tuple[str, str]
_WORD = re.compile(r"[a-zà-öø-ÿ0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_STOP = frozenset(
    (  # noqa: SIM905 - words
        "a an and are as at be been by did do does each every for from had has have how in is it "
        "its many much most of on one or per that the their them there they this to was were what "
        "when where which who whose with number give name all any"
    ).split()
)
_CONTROL = re.compile(r"<\|[^|<>]{0,40}\|>|\[/?INST\]|`{3,}|[\x00-\x08\x0b-\x1f\x7f]")


def stems(text: str) -> frozenset[str]:
    """Return the words of a text in a form in which singular and plural are equal."""
    words = _WORD.findall(_CAMEL.sub(" ", text).replace("_", " ").lower())
    return frozenset(_stem(word) for word in words if word not in _STOP)


def _stem(word: str) -> str:
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("ed", ""), ("ing", ""), ("s", "")):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: len(word) - len(ending)] + instead
    return word


def content_words(text: str) -> tuple[str, ...]:
    """Return what a question may name a value by: quoted parts, capitalised words, other words."""
    quoted = re.findall(r"'([^']{2,60})'|\"([^\"]{2,60})\"", text)
    words = [one or other for one, other in quoted]
    plain = (word.strip("'/-") for word in re.findall(r"\w[\w'/-]+", text))
    words += [word for word in plain if len(word) >= 3 and word.lower() not in _STOP]
    return tuple(dict.fromkeys(words))


def as_data(text: str, longest: int = 200) -> str:
    """Return text from a database for a prompt: short, and without what could end its place."""
    clean = _CONTROL.sub(" ", text)
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a question.

    Attributes:
        words: Stems of the question, its hint and its keywords.
        values: (table, column) -> values there that the question may mean.
    """

    words: frozenset[str]
    values: Mapping[Place, tuple[str, ...]] = {}


def prune(schema: Schema, evidence: Evidence, max_tokens: int) -> tuple[Table, ...]:
    """Return the tables with the columns that a prompt should show.

    Args:
        schema: The database.
        evidence: What the question is about.
        max_tokens: Most tokens that they may take, as `render` writes them.
    """
    if tokens_of(schema.tables, evidence) <= max_tokens:
        return schema.tables
    scores = {table.name: _table_score(table, evidence) for table in schema.tables}
    ranked = sorted(schema.tables, key=lambda table: -scores[table.name])
    chosen = [table.name for table in ranked if scores[table.name] > 0][:MAX_TABLES]
    chosen = _joined(schema, chosen or [table.name for table in ranked[:MAX_TABLES]])
    return _fill(schema, chosen, evidence, max_tokens)


def render(tables: Sequence[Table], evidence: Evidence) -> str:
    """Return tables as a prompt shows them; values come from the data and are cleaned."""
    return "\n".join(line for table in tables for line in _lines(table, evidence))


def tokens_of(tables: Sequence[Table], evidence: Evidence) -> int:
    """Return about how many tokens the rendered tables take."""
    return len(render(tables, evidence).encode()) // BYTES_PER_TOKEN


def _lines(table: Table, evidence: Evidence) -> Iterable[str]:
    size = f" ({table.num_rows} rows)" if table.num_rows >= 0 else ""
    comment = f": {as_data(table.comment)}" if table.comment else ""
    yield f"Table {table.name}{size}{comment}"
    links = {
        name: f"{key.table}.{target}"
        for key in table.foreign_keys
        for name, target in zip(key.columns, key.target, strict=False)
    }
    for column in table.columns:
        parts = [f"  {column.name} {column.type}"]
        if column.is_key:
            parts.append("key")
        if column.name in links:
            parts.append(f"-> {links[column.name]}")
        if column.comment:
            parts.append(as_data(column.comment))
        values = _shown_values(table, column, evidence)
        if values:
            parts.append("values: " + ", ".join(f"'{as_data(one, 60)}'" for one in values))
        yield "; ".join(parts)


def _shown_values(table: Table, column: Column, evidence: Evidence) -> tuple[str, ...]:
    if not column.is_text:
        return ()
    found = evidence.values.get((table.name, column.name), ())
    known = column.samples if column.is_closed else column.samples[:SHOWN_SAMPLES]
    return tuple(dict.fromkeys((*found, *known)))


def _column_score(table: Table, column: Column, evidence: Evidence) -> float:
    names = stems(column.name)
    score = 2.0 * len(names & evidence.words) + 0.5 * len(stems(column.comment) & evidence.words)
    score += sum(
        0.5
        for name in names - evidence.words
        for word in evidence.words
        if min(len(name), len(word)) >= 4 and (name.startswith(word) or word.startswith(name))
    )
    samples = stems(" ".join(column.samples)) if column.is_text else frozenset()
    score += 1.0 * bool(samples & evidence.words)
    return score + 3.0 * bool(evidence.values.get((table.name, column.name)))


def _table_score(table: Table, evidence: Evidence) -> float:
    own = 3.0 * len(stems(table.name) & evidence.words)
    own += 0.5 * len(stems(table.comment) & evidence.words)
    best = sorted((_column_score(table, one, evidence) for one in table.columns), reverse=True)
    return own + sum(best[:3])


def _neighbours(schema: Schema) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {table.name: set() for table in schema.tables}
    for table in schema.tables:
        for key in table.foreign_keys:
            if key.table in found:
                found[table.name].add(key.table)
                found[key.table].add(table.name)
    return found


def _joined(schema: Schema, chosen: Sequence[str]) -> list[str]:
    """Return the tables chosen, and those on the shortest way from the first to each other."""
    near = _neighbours(schema)
    found = dict.fromkeys(chosen)
    for target in chosen[1:]:
        found.update(dict.fromkeys(_way(near, chosen[0], target)))
    return list(found)


def _way(near: Mapping[str, Collection[str]], start: str, target: str) -> list[str]:
    came_from: dict[str, str] = {start: start}
    queue = deque([start])
    while queue and target not in came_from:
        here = queue.popleft()
        for other in sorted(near[here]):
            if other not in came_from:
                came_from[other] = here
                queue.append(other)
    way = []
    here = target if target in came_from else start
    while here != start:
        way.append(here)
        here = came_from[here]
    return way


def _fill(
    schema: Schema, chosen: Sequence[str], evidence: Evidence, max_tokens: int
) -> tuple[Table, ...]:
    tables = [table for name in chosen if (table := schema.table(name)) is not None]
    kept = {table.name: _bones(table, chosen) for table in tables}
    rest = [
        (_column_score(table, column, evidence), -place, table.name, column.name)
        for place, table in enumerate(tables)
        for column in table.columns
        if column.name not in kept[table.name]
    ]
    used = tokens_of(_with_columns(tables, kept), evidence)
    for _, _, table_name, column_name in sorted(rest, reverse=True):
        table = next(one for one in tables if one.name == table_name)
        column = table.column(column_name)
        if column is None:
            continue
        one = msgspec.structs.replace(table, columns=(column,), comment="", num_rows=-1)
        cost = tokens_of([one], evidence)
        if used + cost <= max_tokens:
            kept[table_name].add(column_name)
            used += cost
    return tuple(_with_columns(tables, kept))


def _bones(table: Table, chosen: Collection[str]) -> set[str]:
    """Return the columns that joins need."""
    keys = {column.name for column in table.columns if column.is_key}
    return keys | {
        name for key in table.foreign_keys if key.table in chosen for name in key.columns
    }


def _with_columns(tables: Sequence[Table], kept: Mapping[str, Collection[str]]) -> list[Table]:
    return [
        msgspec.structs.replace(
            table, columns=tuple(one for one in table.columns if one.name in kept[table.name])
        )
        for table in tables
    ]
