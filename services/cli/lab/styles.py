"""How policies look in plots: the same policy, the same colour, whatever it is shown with."""

from services.cli.lab.comparison import GIVEN, Contender

GREY = "#6b6b6b"
BOUND = "#b00020"

_COLOURS = {
    "hexgen-flow": "#0b6e99",
    "wb+fcfs": "#4fa3c7",
    "rr+pq": "#93c5dc",
    "vllm": "#d9730d",
    "least-outstanding": "#2f7d32",
    "power-of-two": "#8bc34a",
    "prefix-queue": "#8b4d9f",
    "edf": "#b58900",
    "llf": "#d9bb4e",
    "vtc": "#ad1457",
    "qlm": "#e57399",
    "ratio": "#8a8a8a",
    "earliest-finish": "#222222",
}
_OTHERS = ("#00897b", "#5c6bc0", "#6d4c41", "#c62828", "#9e9d24")
_DASHED = frozenset({"wb+fcfs", "rr+pq", "power-of-two", "llf", "qlm", "ratio"})
_MARKERS = "osD^vP*X<>hpd"


class Style:
    """Colour, line and marker of a contender.

    Args:
        contender: Whose.
        place: Its place among all contenders.
    """

    def __init__(self, contender: Contender, place: int) -> None:
        names = list(_COLOURS)
        policy = contender.policy
        known = names.index(policy) if policy in _COLOURS else place
        self.colour = _COLOURS.get(policy, _OTHERS[place % len(_OTHERS)])
        self.marker = _MARKERS[known % len(_MARKERS)]
        self.is_own = contender.flags != GIVEN
        self.line = ":" if self.is_own else ("--" if policy in _DASHED else "-")
        self.width = 2.4 if place == 0 else 1.4
        self.fill = "white" if self.is_own else self.colour
