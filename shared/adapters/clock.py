"""Clocks: the system's, corrected to the broker's time, and one that tests move by hand.

Mesh seconds are the broker's wall time multiplied by the time scale. `SystemClock` anchors the
wall clock once and counts on with the monotonic one, so a jump of the host's clock moves nothing;
it learns the offset to the broker's clock from produce acknowledgements and slews towards it.
Invariant: `now_s` never decreases within a process.
"""

import asyncio
import heapq
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable

SLEW_RATE = 0.5
STEP_S = 1.0
APPEND_RESOLUTION_S = 0.001
SLOT_S = 0.1
WINDOW_SAMPLES = 64
WINDOW_S = 300.0


class SkewEstimate:
    """The broker's clock minus this host's, from bracketed observations.

    An append time lies between sending and acknowledgement, so each observation bounds the
    offset; its half-width is half the round trip plus half the resolution of append times. Of
    each tenth of a second the tightest observation is kept; the estimate is the median of the
    tightest quarter of the window, so neither a slow acknowledgement nor one broker with a
    deviating clock moves it.
    """

    def __init__(self) -> None:
        self._window: deque[tuple[float, float, float]] = deque(maxlen=WINDOW_SAMPLES)
        self._slot: tuple[float, float, float] | None = None
        self.offset_s = 0.0
        self.bound_s = math.inf

    def observe(self, append_unix_s: float, sent_unix_s: float, acked_unix_s: float) -> bool:
        """Take one observation; returns whether the estimate changed.

        Args:
            append_unix_s: Append time, Unix seconds on the broker's clock, cut to milliseconds.
            sent_unix_s: When the record was sent, Unix seconds on this host's anchored clock.
            acked_unix_s: When it was acknowledged, same clock.
        """
        values = (append_unix_s, sent_unix_s, acked_unix_s)
        if not all(map(math.isfinite, values)) or append_unix_s <= 0 or acked_unix_s < sent_unix_s:
            return False
        half_width_s = (acked_unix_s - sent_unix_s + APPEND_RESOLUTION_S) / 2
        middle_s = append_unix_s + APPEND_RESOLUTION_S / 2 - (sent_unix_s + acked_unix_s) / 2
        sample = (half_width_s, middle_s, acked_unix_s)
        if self._slot is None or acked_unix_s - self._slot[2] >= SLOT_S:
            self._slot = sample
            self._window.append(sample)
        elif sample[0] < self._slot[0]:
            self._slot = (half_width_s, middle_s, self._slot[2])
            self._window[-1] = self._slot
        else:
            return False
        self._estimate(acked_unix_s)
        return True

    def _estimate(self, now_unix_s: float) -> None:
        while now_unix_s - self._window[0][2] > WINDOW_S:
            self._window.popleft()
        tightest = sorted(self._window)[: max(1, (len(self._window) + 3) // 4)]
        self.offset_s = statistics.median(middle_s for _, middle_s, _ in tightest)
        self.bound_s = tightest[-1][0]


class SystemClock:
    """The clock of a running service.

    Args:
        time_scale: Mesh seconds per wall second, > 0; 1 in production.
        shift_s: Added to the wall clock, wall seconds: a host whose clock is wrong, for chaos runs.
        wall: Source of Unix seconds; read once.
        monotonic: Source of monotonic seconds.
    """

    def __init__(
        self,
        time_scale: float = 1.0,
        *,
        shift_s: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (math.isfinite(time_scale) and time_scale > 0):
            raise ValueError(f"time_scale must be a number above 0, not {time_scale}")
        self._time_scale = time_scale
        self._monotonic = monotonic
        self._anchor_s = wall() + shift_s - monotonic()
        self._estimate = SkewEstimate()
        self._offset_s = 0.0
        self._offset_at_s = monotonic()
        self._last_unix_s = -math.inf

    @property
    def time_scale(self) -> float:
        """Mesh seconds per wall second."""
        return self._time_scale

    @property
    def skew_s(self) -> float:
        """The broker's clock minus this host's, seconds; 0 until something was learned."""
        return self._estimate.offset_s

    @property
    def skew_bound_s(self) -> float:
        """How far `skew_s` may be wrong, seconds; infinite until something was learned."""
        return self._estimate.bound_s

    def now_s(self) -> float:
        """Return the current instant on the mesh clock, seconds."""
        mono_s = self._monotonic()
        unix_s = self._anchor_s + mono_s + self._applied_s(mono_s)
        # Rounding may lose the last bit while the clock slews back.
        self._last_unix_s = max(self._last_unix_s, unix_s)
        return self._last_unix_s * self._time_scale

    def wall_unix_s(self) -> float:
        """Return this host's wall clock as anchored at start, Unix seconds; it never jumps."""
        return self._anchor_s + self._monotonic()

    def monotonic_s(self) -> float:
        """Return wall seconds on a clock that never jumps."""
        return self._monotonic()

    def mesh_s(self, wall_unix_s: float) -> float:
        """Return the mesh instant of a broker append time (Unix seconds)."""
        return wall_unix_s * self._time_scale

    def observe_append(self, append_unix_s: float, sent_s: float, acked_s: float) -> None:
        """Learn the offset to the broker's clock; senseless observations are ignored.

        The clock then slews at half speed, so that it never stands still nor runs back; it steps
        only forward, and only over more than a second. Before the first reading it steps freely.
        """
        anchor_s = self._anchor_s
        mono_s = self._monotonic()
        applied_s = self._applied_s(mono_s)
        if not self._estimate.observe(append_unix_s, anchor_s + sent_s, anchor_s + acked_s):
            return
        unread = self._last_unix_s == -math.inf
        if unread or self._estimate.offset_s - applied_s > STEP_S:
            applied_s = self._estimate.offset_s
        self._offset_s = applied_s
        self._offset_at_s = mono_s

    async def sleep(self, mesh_seconds: float) -> None:
        """Wait for a duration given in mesh seconds."""
        await asyncio.sleep(mesh_seconds / self._time_scale)

    async def sleep_wall(self, seconds: float) -> None:
        """Wait for a duration given in wall seconds."""
        await asyncio.sleep(seconds)

    def _applied_s(self, mono_s: float) -> float:
        """Return the part of the learned offset that is applied by now."""
        reach_s = SLEW_RATE * (mono_s - self._offset_at_s)
        missing_s = self._estimate.offset_s - self._offset_s
        return self._offset_s + max(-reach_s, min(reach_s, missing_s))


class ManualClock:
    """A clock that stands still until a test moves it.

    Args:
        time_scale: Mesh seconds per wall second.
        start_unix_s: Wall clock at the start, Unix seconds.
    """

    SETTLE_TURNS = 32

    def __init__(self, time_scale: float = 1.0, *, start_unix_s: float = 1_700_000_000.0) -> None:
        self._time_scale = time_scale
        self._start_unix_s = start_unix_s
        self._elapsed_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self.observed: list[tuple[float, float, float]] = []

    @property
    def time_scale(self) -> float:
        """Mesh seconds per wall second."""
        return self._time_scale

    @property
    def sleeping(self) -> int:
        """How many tasks sleep on this clock."""
        return sum(not future.done() for _, _, future in self._sleepers)

    def now_s(self) -> float:
        """Return the current instant on the mesh clock, seconds."""
        return self.wall_unix_s() * self._time_scale

    def wall_unix_s(self) -> float:
        """Return the wall clock, Unix seconds."""
        return self._start_unix_s + self._elapsed_s

    def monotonic_s(self) -> float:
        """Return wall seconds since the start."""
        return self._elapsed_s

    def mesh_s(self, wall_unix_s: float) -> float:
        """Return the mesh instant of a broker append time (Unix seconds)."""
        return wall_unix_s * self._time_scale

    def observe_append(self, append_unix_s: float, sent_s: float, acked_s: float) -> None:
        """Keep the observation in `observed`; the clock stays where it is."""
        self.observed.append((append_unix_s, sent_s, acked_s))

    async def sleep(self, mesh_seconds: float) -> None:
        """Wait until the clock was moved by a duration given in mesh seconds."""
        await self.sleep_wall(mesh_seconds / self._time_scale)

    async def sleep_wall(self, seconds: float) -> None:
        """Wait until the clock was moved by a duration given in wall seconds."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed_s + seconds, next(self._order), future))
        await future

    async def advance(self, mesh_seconds: float) -> None:
        """Move the clock; sleepers wake one by one, in order of due time, then of arrival.

        Each sees the instant it waited for and may sleep again within the same move. Other tasks
        get `SETTLE_TURNS` turns of the event loop before, between and after.

        Args:
            mesh_seconds: How far, mesh seconds, >= 0.
        """
        if mesh_seconds < 0:
            raise ValueError("time does not run back")
        target_s = self._elapsed_s + mesh_seconds / self._time_scale
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= target_s:
            due_s, _, future = heapq.heappop(self._sleepers)
            if future.done():
                continue
            self._elapsed_s = max(self._elapsed_s, due_s)
            future.set_result(None)
            await self.settle()
        self._elapsed_s = target_s
        await self.settle()

    async def settle(self) -> None:
        """Let other tasks run without moving the clock."""
        for _ in range(self.SETTLE_TURNS):
            await asyncio.sleep(0)
