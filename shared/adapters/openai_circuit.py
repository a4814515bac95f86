"""Leaves a server alone that fails request after request. Pure."""


class Circuit:
    """Opens after so many failures in a row; then one request at a time tries, between pauses.

    Args:
        threshold: Failures in a row that are tolerated, less one.
        first_pause_s: First pause, seconds.
        longest_pause_s: Longest pause, seconds.
    """

    def __init__(self, threshold: int, first_pause_s: float, longest_pause_s: float) -> None:
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._num_failures = 0
        self._open_until_s = 0.0
        self._is_trying = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing is known to be wrong."""
        return self._num_failures < self._threshold

    def allows(self, now_s: float) -> bool:
        """Return whether a request would be let through at a monotonic instant, seconds."""
        return self.is_closed or (not self._is_trying and now_s >= self._open_until_s)

    def enter(self, now_s: float) -> bool:
        """Let a request through, or not; while open, one at a time after the pause."""
        if not self.allows(now_s):
            return False
        self._is_trying = not self.is_closed
        return True

    def leave(self) -> None:
        """Note that a request let through has ended without showing anything (cancelled)."""
        self._is_trying = False

    def succeeded(self) -> None:
        """Note that the server does its work."""
        self._num_failures = 0
        self._is_trying = False

    def failed(self, now_s: float) -> None:
        """Note that it did not, at a monotonic instant, seconds."""
        self._is_trying = False
        self._num_failures += 1
        doublings = self._num_failures - self._threshold
        if doublings >= 0:
            pause_s = min(self._longest_pause_s, self._first_pause_s * 2 ** min(doublings, 16))
            self._open_until_s = now_s + pause_s
