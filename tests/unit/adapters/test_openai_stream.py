"""What servers stream, put together from bytes."""

import json
from typing import Any

import pytest

from services.worker.messages import check_result
from shared.adapters.openai_stream import Answer, EventLines, error_text
from shared.errors import GenerationFailed

LIMIT = 10_000
ENDS = [b"\n", b"\r\n", b"\r"]


def events_in(data: bytes, piece_bytes: int = LIMIT) -> list[str]:
    """Return the events of a stream that comes in pieces."""
    lines = EventLines(LIMIT, LIMIT)
    pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
    return [event for piece in pieces for event in lines.feed(piece)] + lines.rest()


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, LIMIT])
@pytest.mark.parametrize("end", ENDS)
def test_lines_may_end_in_three_ways(end: bytes, piece_bytes: int) -> None:
    """Line feed, carriage return, or both, wherever the stream is cut."""
    stream = end.join([b": ping", b"", b'data: {"a": 1}', b"", b"event: x", b'data:{"b": 2}', b""])
    assert events_in(stream + end, piece_bytes) == ['{"a": 1}', '{"b": 2}']


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, LIMIT])
@pytest.mark.parametrize("end", ENDS)
def test_an_event_may_have_several_data_lines(end: bytes, piece_bytes: int) -> None:
    """They are one text, a line each; a line's end that is cut in two is no empty line."""
    stream = end.join([b'data: {"a":', b"data: 1,", b'data: "b": 2}', b"", b'data: {"c": 3}', b""])
    one, other = events_in(stream + end, piece_bytes)
    assert json.loads(one) == {"a": 1, "b": 2}
    assert json.loads(other) == {"c": 3}


def test_an_event_comes_as_soon_as_it_ends() -> None:
    """A token is not held back until the next one; nor is the last word."""
    lines = EventLines(LIMIT, LIMIT)
    assert lines.feed(b'data: {"a": 1}\r\n\r') == ['{"a": 1}']
    assert lines.feed(b"\ndata: [DONE]\n") == ["[DONE]"]


def test_events_without_an_empty_line_between_them_are_kept_apart() -> None:
    """Some servers forget the empty line."""
    assert events_in(b'data: {"a": 1}\ndata: {"b": 2}\ndata: [DONE]') == [
        '{"a": 1}',
        '{"b": 2}',
        "[DONE]",
    ]


def test_an_event_is_bounded_however_many_lines_it_has() -> None:
    """An event that never ends is given up."""
    lines = EventLines(1_000, 1_000_000)
    for _ in range(100):
        assert lines.feed(b"data: [1,,\n") == []
    with pytest.raises(GenerationFailed, match="longer"):
        lines.feed(b"data: [1,,\n" * 2)


@pytest.mark.parametrize("number", ["1" * 30, "-" + "9" * 20, "9" * 400, "9" * 5_000])
def test_numbers_that_no_message_carries_do_not_fail_the_call(number: str) -> None:
    """An unknown field with a huge whole number is near it, or empty; all else is kept."""
    answer = Answer(is_chat=True)
    delta = f'{{"content": "fine", "seed": {number}, "kept": {2**64 - 1}, "deep": [[{number}]]}}'
    answer.take(f'{{"choices": [{{"index": 0, "delta": {delta}, "finish_reason": "stop"}}]}}')
    finished = answer.finished()
    check_result(finished)
    assert finished.text == "fine"
    message: dict[str, Any] = finished.message or {}
    assert message["kept"] == 2**64 - 1
    assert message["deep"] == [[float(number)]] if len(number) < 100 else [[None]]


def test_an_error_is_quoted_at_length() -> None:
    """The point of an error is often at its end; a whole page of it is not needed."""
    assert error_text({"message": "x" * 400 + "the point"}).endswith("the point")
    assert len(error_text("x" * 10_000)) <= 500
