"""hexflow's own trace format."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.simulation.fleets import builtin_fleet
from shared.simulation.generator import generate
from shared.simulation.trace_file import dump_trace, parse_trace
from shared.simulation.traces import dump_authors_trace
from shared.simulation.workload import PoissonArrivals, prepare
from tests.support.scheduling import make_stage, make_trace_query

HEADER = '{"format": "hexflow-trace", "version": 1}\n'
CALLS = [{"input_tokens": 10, "output_tokens": 2}]
STAGE = {"stage": "s", "calls": CALLS}


def _line(**fields: object) -> str:
    return json.dumps({"query_id": "q", "stages": [STAGE]} | fields) + "\n"


def _prepared(seed: int) -> tuple[TraceQuery, ...]:
    rng = np.random.default_rng(seed)
    queries = generate(3, rng)
    return prepare(queries, builtin_fleet("hetero-1"), PoissonArrivals(0.2), (3, 10), rng)


@given(seed=st.integers(0, 2**32 - 1))
def test_a_written_trace_reads_back(seed: int) -> None:
    """Arrivals, SLOs, tenants and prefixes survive to the last bit."""
    queries = _prepared(seed)
    assert parse_trace(dump_trace(queries)) == queries
    assert parse_trace(dump_trace(queries).encode()) == queries


def test_a_dag_reads_back() -> None:
    """Parents and think times are kept."""
    query = make_trace_query(
        "q",
        make_stage("a"),
        make_stage("b", parents=()),
        make_stage("c", parents=(0, 1), think_s=0.5),
    )
    assert parse_trace(dump_trace([query])) == (query,)


def test_the_authors_form_is_recognised() -> None:
    """One function reads both."""
    queries = generate(3, np.random.default_rng(0))
    assert parse_trace(dump_authors_trace(queries).encode()) == queries


def test_fields_of_later_releases_are_ignored() -> None:
    """Additions do not raise the version."""
    text = '{"format": "hexflow-trace", "version": 1, "by": "x"}\n' + _line(colour="blue")
    assert parse_trace(text)[0].query_id == "q"


def test_version_1_stays_readable() -> None:
    """This text was written by the first release; every later one reads it."""
    text = HEADER + (
        '{"query_id":"q7","stages":[{"stage":"draft","calls":[{"input_tokens":900,'
        '"output_tokens":40,"prefix":[["t",640]]}],"iteration":1,"think_s":0.25,"parents":[]}],'
        '"workflow":"w","tenant":"acme","model":"m","arrival_s":1.5,"slo_s":30.0,"slo_scale":3.0}\n'
    )
    (query,) = parse_trace(text)
    assert (query.tenant, query.arrival_s, query.slo_s) == ("acme", 1.5, 30.0)
    assert query.stages[0].parents == ()
    assert query.stages[0].calls[0].prefix[0].tokens == 640
    assert dump_trace([query]).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{}", ["t:1", "the first line must be"]),
        ('{"format": "x", "version": 1}', ["format 'x' is unknown"]),
        ('{"format": "hexflow-trace", "version": 2}', ["version 2", "newer"]),
        ('{"format": "hexflow-trace", "version": 0}', ["version 0"]),
        (HEADER, ["the trace has no queries"]),
        (HEADER + "\n{", ["t:3"]),
        (HEADER + "7", ["t:2", "object"]),
        (HEADER + '{"query_id": "q"}', ["t:2", "stages"]),
        (HEADER + _line(query_id=""), ["'query_id' must not be empty"]),
        (HEADER + _line(stages=[]), ["has no stages"]),
        (HEADER + _line() + _line(), ["t:3", "'q' is used on line 2"]),
        (HEADER + _line(slo_s=0), ["'slo_s' must be above 0"]),
        (HEADER + _line(slo_scale=-1), ["'slo_scale' must be above 0"]),
        (HEADER + _line(arrival_s=-0.1), ["'arrival_s' must be at least 0"]),
        (HEADER + _line(stages=[STAGE | {"calls": []}]), ["stage 0: the stage has no calls"]),
        (HEADER + _line(stages=[STAGE | {"stage": ""}]), ["'stage' must not be empty"]),
        (HEADER + _line(stages=[STAGE | {"iteration": -1}]), ["'iteration'"]),
        (HEADER + _line(stages=[STAGE | {"think_s": -1}]), ["'think_s'"]),
        (HEADER + _line(stages=[STAGE | {"parents": [0]}]), ["parent 0 must be"]),
        (
            HEADER + _line(stages=[STAGE, STAGE | {"parents": [0, 1]}]),
            ["stage 1: parent 1 must be the index of an earlier stage (0..0)"],
        ),
        (
            HEADER + _line(stages=[STAGE | {"calls": [CALLS[0] | {"output_tokens": 0}]}]),
            ["stage 0, call 0: 'output_tokens' must be in 1..10,000,000, is 0"],
        ),
        (
            HEADER + _line(stages=[STAGE | {"calls": [CALLS[0] | {"prefix": [["t", 11]]}]}]),
            ["the prefix has 11 tokens, the whole prompt 10"],
        ),
        (
            HEADER + _line(stages=[STAGE | {"calls": [CALLS[0] | {"prefix": [["", 1]]}]}]),
            ["t:2", "stages[0].calls[0].prefix[0][0]"],
        ),
        (b"{\xff", ["not UTF-8"]),
        ("{" + "[" * 100_000, ["t:1"]),
    ],
)
def test_mistakes_are_refused_with_their_line(text: str | bytes, parts: list[str]) -> None:
    """Every error names the line and what is accepted."""
    with pytest.raises(ConfigError) as caught:
        parse_trace(text, "t")
    for part in parts:
        assert part in str(caught.value)


@given(data=st.binary(max_size=120), with_header=st.booleans())
def test_arbitrary_bytes_are_parsed_or_refused(data: bytes, with_header: bool) -> None:
    """No content makes the parser fail in any other way."""
    try:
        parse_trace(HEADER.encode() + data if with_header else data)
    except ConfigError:
        return
