"""Importing survives anything: a trace that reads back, or an error meant for people."""

import json
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.simulation.importing import Recording, assemble, read_csv, read_otel
from shared.simulation.importing.csv_import import COLUMNS, NEEDED
from shared.simulation.trace_file import dump_trace, parse_trace

KEYS = st.sampled_from(
    [
        *("resourceSpans", "scopeSpans", "spans", "resource", "attributes", "status", "context"),
        *("key", "value", "values", "intValue", "stringValue", "arrayValue", "kvlistValue"),
        *("name", "parent_span_id", "parentSpanId", "startTimeUnixNano", "endTimeUnixNano"),
        *("gen_ai.operation.name", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
        *("gen_ai.request.model", "hexflow.query_id", "hexflow.slo_s", "hexflow.prefix.ids"),
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-10, 10**20)
    | st.floats()
    | st.sampled_from(["chat", "a", "", "0", "2026-03-02T09:00:00Z", "9" * 30, "1e400", "\ud800"])
    | st.text(max_size=4)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=15,
)
USAGE = {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 2}
SPANS = st.fixed_dictionaries(
    {
        "trace_id": st.sampled_from(["t", "u"]),
        "span_id": st.sampled_from("abcd"),
        "start_time": st.integers(0, 100),
        "attributes": st.just(USAGE) | st.dictionaries(KEYS, LEAVES, max_size=4),
    },
    optional={
        "parent_span_id": st.sampled_from("abcd") | LEAVES,
        "end_time": st.integers(100, 200) | LEAVES,
        "name": LEAVES,
        "resource": VALUES,
        "status": VALUES,
        "hexflow.query_id": LEAVES,
    },
)
CELLS = st.sampled_from(["q", "r", "0", "1", "5", "a;b", ";", "x" * 200, '"', "-1", "٣", "NaN"])


def survives(read: Callable[..., Recording], content: str | bytes) -> None:
    """Import the content; anything but a ConfigError fails."""
    try:
        queries = assemble(read(content, "x")).queries
    except ConfigError:
        return
    assert parse_trace(dump_trace(queries)) == queries


@settings(deadline=None)
@given(st.lists(SPANS | VALUES, max_size=5))
def test_any_json_is_imported_or_refused(values):
    """Spans with anything anywhere, among anything else."""
    survives(read_otel, "\n".join(json.dumps(value) for value in values))


@settings(deadline=None)
@given(
    st.lists(st.lists(CELLS, min_size=17, max_size=17), max_size=4), st.permutations(list(COLUMNS))
)
def test_any_table_is_imported_or_refused(rows, header):
    """Tables with any text in any column."""
    survives(read_csv, "\n".join([",".join(header), *(",".join(row) for row in rows)]))


@settings(deadline=None)
@given(st.lists(st.lists(CELLS | st.sampled_from("12345"), min_size=4, max_size=4), max_size=6))
def test_any_table_of_needed_columns_is_imported_or_refused(rows):
    """With few columns most rows are usable."""
    survives(read_csv, "\n".join([",".join(NEEDED), *(",".join(row) for row in rows)]))


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_content_is_imported_or_refused(content):
    """Files that are something else entirely."""
    survives(read_csv, content)
    survives(read_otel, content)
