"""Time, as the services need it."""

from typing import Protocol


class Clock(Protocol):
    """Time. Mesh seconds are wall seconds multiplied by the time scale (1 in production)."""

    @property
    def time_scale(self) -> float:
        """Mesh seconds per wall second."""
        ...

    def now_s(self) -> float:
        """Return the current instant on the mesh clock, seconds (compares across hosts).

        Never decreases within a process, whatever the host's clock or the broker's does.
        """
        ...

    def wall_unix_s(self) -> float:
        """Return this host's wall clock, Unix seconds (feeds append times and logs only).

        It is anchored when the clock is made and goes on steadily; a jump of the host's clock does
        not move it.
        """
        ...

    def monotonic_s(self) -> float:
        """Return wall seconds on a clock that never jumps, for durations and time-outs."""
        ...

    def mesh_s(self, wall_unix_s: float) -> float:
        """Return the mesh instant of a broker append time (Unix seconds)."""
        ...

    def observe_append(self, append_unix_s: float, sent_s: float, acked_s: float) -> None:
        """Learn this host's offset from the broker's clock from one produce acknowledgement.

        Observations that cannot be true are ignored.

        Args:
            append_unix_s: Append time of the record, Unix seconds on the broker's clock.
            sent_s: `monotonic_s()` when the record was sent.
            acked_s: `monotonic_s()` when its acknowledgement arrived.
        """
        ...

    async def sleep(self, mesh_seconds: float) -> None:
        """Wait for a duration given in mesh seconds."""
        ...

    async def sleep_wall(self, seconds: float) -> None:
        """Wait for a duration given in wall seconds (heartbeats, back-off)."""
        ...
