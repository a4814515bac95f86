"""Traces from tables of calls."""

from pathlib import Path

import pytest

from shared.domain.trace import PrefixPart
from shared.errors import ConfigError
from shared.simulation.importing import AttributeNames, Imported, assemble, read_csv
from shared.simulation.trace_file import dump_trace, parse_trace

SAMPLE = Path(__file__).parents[2] / "data" / "calls.csv"
HEADER = "query_id,start_time,input_tokens,output_tokens"


def imported(text: str, **options) -> Imported:
    """Return the trace of a table."""
    return assemble(read_csv(text, "calls.csv"), **options)


def problems(text: str) -> list[tuple[str, str]]:
    """Return the unusable rows of a table."""
    return [(one.place, one.reason) for one in read_csv(text, "calls.csv").problems]


def test_the_sample_becomes_a_trace_that_reads_back():
    """A table with parents, prefixes, tenants and deadlines keeps all of them."""
    result = assemble(read_csv(SAMPLE.read_bytes(), "calls.csv"))
    assert parse_trace(dump_trace(result.queries)) == result.queries
    first = result.queries[0]
    assert [(stage.stage, stage.parents) for stage in first.stages] == [
        ("classify", None),
        ("retrieve_docs", None),
        ("retrieve_sql", (0,)),
        ("check_sql", None),
        ("answer", (1, 3)),
    ]
    assert (first.query_id, first.tenant, first.model) == ("ticket-0", "sales", "llama-70b")
    assert (first.arrival_s, first.slo_s) == (0.0, 120.0)
    assert first.stages[1].think_s == pytest.approx(0.2)
    chain = first.stages[2].calls[0].prefix
    assert chain == (PrefixPart("tpl-schema", 2_048), PrefixPart("db-0", 3_000))


def test_the_sample_accounts_for_every_row():
    """The one unusable row is listed with its line, and its query counted as short of a call."""
    summary = assemble(read_csv(SAMPLE.read_bytes(), "calls.csv")).summary
    assert summary.num_rows == summary.num_calls + len(summary.problems) == 31
    (problem,) = summary.problems
    assert problem.place == "calls.csv:10"
    assert problem.reason.startswith("input_tokens: '-5'")
    assert (problem.query_id, summary.incomplete_queries) == ("ticket-1", 1)
    assert any("gpu" in note for note in summary.inferred)


def test_recorded_arrivals_are_kept_and_sorted():
    """Queries come in order of arrival, relative to the first, whatever the order of the rows."""
    queries = imported(f"{HEADER}\nb,107.5,10,1\na,100,10,1\nc,101.25,10,1\n").queries
    assert [(query.query_id, query.arrival_s) for query in queries] == [
        ("a", 0.0),
        ("c", 1.25),
        ("b", 7.5),
    ]


def test_a_query_may_arrive_before_its_first_call():
    """The time between the query's arrival and its first call is the first stage's think time."""
    text = f"{HEADER},query_arrival\nq,12,10,1,10\n"
    (query,) = imported(text).queries
    assert query.stages[0].think_s == 2.0


@pytest.mark.parametrize(
    "instants",
    [
        ("2026-03-02T09:00:00Z", "2026-03-02T09:00:01.5Z"),
        ("2026-03-02T09:00:00", "2026-03-02T10:00:01.500000+01:00"),
        ("1772442000", "1772442001.5"),
        ("1772442000000", "1772442001500"),
        ("1772442000000000", "1772442001500000"),
        ("1772442000000000000", "1772442001500000000"),
        ("0", "1.5"),
    ],
)
def test_instants_may_be_iso_or_numbers_of_any_unit(instants):
    """ISO 8601 with or without offset, and Unix seconds to nanoseconds, give the same gap."""
    first, second = instants
    queries = imported(f"{HEADER}\na,{first},10,1\nb,{second},10,1\n").queries
    assert queries[1].arrival_s == pytest.approx(1.5)


def test_without_ends_calls_form_a_chain_and_equal_starts_are_siblings():
    """Calls of one stage at one instant run together; all else follows in order of start."""
    text = (
        f"{HEADER},stage\nq,0,10,1,plan\nq,5,20,2,draft\nq,5,30,3,draft\nq,9,40,4,draft\n"
        "q,12,50,5,check\n"
    )
    (query,) = imported(text).queries
    assert [(s.stage, s.iteration, len(s.calls), s.parents) for s in query.stages] == [
        ("plan", 0, 1, None),
        ("draft", 0, 2, None),
        ("draft", 1, 1, None),
        ("check", 0, 1, None),
    ]
    assert all(stage.think_s == 0.0 for stage in query.stages)
    assert any("chain in order of starts" in note for note in imported(text).summary.inferred)


def test_a_duration_stands_for_an_end():
    """`duration_s` gives ends, and with them think times."""
    (query,) = imported(f"{HEADER},duration_s\nq,0,10,1,2\nq,3.5,10,1,1\n").queries
    assert query.stages[1].think_s == pytest.approx(1.5)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_are_told_from_the_header(separator):
    """Commas, semicolons, tabs and bars all work."""
    text = f"{HEADER}\nq,0,10,1\n".replace(",", separator)
    assert imported(text).summary.num_calls == 1


def test_quoted_cells_and_a_byte_order_mark_are_read():
    """What spreadsheets write is a table too."""
    text = "\ufeff" + f'{HEADER},stage\r\n"q","0","10","1","draft, first"\r\n'
    (query,) = assemble(read_csv(text.encode(), "calls.csv")).queries
    assert query.stages[0].stage == "draft, first"


def test_other_columns_can_be_named():
    """The query, stage, tenant, workflow and deadline may be in columns of any name."""
    text = "ticket,node,org,flow,limit,start_time,input_tokens,output_tokens\nt,n,o,f,9,0,10,1\n"
    names = AttributeNames(query="ticket", stage="node", tenant="org", workflow="flow", slo="limit")
    (query,) = assemble(read_csv(text, "calls.csv", names)).queries
    assert (query.query_id, query.stages[0].stage, query.tenant) == ("t", "n", "o")
    assert (query.workflow, query.slo_s) == ("f", 9.0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("q,0,-5,1", "input_tokens: '-5' is not in 1"),
        ("q,0,10,0", "output_tokens: '0' is not in 1"),
        ("q,0,20000000,1", "input_tokens: '20000000' is not in 1"),
        ("q,0,1.5,1", "input_tokens: '1.5' is no whole number"),
        ("q,0,nan,1", "input_tokens: 'nan' is no whole number"),
        ("q,0,,1", "input_tokens is empty"),
        ("q,yesterday,10,1", "start_time: 'yesterday' is no instant"),
        ("q,-1,10,1", "start_time: '-1' is before"),
        (",0,10,1", "query_id is empty"),
        ("q,0,10", "3 cells, the header names 4"),
    ],
)
def test_an_unusable_row_is_listed_with_its_line_and_field(row, reason):
    """It is neither fatal nor silently dropped."""
    ((place, found),) = problems(f"{HEADER}\nok,0,10,1\n{row}\n")
    assert place == "calls.csv:3"
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("columns", "cells", "reason"),
    [
        ("end_time", "-", "end_time: '-' is no instant"),
        ("start_time2,end_time", "x,1", "end_time is before start_time"),
        ("slo_s", "0", "slo_s: '0' is no positive number"),
        ("prefix_id,prefix_tokens", "a;b,5", "prefix_id names 2 parts, prefix_tokens 1"),
        ("prefix_id,prefix_tokens", "a,11", "prefix_tokens: 11 in all, the prompt has 10"),
        ("cached_tokens", "-1", "cached_tokens: '-1' is not in 0"),
        ("stage", "s" * 129, "stage: longer than 128"),
    ],
)
def test_optional_fields_are_checked_too(columns, cells, reason):
    """A filled-in cell that cannot be right makes the row unusable."""
    ((_, found),) = problems(f"{HEADER},{columns}\nq,2,10,1,{cells}\n")
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "calls.csv: the file is empty"),
        ("query_id,start_time,input_tokns,output_tokens\n", "did you mean 'input_tokns'"),
        (f"{HEADER},stage,stage\n", "column 'stage' is there twice"),
        (f'{HEADER}\n"q,0,10,1\n', "calls.csv:2: not a table"),
        (f"{HEADER}\n", "no usable LLM call in 0 rows"),
        (f"{HEADER}\nq,0,-1,1\n", "calls.csv:2: input_tokens: '-1'"),
    ],
)
def test_a_table_nothing_can_be_made_of_is_refused(text, message):
    """The error names the place and what to change."""
    with pytest.raises(ConfigError, match=message):
        imported(text)


def test_a_named_column_that_is_missing_is_refused():
    """A misspelt `--stage-attr` must not silently fall back to inference."""
    with pytest.raises(ConfigError, match=r"no column 'stge' \(did you mean 'stage'\?\)"):
        read_csv(f"{HEADER},stage\n", "calls.csv", AttributeNames(stage="stge"))


def test_parents_that_do_not_exist_are_told():
    """An edge to a call that is not there, or in a circle, is left out and named."""
    text = (
        f"{HEADER},call_id,parents\nq,0,10,1,a,b\nq,1,10,1,b,a\nq,2,10,1,c,nobody\nq,3,10,1,d,c\n"
    )
    result = imported(text)
    assert [stage.parents for stage in result.queries[0].stages] == [None, None, (), None]
    assert any("'nobody'" in warning for warning in result.summary.warnings)
    assert any("for itself" in warning for warning in result.summary.warnings)


def test_one_model_can_be_put_over_all():
    """`default` fits any fleet with one model; otherwise each call keeps what it asked for."""
    text = f"{HEADER},model\nq,0,10,1,big\nq,1,10,1,big\nq,2,10,1,small\n"
    mixed = imported(text)
    assert mixed.queries[0].model == "big"
    assert [stage.calls[0].model for stage in mixed.queries[0].stages] == ["", "", "small"]
    assert mixed.summary.calls_by_model == {"big": 2, "small": 1}
    assert any("several models" in warning for warning in mixed.summary.warnings)
    one = imported(text, model="default")
    assert one.summary.calls_by_model == {"default": 3}


def test_single_calls_raise_the_question_what_ties_them():
    """A table in which no two rows share a query is probably keyed by the wrong column."""
    summary = imported(f"{HEADER}\na,0,10,1\nb,1,10,1\n").summary
    assert any("--query-attr" in warning for warning in summary.warnings)


def test_templates_are_inferred_from_cached_tokens():
    """Counts that come again and again are templates; a cold call gets the usual one."""
    cached = [0, 512, 512, 512, 2_048, 2_048]
    rows = "".join(f"q{i},{i},4000,1,{tokens}\n" for i, tokens in enumerate(cached))
    text = f"{HEADER},cached_tokens\n{rows}"
    chains = [query.stages[0].calls[0].prefix for query in imported(text).queries]
    assert [sum(part.tokens for part in chain) for chain in chains] == [
        512,
        512,
        512,
        512,
        2_048,
        2_048,
    ]
    assert chains[1] == chains[2] != chains[4]
    plain = imported(text, with_prefixes=False)
    assert all(query.stages[0].calls[0].prefix == () for query in plain.queries)


def test_rare_cache_hits_make_no_template():
    """Fewer than half of the calls found something: nothing is inferred."""
    rows = "".join(f"q{i},{i},4000,1,{512 if i == 0 else 0}\n" for i in range(6))
    queries = imported(f"{HEADER},cached_tokens\n{rows}").queries
    assert all(query.stages[0].calls[0].prefix == () for query in queries)
