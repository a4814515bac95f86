"""Calls from a table: a header line, then one row per LLM call.

| column | other names | meaning |
|---|---|---|
| `query_id` | `trace_id`, `session_id`, `conversation_id` | groups calls into queries (needed) |
| `start_time` | `arrival_time`, `start`, `timestamp` | when the call was asked for (needed) |
| `input_tokens` | `prompt_tokens` | prompt length (needed) |
| `output_tokens` | `completion_tokens`, `generated_tokens` | generated length (needed) |
| `end_time` | `finish_time`, `end` | when its last token came |
| `duration_s` | `latency_s` | instead of `end_time` |
| `stage` | `step`, `operation` | stage name |
| `call_id` | `request_id`, `span_id` | names the call, so that `parents` can |
| `parents` | `parent_ids` | `call_id`s it waited for, separated by `;` |
| `model` | `model_name` | model asked for |
| `tenant` | `user`, `customer` | who asked |
| `workflow` | `agent` | kind of the query |
| `slo_s` | `deadline_s` | the query's deadline, seconds after its arrival |
| `query_arrival` | | when the query arrived, when that was before its first call |
| `prefix_id` | `prefix_ids`, `prefix_hash` | shared text at the prompt's start, `;` between parts |
| `prefix_tokens` | | length of each of those parts |
| `cached_tokens` | `cached_input_tokens` | prompt tokens found in a cache |

Separators `,`, `;`, tab and `|` are told from the header. Other columns are ignored.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from shared.domain.near_names import nearest
from shared.domain.trace import PrefixPart
from shared.errors import ConfigError
from shared.simulation.importing.recording import (
    MAX_NAME,
    NS_PER_S,
    AttributeNames,
    Problem,
    RecordedCall,
    Recording,
)
from shared.simulation.importing.values import instant_ns, positive_s, read, tokens

T = TypeVar("T")

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "query_id": ("trace_id", "session_id", "conversation_id"),
    "start_time": ("arrival_time", "start", "timestamp"),
    "input_tokens": ("prompt_tokens",),
    "output_tokens": ("completion_tokens", "generated_tokens"),
    "end_time": ("finish_time", "end"),
    "duration_s": ("latency_s",),
    "stage": ("step", "operation"),
    "call_id": ("request_id", "span_id"),
    "parents": ("parent_ids",),
    "model": ("model_name",),
    "tenant": ("user", "customer"),
    "workflow": ("agent",),
    "slo_s": ("deadline_s",),
    "query_arrival": (),
    "prefix_id": ("prefix_ids", "prefix_hash"),
    "prefix_tokens": (),
    "cached_tokens": ("cached_input_tokens",),
}
NEEDED = ("query_id", "start_time", "input_tokens", "output_tokens")
UNNAMED_STAGE = "call"
_SEPARATORS = ",;\t|"
_LIST_SEPARATOR = ";"


def read_csv(
    text: str | bytes, source: str = "table", names: AttributeNames | None = None
) -> Recording:
    """Read a table of calls.

    Args:
        text: The file's content (bytes are UTF-8).
        source: Name of the file, for messages.
        names: Columns that are called otherwise than the ones above.

    Raises:
        ConfigError: It is no table, or a needed column is missing; says which and what is near.
    """
    rows = _rows(_decoded(text, source), source)
    header_line, header = next(rows, (0, []))
    if not any(cell.strip() for cell in header):
        raise ConfigError(f"{source}: the file is empty; the first line must name the columns")
    columns = _columns(header, names or AttributeNames(), f"{source}:{header_line}")
    recording = Recording(source=source, kind="table")
    ignored = [cell.strip() for i, cell in enumerate(header) if i not in columns.values()]
    if ignored:
        recording.notes.append(f"columns not used: {', '.join(ignored)}")
    for line, cells in rows:
        recording.num_rows += 1
        _take_row(recording, _Row(f"{source}:{line}", columns, cells, len(header)))
    return recording


def _decoded(text: str | bytes, source: str) -> str:
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{source}: not UTF-8: {exc}") from exc


def _rows(text: str, source: str) -> Iterator[tuple[int, list[str]]]:
    header = text.lstrip().partition("\n")[0]
    separator = max(_SEPARATORS, key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as exc:
        raise ConfigError(f"{source}:{reader.line_num}: not a table: {exc}") from exc


def _columns(header: Sequence[str], names: AttributeNames, place: str) -> dict[str, int]:
    known = [cell.strip().lower() for cell in header]
    for name in {name for name in known if name and known.count(name) > 1}:
        raise ConfigError(f"{place}: column {name!r} is there twice")
    chosen = {
        "query_id": names.query,
        "stage": names.stage,
        "tenant": names.tenant,
        "workflow": names.workflow,
        "slo_s": names.slo,
    }
    found: dict[str, int] = {}
    for field, others in COLUMNS.items():
        wanted = chosen.get(field)
        if wanted and wanted.lower() not in known:
            raise ConfigError(f"{place}: no column {wanted!r}{_near(wanted, known)}")
        accepted = (wanted.lower(),) if wanted else (field, *others)
        column = next((known.index(name) for name in accepted if name in known), None)
        if column is not None:
            found[field] = column
    for field in NEEDED:
        if field not in found:
            names_of_it = " or ".join((field, *COLUMNS[field]))
            raise ConfigError(
                f"{place}: column {names_of_it} is missing{_near(field, known)}; "
                f"needed: {', '.join(NEEDED)}; found: {', '.join(known)}"
            )
    return found


def _near(word: str, known: Sequence[str]) -> str:
    near = nearest(word, known)
    return f" (did you mean {near!r}?)" if near else ""


class _Row:
    """One row: its cells by field."""

    def __init__(
        self, place: str, columns: Mapping[str, int], cells: Sequence[str], width: int
    ) -> None:
        self.place = place
        self.is_ragged = len(cells) != width
        self.num_cells = len(cells)
        self.width = width
        self._columns = columns
        self._cells = cells

    def text(self, field: str) -> str:
        """Return a cell; empty when the column is missing."""
        column = self._columns.get(field)
        return self._cells[column].strip() if column is not None else ""

    def name(self, field: str) -> str:
        """Return a cell that is a name."""
        text = self.text(field)
        if len(text) > MAX_NAME:
            raise ValueError(f"{field}: longer than {MAX_NAME} characters")
        return text

    def needed(self, field: str, parse: Callable[[Any], T]) -> T:
        """Return a cell that must be filled in."""
        text = self.text(field)
        if not text:
            raise ValueError(f"{field} is empty")
        return read(parse, text, field)

    def maybe(self, field: str, parse: Callable[[Any], T]) -> T | None:
        """Return a cell; None when it is empty."""
        text = self.text(field)
        return read(parse, text, field) if text else None

    def parts(self, field: str) -> tuple[str, ...]:
        """Return the names in a cell that is a list."""
        return tuple(part.strip() for part in self.text(field).split(_LIST_SEPARATOR) if part)


def _take_row(recording: Recording, row: _Row) -> None:
    if row.is_ragged:
        reason = f"{row.num_cells} cells, the header names {row.width}"
        recording.problems.append(Problem(row.place, reason))
        return
    try:
        recording.calls.append(_call(row))
    except ValueError as exc:
        query_id = row.text("query_id")[:MAX_NAME]
        recording.problems.append(Problem(row.place, str(exc), query_id))


def _call(row: _Row) -> RecordedCall:
    query_id = row.name("query_id")
    if not query_id:
        raise ValueError("query_id is empty")
    start_ns = row.needed("start_time", instant_ns)
    input_tokens = row.needed("input_tokens", tokens)
    return RecordedCall(
        place=row.place,
        query_id=query_id,
        start_ns=start_ns,
        end_ns=_end_ns(row, start_ns),
        stage=row.name("stage") or UNNAMED_STAGE,
        input_tokens=input_tokens,
        output_tokens=row.needed("output_tokens", tokens),
        model=row.name("model"),
        tenant=row.name("tenant"),
        workflow=row.name("workflow"),
        slo_s=row.maybe("slo_s", positive_s),
        query_arrival_ns=row.maybe("query_arrival", instant_ns),
        prefix=_prefix(row, input_tokens),
        cached_tokens=row.maybe("cached_tokens", lambda value: tokens(value, least=0)),
        call_id=row.text("call_id"),
        parents=row.parts("parents") or None,
    )


def _end_ns(row: _Row, start_ns: int) -> int | None:
    end_ns = row.maybe("end_time", instant_ns)
    if end_ns is None:
        duration_s = row.maybe("duration_s", positive_s)
        return None if duration_s is None else start_ns + round(duration_s * NS_PER_S)
    if end_ns < start_ns:
        raise ValueError("end_time is before start_time")
    return end_ns


def _prefix(row: _Row, input_tokens: int) -> tuple[PrefixPart, ...]:
    ids, lengths = row.parts("prefix_id"), row.parts("prefix_tokens")
    if len(ids) != len(lengths):
        raise ValueError(
            f"prefix_id names {len(ids)} parts, prefix_tokens {len(lengths)}; both or neither"
        )
    return prefix_chain(ids, lengths, input_tokens)


def prefix_chain(
    ids: Sequence[str], lengths: Sequence[Any], input_tokens: int
) -> tuple[PrefixPart, ...]:
    """Return a prefix chain.

    Raises:
        ValueError: A length is none, an id is too long, or the parts exceed the prompt.
    """
    if any(not 1 <= len(prefix_id) <= MAX_NAME for prefix_id in ids):
        raise ValueError(f"prefix_id: each part needs 1 to {MAX_NAME} characters")
    parts = tuple(
        PrefixPart(prefix_id, read(tokens, length, "prefix_tokens"))
        for prefix_id, length in zip(ids, lengths, strict=True)
    )
    total = sum(part.tokens for part in parts)
    if total > input_tokens:
        raise ValueError(f"prefix_tokens: {total} in all, the prompt has {input_tokens}")
    return parts
