"""Whether the engine gets anywhere: failures in a row, and time without a token or an end."""

from shared.ports import Clock


class Pulse:
    """What one life sees of its engine.

    Args:
        clock: Mesh clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._progress_s = clock.now_s()
        self.failures = 0
        self.unavailable = ""
        """What the engine's server said when it took no call, where that was the last failure."""

    def started(self, num_running: int) -> None:
        """Note that a call was started; `num_running` counts it."""
        if num_running == 1:
            self.progressed()

    def progressed(self) -> None:
        """Note that a call had a token, or ended."""
        self._progress_s = self._clock.now_s()

    def succeeded(self) -> None:
        """Note a result."""
        self.failures = 0
        self.unavailable = ""

    def failed(self, unavailable: str = "") -> None:
        """Note a failure of the engine.

        Args:
            unavailable: What its server said, where it took no call.
        """
        self.failures += 1
        self.unavailable = unavailable

    def stalled_s(self, num_running: int) -> float:
        """Return the time without progress, mesh seconds; 0 while nothing runs."""
        return max(0.0, self._clock.now_s() - self._progress_s) if num_running else 0.0
