"""The book of held calls: its sums, its duplicates, its places."""

import math
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from services.worker.calls import CallBook, EndedCalls, HeldCall, Place
from shared.contracts.codec import encode
from shared.contracts.messages import BoundCall
from shared.ports import Record, TopicPartition
from tests.support.worker_bench import bound_call, replaced

TP = TopicPartition("instance.a", 0)


def _record(call: BoundCall, offset: int) -> Record:
    return Record(tp=TP, offset=offset, append_unix_s=0.0, key=None, value=encode(call))


def _hold(book: CallBook, call: BoundCall, offset: int = 0) -> HeldCall:
    return book.hold(call, _record(call, offset), epoch=7, now_s=5.0)


def _handed_on(call: BoundCall, how: Literal["answered", "back"]) -> HeldCall:
    held = _hold(CallBook(), call)
    held.handed_on = how
    return held


@given(
    st.lists(
        st.tuples(st.sampled_from(["hold", "start", "end", "forget"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_sums_equal_what_is_held(steps: list[tuple[str, int]]) -> None:
    """After any sequence of moves the reported sums are those of the calls in each place."""
    book = CallBook()
    for offset, (step, number) in enumerate(steps):
        name = f"c{number}"
        held = book.get(name)
        if step == "hold" and held is None:
            _hold(book, bound_call(name, t_comp_s=0.1 * (number + 1)), offset)
        elif held is not None and step == "start" and held.place is Place.WAITING:
            book.start(held, 6.0)
        elif held is not None and step == "end":
            book.end(held, 7.0)
        elif held is not None and step == "forget" and held.place is Place.ENDING:
            book.forget(held)
    waiting, running = list(book.at(Place.WAITING)), list(book.at(Place.RUNNING))
    assert (book.num_waiting, book.num_running) == (len(waiting), len(running))
    work_s = sum(held.call.t_comp_s for held in [*waiting, *running])
    assert math.isclose(book.backlog_s, work_s, abs_tol=1e-9)
    assert book.backlog_tokens == 55 * len(waiting)
    everything = [*waiting, *running, *book.at(Place.ENDING)]
    assert len(book) == len(everything)
    assert book.held_bytes == sum(held.size_bytes for held in everything)


def test_empty_book_reports_exactly_zero() -> None:
    """Rounding leaves no work behind when the last call has ended."""
    book = CallBook()
    held = [_hold(book, bound_call(f"c{i}", t_comp_s=0.1)) for i in range(3)]
    for call in held:
        book.end(call, 0.0)
    assert book.backlog_s == 0.0


def test_second_delivery_joins_the_first() -> None:
    """A call delivered twice is held once; both offsets and the higher attempt are kept."""
    book = CallBook()
    call = bound_call("a")
    held = _hold(book, call, offset=3)
    again = replaced(call, attempt=2, ready_at_s=2_000.0)
    assert book.attach(again, _record(again, 9))
    assert held.offsets == [3, 9]
    assert (held.attempt, held.request.ready_at_s, held.token.attempt) == (2, 2_000.0, 0)
    earlier = replaced(call, attempt=1)
    assert book.attach(earlier, _record(earlier, 10))
    assert held.attempt == 2
    assert not book.attach(bound_call("b"), _record(call, 11))


def test_entry_orders_by_score_then_offset() -> None:
    """The entry for the urgency set carries the call's score, its offset as arrival, its token."""
    entry = _hold(CallBook(), bound_call("a", score=-2.5, attempt=1), offset=12).entry()
    assert (entry.score, entry.arrival) == (-2.5, 12)
    assert (entry.token.epoch, entry.token.offset, entry.token.attempt) == (7, 12, 1)


def test_calls_of_a_query_are_found() -> None:
    """Calls are found by query until they are forgotten."""
    book = CallBook()
    first, second = _hold(book, bound_call("a", query_id="q")), _hold(book, bound_call("b"))
    assert book.of_query("q") == [first]
    book.end(first, 0.0)
    book.forget(first)
    assert book.of_query("q") == []
    assert book.of_query("query-of-b") == [second]
    assert book.of_query("unknown") == []


def test_ending_twice_counts_once() -> None:
    """Ending a call that is ending already changes no sum."""
    book = CallBook()
    held = _hold(book, bound_call("a"))
    book.end(held, 1.0)
    book.end(held, 2.0)
    assert (book.num_waiting, book.num_running, held.finished_at_s) == (0, 0, 1.0)


def test_answered_call_is_known_at_any_attempt() -> None:
    """Any later delivery of the same submission is a duplicate once its outcome is out."""
    ended = EndedCalls(10)
    call = bound_call("a")
    assert not ended.knows(call.request)
    ended.remember(_handed_on(call, "answered"))
    assert ended.knows(call.request)
    assert ended.knows(replaced(call, attempt=5).request)
    assert not ended.knows(replaced(call, ready_at_s=1_001.0).request)


def test_call_handed_back_is_known_up_to_its_attempt() -> None:
    """The attempt that was handed back is a duplicate, the next one is not."""
    ended = EndedCalls(10)
    call = bound_call("a", attempt=1)
    ended.remember(_handed_on(call, "back"))
    assert ended.knows(call.request)
    assert ended.knows(replaced(call, attempt=0).request)
    assert not ended.knows(replaced(call, attempt=2).request)


def test_memory_of_ended_calls_is_bounded() -> None:
    """The oldest ended call is forgotten first."""
    ended = EndedCalls(2)
    calls = [bound_call(name) for name in "abc"]
    for call in calls:
        ended.remember(_handed_on(call, "answered"))
    assert [ended.knows(call.request) for call in calls] == [False, True, True]


def test_accounted_offset_never_falls() -> None:
    """A record that comes late does not take the reported offset back."""
    book = CallBook(accounted_offset=4)
    book.account(9)
    book.account(6)
    assert book.accounted_offset == 9


def test_trace_context_comes_from_the_record() -> None:
    """A call's outcome continues the trace of its delivery."""
    call = bound_call("a")
    record = Record(
        tp=TP,
        offset=0,
        append_unix_s=0.0,
        key=None,
        value=encode(call),
        headers=(("type", b"x"), ("traceparent", b"00-abc-def-01")),
    )
    held = CallBook().hold(call, record, epoch=1, now_s=0.0)
    assert held.traceparent == "00-abc-def-01"
    assert _hold(CallBook(), call).traceparent is None
