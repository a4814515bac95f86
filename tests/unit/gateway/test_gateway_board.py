"""What the dashboard knows of queries, and how it explains them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.board import MAX_CALLS, Board
from services.gateway.explain import PARTS, choice_text, critical_path, explanation, scores
from services.gateway.waiting import line_of
from shared.contracts.messages import CallTimes, LatencyEvent, ScoreTerms
from shared.ports import QueueEntry, Token


def event(name: str, times: tuple[float, ...], **fields: Any) -> LatencyEvent:
    """Return an ended call: ready, queued, started, finished."""
    ready_s, queued_s, started_s, finished_s = times
    return LatencyEvent(
        **{
            "request_id": name,
            "query_id": "q",
            "workflow": "w",
            "stage": "s",
            "model": "m",
            "instance_id": "i",
            "kind": "completed",
            "arrival_s": 100.0,
            "slo_s": 10.0,
            "times": CallTimes(
                ready_at_s=ready_s,
                dispatched_at_s=ready_s,
                queued_at_s=queued_s,
                started_at_s=started_s,
                finished_at_s=finished_s,
            ),
            **fields,
        }
    )


CHAIN = [
    event("a", (100.0, 100.5, 103.0, 104.0)),
    event("b1", (105.0, 105.0, 105.0, 109.0), parents=("a",), stage="judge"),
    event("b2", (105.0, 105.0, 106.0, 106.5), parents=("a",), stage="judge", sibling=1),
    event("c", (109.0, 109.5, 118.0, 119.0), parents=("b1", "b2"), stage="last", t_slo_s=2.0),
]


def test_the_critical_path_is_what_the_end_waited_for():
    """Of two siblings only the slower one counts; the parts are those of the path."""
    assert [step.event.request_id for step in critical_path(100.0, CHAIN)] == ["a", "b1", "c"]
    found = explanation(100.0, 10.0, CHAIN)
    assert found["parts_s"] == {
        "between calls": 1.0,
        "on the way": 1.0,
        "waiting": 11.0,
        "running": 6.0,
    }
    assert found["late_s"] == pytest.approx(9.0)


def test_a_late_query_is_explained_in_a_sentence():
    """It says how late, what took most, where, and against which budget."""
    text = explanation(100.0, 10.0, CHAIN)["text"]
    assert text.startswith("Late by 9.0 s: it took 19.0 s of 10.0 s. 58% of that (11.0 s)")
    assert "waiting for an instance, most of it 8.5 s at last 0 on i" in text
    assert "budget was 2.0 s" in text
    assert explanation(100.0, 30.0, CHAIN)["text"].startswith("In time, with 11.0 s to spare")
    assert explanation(100.0, 30.0, [])["text"] == "No call of it has ended yet."
    running = explanation(100.0, 10.0, CHAIN, is_running=True)["text"]
    assert running.startswith("Still running, 19.0 s of 10.0 s so far, late by 9.0 s already. 58%")


@given(
    st.lists(
        st.tuples(*[st.floats(0, 50)] * 4, st.lists(st.integers(0, 9), max_size=3)), max_size=10
    )
)
def test_the_parts_add_up_to_the_querys_time(raw):
    """Whatever the calls look like, no time is invented and none is lost."""
    calls = []
    for number, (ready, *rest, parents) in enumerate(raw):
        times = tuple(100.0 + ready + part for part in (0, *sorted(rest)))
        calls.append(event(f"c{number}", times, parents=tuple(f"c{p}" for p in parents)))
    found = explanation(100.0, 10.0, calls)
    end_s = max((call.times.finished_at_s for call in calls), default=100.0)
    overlap = sum(found["parts_s"].values()) - (end_s - 100.0)
    assert abs(overlap) < 0.01 * (len(calls) + 1)
    assert set(found["parts_s"]) == set(PARTS)


def test_the_choice_shows_what_the_others_offered():
    """Score terms of the chosen instance, and of the others by the same formula."""
    terms = ScoreTerms(
        policy="hexgen-flow",
        score=0.5,
        t_queue_s=2.0,
        t_comp_s=1.0,
        alpha=0.5,
        beta_s2=4.0,
        others={"j": (4.0, 1.5)},
    )
    call = event("a", (100.0, 100.0, 100.0, 101.0), terms=terms, alpha=0.5)
    assert [(one["instance_id"], one["score"]) for one in scores(call)] == [
        ("i", 0.5),
        ("j", 0.5 * 4.0 / 4.0 - 0.5 * 1.5),
    ]
    assert "Next best looked j: 4.00 s bound, 1.50 s for this call" in choice_text(call)


def test_a_query_ends_when_it_has_been_quiet():
    """It runs while calls of it end, then it is completed; a failed call ends it at once."""
    board = Board(10, quiet_s=30.0)
    board.take(event("a", (100.0, 100.0, 100.0, 105.0)))
    assert [row["outcome"] for row in board.rows(120.0)] == ["running"]
    before = board.change
    assert board.summary(136.0)["attainment"] == 1.0
    assert board.change > before, "an eye that follows changes must hear of the end"
    assert [row["outcome"] for row in board.rows(136.0, since=before)] == ["completed"]
    board.take(event("b", (106.0, 106.0, 106.0, 130.0), kind="failed", reason="stalled"))
    (row,) = board.rows(131.0, outcome="late")
    assert (row["outcome"], row["is_late"], row["took_s"]) == ("failed", True, 30.0)


def test_a_call_that_is_a_query_by_itself_ends_with_it():
    """Nothing more can come of it: it is no running query, and counts at once."""
    board = Board(10, quiet_s=30.0)
    board.take(event("alone", (100.0, 100.0, 100.0, 105.0), query_id="alone"))
    assert [row["outcome"] for row in board.rows(105.1)] == ["completed"]
    found = board.summary(105.1)
    assert (found["queries_running"], found["attainment"]) == (0, 1.0)


def test_a_repeated_event_changes_nothing():
    """Events come at least once; a later attempt replaces an earlier one."""
    board = Board(10, quiet_s=30.0)
    first = event("a", (100.0, 100.0, 100.0, 105.0), kind="failed")
    board.take(first)
    board.take(first)
    assert board.num_calls == {"failed": 1}
    board.take(event("a", (100.0, 100.0, 106.0, 107.0), attempt=1))
    assert board.rows(200.0)[0]["calls_ended"] == 1


def test_the_board_is_bounded():
    """Neither many queries nor a query of many calls grows it beyond its bounds."""
    board = Board(5, quiet_s=30.0)
    for number in range(20):
        board.take(event("a", (100.0, 100.0, 100.0, 105.0), query_id=f"q{number}"))
    assert len(board) == 5
    for number in range(MAX_CALLS + 50):
        board.take(event(f"c{number}", (100.0, 100.0, 100.0, 105.0), query_id="big"))
    found = board.query("big", 200.0)
    assert found is not None
    assert len(found["calls"]) == MAX_CALLS
    assert found["calls_ended"] == MAX_CALLS + 50


def test_one_tenant_cannot_write_into_anothers_query():
    """A query belongs to the tenant whose call was seen first."""
    board = Board(5, quiet_s=30.0)
    board.take(event("a", (100.0, 100.0, 100.0, 105.0), tenant="acme"))
    board.take(event("b", (100.0, 100.0, 100.0, 105.0), tenant="other"))
    assert board.rows(200.0, tenant="other") == []
    assert board.rows(200.0, tenant="acme")[0]["calls_ended"] == 1


def test_waiting_calls_are_counted_by_urgency():
    """Queue scores are latest starts; on another scale only their number means something."""

    def entry(name: str, score: float) -> QueueEntry:
        return QueueEntry(request_id=name, score=score, arrival=0, token=Token(0, 0, 0))

    line = line_of([entry("a", 995.0), entry("b", 1_004.0), entry("c", 1_100.0)], 1_000.0)
    assert line.by_slack == (1, 1, 0, 1)
    assert line.first[0] == {"request_id": "a", "slack_s": -5.0}
    assert line_of([entry("a", 3.0)], 1e9).by_slack is None
