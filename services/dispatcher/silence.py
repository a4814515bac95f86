"""When an instance counts as dead: silence that probes have covered, in the log's own time.

A recovery owner writes a probe into its partition of `instance-states` every second and reads it
back. Records of a partition are ordered, so a probe that comes back proves that every heartbeat
appended before it has been read. Silence is therefore measured between append times of that one
partition, never on a host's clock, and only while the probes form an unbroken chain: a gap
(broker down, this process paused, clock of the broker set) starts all timers anew. A broker outage
is not mass death.
"""


class SilenceWatch:
    """Timers of one partition.

    Args:
        max_gap_s: Longest time between two probes that still form a chain, seconds.
    """

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self._chain_began_s: float | None = None
        self._last_probe_s = 0.0

    def probe(self, append_unix_s: float) -> None:
        """Note that an own probe came back."""
        gap_s = append_unix_s - self._last_probe_s
        if self._chain_began_s is None or not 0.0 <= gap_s <= self._max_gap_s:
            self._chain_began_s = append_unix_s
        self._last_probe_s = append_unix_s

    def silence_s(self, heard_unix_s: float) -> float:
        """Return how long an instance has provably been silent, seconds.

        Args:
            heard_unix_s: Append time of its last record in this partition.
        """
        if self._chain_began_s is None:
            return 0.0
        if heard_unix_s > self._last_probe_s + self._max_gap_s:
            heard_unix_s = self._chain_began_s  # heard before the broker's clock was set back
        return self._last_probe_s - max(heard_unix_s, self._chain_began_s)
