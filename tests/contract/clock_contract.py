"""What every Clock does. Subclasses bind the fixtures `clock` (scale 1) and `fast` (scale 20)."""

import asyncio

import pytest

from shared.ports import Clock


class ClockContract:
    """Behaviour that the system's and the manual clock share."""

    def test_mesh_time_is_wall_time_times_the_scale(self, clock: Clock, fast: Clock) -> None:
        """Before anything is learned, now is the wall clock multiplied by the scale."""
        for subject in (clock, fast):
            before_s = subject.wall_unix_s()
            now_s = subject.now_s()
            after_s = subject.wall_unix_s()
            scale = subject.time_scale
            assert before_s * scale <= now_s <= after_s * scale

    def test_append_times_become_mesh_times(self, clock: Clock, fast: Clock) -> None:
        """An append time is a mesh instant multiplied by the scale."""
        assert clock.mesh_s(1_000.5) == 1_000.5
        assert fast.mesh_s(1_000.5) == 20_010.0

    def test_time_never_runs_back(self, clock: Clock) -> None:
        """Readings of mesh and monotonic time never decrease, whatever is observed."""
        readings = [clock.now_s()]
        durations = [clock.monotonic_s()]
        for step_s in (-30.0, 0.001, 5.0, -0.5, 0.0):
            sent_s = clock.monotonic_s()
            clock.observe_append(clock.wall_unix_s() + step_s, sent_s, clock.monotonic_s())
            readings += [clock.now_s() for _ in range(20)]
            durations.append(clock.monotonic_s())
        assert readings == sorted(readings)
        assert durations == sorted(durations)

    @pytest.mark.parametrize("seconds", [0.0, -1.0])
    async def test_no_time_needs_no_wait(self, clock: Clock, seconds: float) -> None:
        """Sleeping for nothing, or less, returns at the next turn of the event loop."""
        async with asyncio.timeout(10):
            await clock.sleep(seconds)
            await clock.sleep_wall(seconds)
