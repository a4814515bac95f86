"""Halves of characters become characters, or none at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.adapters.whole_text import TextPieces, whole_text

anything = st.text(st.characters() | st.characters(categories=["Cs"]))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("\ud83d\ude00!", "😀!"),
        ("a\ud83d", "a\ufffd"),
        ("\ude00b", "\ufffdb"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_halves_join_and_lone_ones_are_replaced(said: str, meant: str) -> None:
    """Two halves are one character; one by itself is the sign for what cannot be shown."""
    assert whole_text(said) == meant


def test_a_half_waits_for_the_next_piece() -> None:
    """An emoji cut between two pieces comes whole, with the second."""
    pieces = TextPieces()
    assert [pieces.add("so \ud83d"), pieces.add("\ude00 it is"), pieces.add("\ud83d")] == [
        "so ",
        "😀 it is",
        "",
    ]
    assert pieces.whole() == "so 😀 it is\ufffd"


@given(st.lists(anything, max_size=6))
def test_whatever_comes_can_be_written(found: list[str]) -> None:
    """The text is UTF-8, and the same however it was cut; what was streamed begins it."""
    pieces = TextPieces()
    streamed = "".join(pieces.add(piece) for piece in found)
    assert pieces.whole() == whole_text("".join(found))
    assert pieces.whole().startswith(streamed)
    assert pieces.whole().encode().decode() == pieces.whole()
