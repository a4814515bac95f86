"""Traces from OpenTelemetry spans."""

import json
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.simulation.importing import AttributeNames, Imported, Recording, assemble, read_otel
from shared.simulation.trace_file import dump_trace, parse_trace

SAMPLE = Path(__file__).parents[2] / "data" / "otel_spans.jsonl"
USAGE = {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 7}
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", **USAGE}


def flat(span_id: str, parent: str = "", start=0.0, end=1.0, name="chat m", trace="t1", **extra):
    """Return a flattened span."""
    attributes = extra.pop("attributes", CHAT)
    return {
        "trace_id": trace,
        "span_id": span_id,
        "parent_span_id": parent,
        "name": name,
        "start_time": start,
        "end_time": end,
        "attributes": attributes,
        **extra,
    }


def recording(*spans: dict, names: AttributeNames | None = None) -> Recording:
    """Return what is read from flattened spans, one per line."""
    return read_otel("\n".join(json.dumps(span) for span in spans), "spans.jsonl", names)


def imported(*spans: dict, names: AttributeNames | None = None, **options) -> Imported:
    """Return the trace of flattened spans."""
    return assemble(recording(*spans, names=names), **options)


def test_the_sample_becomes_a_trace_that_reads_back():
    """Agent and server spans of eight queries: structure, stages, tenants, prefixes."""
    result = assemble(read_otel(SAMPLE.read_bytes(), "otel"))
    assert parse_trace(dump_trace(result.queries)) == result.queries
    query = next(query for query in result.queries if len(query.stages) == 4)
    assert [(stage.stage, len(stage.calls), stage.parents) for stage in query.stages] == [
        ("schema_linking", 1, None),
        ("generate_candidate", 2, None),
        ("revise", 1, None),
        ("evaluate", 3, None),
    ]
    assert query.stages[2].think_s == pytest.approx(0.36, abs=0.02)
    assert query.model == "meta-llama/Llama-3.3-70B-Instruct"
    assert query.workflow == "text2sql-agent"
    assert {query.tenant for query in result.queries} == {"acme", "globex"}
    candidates = [call.prefix[0].tokens for call in query.stages[1].calls]
    assert candidates == [9_152, 5_280]


def test_the_sample_accounts_for_every_span():
    """Calls, server spans of the same calls, other spans, and the failed call that is listed."""
    summary = assemble(read_otel(SAMPLE.read_bytes(), "otel")).summary
    assert summary.num_calls == 55
    assert summary.skipped["calls seen again inside their own span"] == 55
    (problem,) = summary.problems
    assert "failed (timeout)" in problem.reason
    assert "gen_ai.usage.input_tokens is missing" in problem.reason
    assert summary.num_rows == 55 + sum(summary.skipped.values()) + 1
    assert summary.incomplete_queries == 1


def test_one_object_over_many_lines_is_read_like_lines():
    """The Collector writes lines, other tools one indented object; both hold the same trace."""
    lines = SAMPLE.read_text().splitlines()
    groups = [group for line in lines for group in json.loads(line)["resourceSpans"]]
    whole = json.dumps({"resourceSpans": groups}, indent=2)
    from_lines = assemble(read_otel(SAMPLE.read_text(), "otel"))
    assert assemble(read_otel(whole, "otel")).queries == from_lines.queries


@pytest.mark.parametrize(
    "span",
    [
        flat("a"),
        {
            "traceId": "t1",
            "spanId": "a",
            "name": "chat m",
            "startTimeUnixNano": "0",
            "endTimeUnixNano": "1000000000",
            "attributes": [
                {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
                {"key": "gen_ai.request.model", "value": {"stringValue": "m"}},
                {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "100"}},
                {"key": "gen_ai.usage.output_tokens", "value": {"intValue": 7}},
            ],
        },
        {
            "name": "chat m",
            "context": {"trace_id": "0xt1", "span_id": "0xa", "trace_state": "[]"},
            "parent_id": None,
            "start_time": "1970-01-01T00:00:00.000000Z",
            "end_time": "1970-01-01T00:00:01.000000Z",
            "attributes": CHAT,
            "resource": {"attributes": {"service.name": "x"}},
        },
        {"trace_id": "t1", "span_id": "a", "start_time": 0, "end_time": 1}
        | {f"attributes.{key}": value for key, value in CHAT.items()},
        {"trace_id": "t1", "span_id": "a", "start_time": 0, "end_time": 1} | CHAT,
        flat("a", attributes={"gen_ai": {"operation": {"name": "chat"}, "request": {"model": "m"}}})
        | {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 7},
    ],
)
def test_spans_may_be_flattened_in_several_ways(span):
    """OTLP's lists, plain objects, nested objects, spread keys, the SDK's console form."""
    (call,) = recording(span).calls
    assert (call.query_id, call.input_tokens, call.output_tokens) == ("t1", 100, 7)
    assert (call.model, call.start_ns, call.end_ns) == ("m", 0, 1_000_000_000)


def test_a_call_seen_by_client_and_server_counts_once():
    """The client's span is the call; what only the server knows is taken over."""
    client = flat("a", attributes={"gen_ai.operation.name": "chat", **USAGE})
    server = flat(
        "b",
        "a",
        0.1,
        0.9,
        "llm_request",
        attributes={
            "gen_ai.usage.prompt_tokens": 100,
            "gen_ai.usage.completion_tokens": 7,
            "gen_ai.response.model": "m",
            "gen_ai.usage.cache_read.input_tokens": 64,
        },
    )
    (call,) = recording(client, server).calls
    assert (call.start_ns, call.model, call.cached_tokens) == (0, "m", 64)


def test_servers_alone_are_enough():
    """The spans of vLLM (older token names, no model, no operation) make a trace."""
    spans = [
        flat(
            f"s{i}",
            "client-span-that-was-not-exported",
            2.0 * i,
            2.0 * i + 1.0,
            "llm_request",
            attributes={"gen_ai.usage.prompt_tokens": 50, "gen_ai.usage.completion_tokens": 5},
        )
        for i in range(3)
    ]
    (query,) = imported(*spans).queries
    assert [stage.think_s for stage in query.stages] == [0.0, 1.0, 1.0]
    assert {stage.stage for stage in query.stages} == {"call"}
    assert query.model == "default"


def test_a_span_that_sums_up_its_calls_is_no_call():
    """An agent's span with the total of its calls' tokens is not counted on top of them."""
    total = flat("agent", name="agent run", end=9, attributes=USAGE)
    agent = flat(
        "inner", "agent", 0, 9, attributes={"gen_ai.operation.name": "invoke_agent", **USAGE}
    )
    calls = [flat(f"c{i}", "inner", i, i + 0.5) for i in range(2)]
    assert imported(total, agent, *calls).summary.num_calls == 2


@pytest.mark.parametrize("operation", ["embeddings", "execute_tool", "invoke_agent", "retrieval"])
def test_other_operations_are_no_calls(operation):
    """Only operations that generate text load the engines of this trace."""
    span = flat("x", attributes={**CHAT, "gen_ai.operation.name": operation})
    found = recording(flat("a"), span)
    assert len(found.calls) == 1
    assert found.skipped == {"spans that are no LLM calls": 1}


def test_stages_come_from_the_spans_around_calls():
    """Nearest enclosing span below the root; agents by their name; else `call`."""
    spans = [
        flat("root", name="POST /ask", end=9, attributes={}),
        flat("task", "root", name="generate.task", end=2, attributes={}),
        flat("c1", "task", 0, 1),
        flat(
            "agent",
            "root",
            2,
            5,
            "invoke_agent planner",
            attributes={"gen_ai.operation.name": "invoke_agent"},
        ),
        flat("http", "agent", 2, 4, "POST", attributes={}),
        flat("c2", "http", 2, 3),
        flat("c3", "root", 6, 7),
    ]
    (query,) = imported(*spans).queries
    assert [stage.stage for stage in query.stages] == ["generate", "planner", "call"]


def test_own_attributes_win_and_may_sit_on_spans_around():
    """Query, stage, tenant, workflow and deadline are looked up from the call outwards."""
    around = {"app.query": "Q7", "app.org": "acme", "app.flow": "sql", "app.limit": 30}
    spans = [
        flat("root", start=5.0, end=9, name="handle", attributes=around),
        flat("a", "root", 6, 7, attributes={**CHAT, "app.node": "draft"}),
        flat("b", "root", 8, 9, trace="t1", attributes={**CHAT, "app.node": "check"}),
    ]
    names = AttributeNames(
        query="app.query",
        stage="app.node",
        tenant="app.org",
        workflow="app.flow",
        slo="app.limit",
    )
    (query,) = imported(*spans, names=names).queries
    assert (query.query_id, query.tenant, query.workflow) == ("Q7", "acme", "sql")
    assert query.slo_s == 30.0
    assert [stage.stage for stage in query.stages] == ["draft", "check"]
    assert query.stages[0].think_s == 1.0


def test_traces_of_one_conversation_can_be_one_query():
    """`gen_ai.conversation.id` groups calls whose traces are separate."""
    spans = [
        flat(f"s{i}", "", 3 * i, 3 * i + 1, trace=f"trace{i}")
        | {"attributes": {**CHAT, "gen_ai.conversation.id": "conv"}}
        for i in range(3)
    ]
    names = AttributeNames(query="gen_ai.conversation.id")
    (query,) = imported(*spans, names=names).queries
    assert [stage.think_s for stage in query.stages] == [0.0, 2.0, 2.0]
    alone = imported(*spans).summary
    assert alone.num_queries == 3
    assert any("--query-attr" in warning for warning in alone.warnings)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"gen_ai.operation.name": "chat"}, "gen_ai.usage.input_tokens is missing"),
        ({**CHAT, "gen_ai.usage.input_tokens": -3}, "gen_ai.usage.input_tokens: -3 is not in 1"),
        ({**CHAT, "gen_ai.usage.output_tokens": 0}, "gen_ai.usage.output_tokens: 0 is not in 1"),
        ({**CHAT, "hexflow.slo_s": 0}, "hexflow.slo_s: 0 is no positive number"),
        ({**CHAT, "hexflow.query_id": "q" * 129}, "the query's id is longer than 128"),
        (
            {**CHAT, "hexflow.prefix.ids": ["a"], "hexflow.prefix.tokens": [1, 2]},
            "hexflow.prefix.ids and hexflow.prefix.tokens differ",
        ),
    ],
)
def test_a_call_that_cannot_be_used_is_listed_with_its_span(attributes, reason):
    """It is neither fatal nor silently dropped."""
    (problem,) = recording(flat("ok"), flat("bad", attributes=attributes)).problems
    assert problem.place == "spans.jsonl:2, span bad"
    assert problem.reason.startswith(reason)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"traceId": "t", "spanId"', "not JSON"),
        ('"text"', "a JSON object is expected"),
        ('{"resourceMetrics": []}', "holds metrics or logs"),
        ('{"trace_id": "t", "name": "x"}', "no trace id or no span id"),
        ('{"trace_id": "t", "span_id": "s"}', "no start time"),
        ('{"trace_id": "t", "span_id": "s", "start_time": 5, "end_time": 4}', "ends before"),
    ],
)
def test_a_broken_line_does_not_spoil_the_others(line, reason):
    """A file that is still being written ends in the middle of a line."""
    text = f"{json.dumps(flat('a'))}\n{line}\n{json.dumps(flat('b', trace='t2'))}\n"
    found = read_otel(text, "spans.jsonl")
    assert len(found.calls) == 2
    (problem,) = found.problems
    assert problem.place.startswith("spans.jsonl:2")
    assert problem.reason.startswith(reason)


def test_spans_exported_twice_count_once():
    """Exporters retry; a span's id makes the copy known."""
    found = recording(flat("a"), flat("a"))
    assert (len(found.calls), found.skipped) == (1, {"spans exported twice": 1})


def test_spans_in_a_circle_do_not_hang():
    """Broken parent ids are no reason to wait for ever."""
    assert len(recording(flat("a", "b"), flat("b", "a", attributes={})).calls) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (b"\xff\xfe", "not UTF-8"),
        ('{"resourceSpans": []}', "no usable LLM call in 0 rows"),
        (json.dumps(flat("x", attributes={})), "spans that are no LLM calls: 1"),
    ],
)
def test_a_file_without_calls_is_refused(text, message):
    """The error says what was found instead."""
    with pytest.raises(ConfigError, match=message):
        assemble(read_otel(text, "spans.jsonl"))
