"""Streamed text: one attempt, in order, without gaps, and never two attempts in one answer."""

import pytest

from services.gateway.calls import rest_of_text
from services.gateway.chunk_reader import MAX_HELD_CHARS, Stream
from services.gateway.problems import Problem
from shared.contracts.messages import CallOutcome


def _outcome(text: str, attempt: int = 0) -> CallOutcome:
    return CallOutcome(request_id="r", query_id="q", kind="completed", text=text, attempt=attempt)


async def test_chunks_are_joined_in_order():
    """What came since the last look is one text."""
    stream = Stream()
    waiter = stream.ready()
    assert not waiter.done()
    stream.put("1-1", 0, 0, "a")
    stream.put("1-2", 0, 1, "b")
    assert waiter.done()
    assert stream.take() == "ab"
    assert stream.take() == ""
    assert rest_of_text(_outcome("abc"), "ab", stream) == "c"


async def test_an_attempt_that_nobody_saw_is_replaced():
    """Before anything was forwarded, a later attempt takes the place of an earlier one."""
    stream = Stream()
    stream.put("1-1", 0, 0, "old")
    stream.put("2-1", 1, 0, "new")
    assert stream.take() == "new"
    assert not stream.has_second_attempt
    assert rest_of_text(_outcome("new text", attempt=1), "new", stream) == " text"


async def test_a_second_attempt_after_a_forwarded_token_is_told():
    """Its text is not taken."""
    stream = Stream()
    stream.put("1-1", 0, 0, "old")
    assert stream.take() == "old"
    stream.put("2-1", 1, 0, "new")
    assert stream.has_second_attempt
    assert stream.ready().done()
    assert stream.take() == ""


async def test_a_gap_stops_the_stream_and_the_outcome_brings_the_rest():
    """A lost chunk is never jumped over."""
    stream = Stream()
    stream.put("1-1", 0, 0, "a")
    stream.put("1-3", 0, 2, "c")
    stream.put("1-4", 0, 3, "d")
    assert stream.take() == "a"
    assert rest_of_text(_outcome("abcd"), "a", stream) == "bcd"


async def test_a_slow_reader_holds_a_bounded_text():
    """What is beyond the bound is dropped, and comes with the outcome."""
    stream = Stream()
    piece = "x" * (MAX_HELD_CHARS // 2)
    for index in range(5):
        stream.put(f"1-{index + 1}", 0, index, piece)
    assert len(stream.take()) == MAX_HELD_CHARS


@pytest.mark.parametrize(("text", "attempt"), [("other", 0), ("sent and more", 1)])
async def test_text_of_another_attempt_is_an_error(text: str, attempt: int):
    """An outcome that does not go on where the stream stopped is not appended to it."""
    stream = Stream()
    stream.put("1-1", 0, 0, "sent")
    stream.take()
    with pytest.raises(Problem) as caught:
        rest_of_text(_outcome(text, attempt), "sent", stream)
    assert caught.value.code == "stream_broken"
