"""Which name somebody meant."""

import pytest

from shared.domain.near_names import did_you_mean, nearest


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("leage", "league"),
        ("LEAGUE", "league"),
        ("hexgen_flow", "hexgen-flow"),
        ("HexGen", "hexgen-flow"),
        ("something else", ""),
        ("", ""),
    ],
)
def test_the_nearest_name_is_found_whatever_the_case(word: str, name: str):
    """A name that is like no other is guessed at by nobody."""
    known = ["league", "bazaar", "hexgen-flow", "vllm"]
    assert nearest(word, known) == name
    assert did_you_mean(word, known) == (f"; did you mean {name}?" if name else "")
