"""Which name somebody meant who wrote another one. Pure."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name most like a word, whatever their case; empty: none is like it."""
    by_key = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_key, n=1)
    return by_key[near[0]] if near else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?` to put behind a message; empty: no name is like the word."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""
