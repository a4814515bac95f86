"""Who waited for whom, from recorded starts and ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.simulation.importing import RecordedCall, Recording, assemble
from shared.simulation.importing.structure import find_structure, group_stages

S = 1_000_000_000


def call(start_s: float, end_s: float | None, stage: str = "s", path: tuple[str, ...] = ()):
    """Return a call with these times."""
    return RecordedCall(
        place="here",
        query_id="q",
        start_ns=round(start_s * S),
        end_ns=None if end_s is None else round(end_s * S),
        stage=stage,
        input_tokens=10,
        output_tokens=1,
        path=path,
    )


def parents(*calls: RecordedCall, tolerance_s: float = 0.0) -> list[set[int]]:
    """Return whom each call, in order of start, waited for."""
    return [set(found) for found in find_structure(calls, round(tolerance_s * S)).parents]


def test_calls_one_after_the_other_are_a_chain():
    """Only the nearest earlier call is waited for, not all of them."""
    assert parents(call(0, 1), call(1, 2), call(5, 6)) == [set(), {0}, {1}]


def test_overlapping_calls_are_siblings():
    """A call cannot have waited for one that had not ended."""
    assert parents(call(0, 1), call(1, 3), call(1.5, 2), call(3, 4)) == [set(), {0}, {0}, {1, 2}]


def test_a_call_waits_only_for_what_had_ended():
    """Of two siblings, the one still running is not a parent."""
    assert parents(call(0, 1), call(0, 9), call(2, 3)) == [set(), set(), {0}]


def test_spans_keep_branches_apart():
    """Without their spans, the second branch's last call would seem to wait for the first's."""
    branches = (
        call(0, 1, path=("root", "a")),
        call(0, 2, path=("root", "b")),
        call(1, 3, path=("root", "a")),
        call(2, 4, path=("root", "b")),
    )
    assert parents(*branches) == [set(), set(), {0}, {1}]
    flat = tuple(call(c.start_ns / S, (c.end_ns or 0) / S) for c in branches)
    assert parents(*flat) == [set(), set(), {0}, {0, 1}]


def test_a_span_waits_for_all_that_was_last_in_the_one_before():
    """Between spans that follow each other, the ends of one are the parents of the next."""
    assert parents(
        call(0, 1, path=("a",)), call(0, 2, path=("a",)), call(3, 4, path=("b",)), call(5, 6)
    ) == [set(), set(), {0, 1}, {2}]


def test_clocks_that_disagree_are_tolerated_on_request():
    """A short overlap counts as one after the other, up to half of the earlier call."""
    assert parents(call(0, 1.01), call(1, 2)) == [set(), set()]
    assert parents(call(0, 1.01), call(1, 2), tolerance_s=0.05) == [set(), {0}]
    assert parents(call(0, 1), call(0.1, 2), tolerance_s=60) == [set(), set()]


def test_calls_of_no_length_at_one_instant_are_siblings():
    """Coarse timestamps must not make a call wait for itself or for its own sibling."""
    assert parents(call(1, 1), call(1, 1), call(2, 2)) == [set(), set(), {0, 1}]


def test_siblings_share_stage_parents_children_and_start():
    """Calls that differ in one of these are stages of their own."""
    structure = find_structure(
        [
            call(0, 1, "plan"),
            call(1, 3, "draft"),
            call(1.2, 4, "draft"),
            call(1, 4, "check"),
            call(2.5, 4, "draft"),
            call(4, 5, "answer"),
        ]
    )
    names = [[structure.calls[i].stage for i in group] for group in group_stages(structure)]
    assert names == [["plan"], ["draft", "draft"], ["check"], ["draft"], ["answer"]]


intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10), st.sampled_from("ab"), st.booleans()),
    min_size=1,
    max_size=14,
)


@given(intervals)
def test_think_times_bring_every_stage_back_to_its_recorded_start(drawn):
    """Replaying the trace with the recorded durations starts every stage when it had started."""
    calls = [
        call(100 + start, 100 + start + length, name, ("root", "x") if nested else ("root",))
        for start, length, name, nested in drawn
    ]
    (query,) = assemble(Recording(source="x", kind="x", calls=calls)).queries
    structure = find_structure(calls)
    groups = group_stages(structure)
    ends: list[float] = []
    for number, (stage, group) in enumerate(zip(query.stages, groups, strict=True)):
        chain = (number - 1,) if number else ()
        waited_for = stage.parents if stage.parents is not None else chain
        ready_s = max((ends[parent] for parent in waited_for), default=0.0)
        recorded_s = min(structure.calls[i].start_ns for i in group) / S
        first_s = min(one.start_ns for one in calls) / S
        assert ready_s + stage.think_s == pytest.approx(recorded_s - first_s)
        ends.append(max(structure.calls[i].end_ns or 0 for i in group) / S - first_s)


@given(intervals)
def test_no_call_is_lost_and_iterations_count_up(drawn):
    """Every call is in exactly one stage; a stage's iterations are 0, 1, 2, ..."""
    calls = [call(start, start + length, name) for start, length, name, _ in drawn]
    (query,) = assemble(Recording(source="x", kind="x", calls=calls)).queries
    assert query.num_calls == len(calls)
    for name in "ab":
        iterations = [stage.iteration for stage in query.stages if stage.stage == name]
        assert iterations == list(range(len(iterations)))
