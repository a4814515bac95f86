"""One bound for the end of a whole mesh: its services stop one after another, and share it."""

import time
from collections.abc import Callable


class Ending:
    """How much time a mesh has left to end.

    Args:
        bound_s: Longest time from the begin of the end, wall seconds.
        monotonic: Wall seconds on a clock that never jumps.
    """

    def __init__(self, bound_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.bound_s = bound_s
        self._monotonic = monotonic
        self._until_s: float | None = None
        self.late: list[str] = []
        """Services that were cut off."""

    def begin(self) -> None:
        """Start the time; once it runs this changes nothing."""
        if self._until_s is None:
            self._until_s = self._monotonic() + self.bound_s

    @property
    def left_s(self) -> float:
        """What is left, wall seconds; all of it before the end has begun."""
        if self._until_s is None:
            return self.bound_s
        return max(0.0, self._until_s - self._monotonic())
