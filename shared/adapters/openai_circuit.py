"""Leaves a server alone that fails call after call, and lets the next ones wait until it is well.

A call that came while the server is left alone would gain nothing by failing at once: it would use
up its attempts within milliseconds, on a server that is well again a second later.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog

from shared.errors import CallRefused, EngineUnavailable, GenerationFailed
from shared.ports import Clock

log = structlog.get_logger(__name__)
SHORTEST_SLEEP_S = 0.001
"""So that a rest of a pause too small to add to the clock's time cannot be slept for ever."""


class Turn(msgspec.Struct):
    """One call that was let in.

    Attributes:
        is_trial: Whether it tries whether the server is well, and the others wait for it.
    """

    is_trial: bool


class Circuit:
    """Opens after so many failures in a row; then one call at a time tries, between pauses.

    Args:
        threshold: Failures in a row that are tolerated, less one.
        first_pause_s: First pause, wall seconds.
        longest_pause_s: Longest pause, wall seconds.
        clock: For its monotonic time, and to wait.
        name: Of the instance, for the log.
    """

    def __init__(
        self,
        threshold: int,
        first_pause_s: float,
        longest_pause_s: float,
        clock: Clock,
        name: str = "",
    ) -> None:
        self._name = name
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._num_failures = 0
        self._num_openings = 0
        self._open_until_s = 0.0
        self._is_trying = False
        self._last_error = ""
        self._changed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is known to be wrong."""
        return self._num_failures < self._threshold

    def allows(self) -> bool:
        """Return whether a call would be let in now, without waiting."""
        return self.is_closed or (not self._is_trying and self._pause_s() <= 0)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Wait until a call is let in; how the block ends tells how the server is.

        `token_seen` and `answered` tell earlier: a generator is left at its last event by those
        who want no more, and never gets to its end.

        While the circuit is open, one call tries after the pause; the others wait until it has a
        token or has failed, so the wait is at most the rest of the pause and that time. A block
        that is left early (cancelled, closed) shows nothing: the next one waiting tries.

        Raises:
            EngineUnavailable: The call that tried has failed; says how.
        """
        turn = Turn(is_trial=await self._enter())
        try:
            yield turn
        except CallRefused:  # it lives, and knows what it cannot do
            self.answered()
            raise
        except GenerationFailed as exc:
            self._count_failure(str(exc), is_trial=turn.is_trial)
            raise
        else:
            self.answered()
        finally:
            self._end_trial(turn)

    def token_seen(self, turn: Turn) -> None:
        """Note a call's first token: it need not keep the others waiting for its whole answer.

        Until it has ended, one more failure leaves the server alone again.
        """
        if turn.is_trial:
            self._close(self._threshold - 1)
            self._end_trial(turn)

    def answered(self) -> None:
        """Note that a call was answered."""
        self._close(0)

    async def _enter(self) -> bool:
        """Wait for a place; returns whether the call is the one that tries."""
        num_openings = self._num_openings
        while not self.is_closed:
            if self._num_openings > num_openings:
                raise EngineUnavailable(
                    f"the server fails: {self._last_error}; "
                    f"it is left alone for {max(0.0, self._pause_s()):.1f} s"
                )
            if self.allows():
                self._is_trying = True
                return True
            await self._wait()
        return False

    async def _wait(self) -> None:
        """Wait for the pause's end, or for the outcome of the call that tries."""
        if self._is_trying:
            await self._changed.wait()
            return
        pause_s = max(SHORTEST_SLEEP_S, self._pause_s())
        waits = (
            asyncio.create_task(self._clock.sleep_wall(pause_s), name="circuit-pause"),
            asyncio.create_task(self._changed.wait(), name="circuit-changed"),
        )
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _pause_s(self) -> float:
        return self._open_until_s - self._clock.monotonic_s()

    def _close(self, num_failures: int) -> None:
        if not self.is_closed:
            log.warning("server_is_well_again", instance_id=self._name)
        self._num_failures = num_failures
        self._ring()

    def _end_trial(self, turn: Turn) -> None:
        if turn.is_trial:
            turn.is_trial = self._is_trying = False
            self._ring()

    def _count_failure(self, error: str, *, is_trial: bool) -> None:
        self._last_error = error
        if not (is_trial or self.is_closed):
            return  # it was let in before the circuit opened: no news, and no longer pause
        self._num_failures += 1
        doublings = self._num_failures - self._threshold
        if doublings >= 0:
            pause_s = min(self._longest_pause_s, self._first_pause_s * 2 ** min(doublings, 16))
            self._open_until_s = self._clock.monotonic_s() + pause_s
            self._num_openings += 1
            log.warning(
                "server_left_alone", instance_id=self._name, error=error, pause_s=round(pause_s, 1)
            )

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
