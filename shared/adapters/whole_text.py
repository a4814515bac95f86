"""Text that can be written as UTF-8, out of what servers send.

JSON may name one half of a character that takes two (an emoji as U+D83D and U+DE00), and a server
that streams may put the halves into different events. A half by itself is no text: nothing carries
it.
"""

_FIRST_HALVES = ("\ud800", "\udbff")


def whole_text(text: str) -> str:
    """Return text with halves joined; one without its other half becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class TextPieces:
    """Joins the pieces of a text; a half that ends one waits for the next."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._half = ""

    def add(self, piece: str) -> str:
        """Add a piece, and return what of the text is new and whole; it may be empty."""
        text = self._half + piece
        self._half = ""
        if text and _FIRST_HALVES[0] <= text[-1] <= _FIRST_HALVES[1]:
            text, self._half = text[:-1], text[-1]
        new = whole_text(text)
        self._pieces.append(new)
        return new

    def whole(self) -> str:
        """Return everything."""
        return "".join(self._pieces) + whole_text(self._half)
