"""How answers are scored, and what becomes of a run as a trace."""

import msgspec
import pytest

from services.cli.text2sql.scoring import same_rows
from services.cli.text2sql.shown import latency_s, stage_times
from services.text2sql.recording import trace_of
from services.text2sql.sql.database import Rows
from shared.contracts.messages import CallTimes, QueryCall, QueryResult, Usage
from shared.domain.trace import PrefixPart
from shared.simulation.trace_file import dump_trace, parse_trace


def gold(*rows: tuple[object, ...], is_ordered: bool = False) -> Rows:
    """Return what a gold statement gave."""
    return Rows(
        sql="", columns=(), rows=rows, is_truncated=False, is_ordered=is_ordered, took_s=0.0
    )


@pytest.mark.parametrize(
    ("found", "right", "is_same"),
    [
        (((1, "a"),), gold((1, "a")), True),
        (((1,), (2,)), gold((2,), (1,)), True),
        (((1,), (2,)), gold((2,), (1,), is_ordered=True), False),
        (((0.1 + 0.2,),), gold((0.3,)), True),
        (((3,),), gold((3.0,)), True),
        (((3,),), gold(("3",)), False),
        (((None,),), gold((0,)), False),
        (((1,), (1,)), gold((1,)), False),
        (((1, 2),), gold((1,)), False),
        ((), gold(), True),
    ],
)
def test_rows_are_right_as_a_multiset_unless_gold_orders_them(found, right: Rows, is_same: bool):
    """Numbers with a tolerance, columns by position, duplicates counted."""
    assert same_rows(found, right) is is_same


def call(stage: str, sibling: int = 0, iteration: int = 0, **named: object) -> QueryCall:
    """Return a call that waited one second and ran for two, later stages later."""
    ready_s = 10.0 * len(stage)
    return QueryCall(
        **{
            "request_id": f"{stage}/{iteration}/{sibling}",
            "stage": stage,
            "iteration": iteration,
            "sibling": sibling,
            "kind": "completed",
            "usage": Usage(input_tokens=50, output_tokens=5),
            "times": CallTimes(
                ready_at_s=ready_s, started_at_s=ready_s + 1, finished_at_s=ready_s + 3 + sibling
            ),
            **named,
        }
    )


RESULT = QueryResult(
    query_id="q",
    kind="completed",
    arrival_s=100.0,
    finished_at_s=107.5,
    slo_s=60.0,
    model="m",
    calls=(
        call("a"),
        call("bb", 0, parents=("a/0/0",), prefix=(PrefixPart("x", 40), PrefixPart("y", 20))),
        call("bb", 1, parents=("a/0/0",), think_s=2.0),
        call("ccc", parents=("a/0/0",)),
        call("dddd", parents=("bb/0/0", "bb/0/1", "ccc/0/0")),
        call("eeeee", parents=("dddd/0/0",), kind="evicted"),
    ),
)


def test_a_run_becomes_a_trace_with_its_structure():
    """Stages, siblings, parents, think times and lengths; calls without an end are left out."""
    later = msgspec.structs.replace(RESULT, query_id="r", arrival_s=130.0)
    queries = trace_of([later, RESULT])
    assert parse_trace(dump_trace(queries)) == tuple(queries)
    first, second = queries
    assert (first.query_id, first.arrival_s, second.arrival_s) == ("q", 0.0, 30.0)
    assert [stage.stage for stage in first.stages] == ["a", "bb", "ccc", "dddd"]
    assert [stage.parents for stage in first.stages] == [(), None, (0,), (1, 2)]
    assert [len(stage.calls) for stage in first.stages] == [1, 2, 1, 1]
    assert first.stages[1].calls[0].prefix == (PrefixPart("x", 40),)  # what the prompt can hold
    assert first.slo_s == 60.0


def test_time_is_told_per_stage_along_its_slowest_call():
    """Queue and engine apart; tokens of all siblings."""
    times = {one["stage"]: one for one in stage_times(RESULT)}
    assert (times["bb"]["queue_s"], times["bb"]["engine_s"]) == (1.0, 3.0)
    assert (times["bb"]["calls"], times["bb"]["output_tokens"]) == (2, 10)
    assert latency_s(RESULT) == 7.5
