"""Moves waiting calls away: when the worker leaves, or when its engine gets nowhere."""

import asyncio

import structlog

from services.worker.calls import HeldCall, Place
from services.worker.life import Life
from shared.scheduling.outliers import OutlierRules, is_stalled

HAND_BACKS_AT_ONCE = 64
log = structlog.get_logger(__name__)


async def hand_back_waiting(life: Life, cause: str) -> int:
    """Put every waiting call back on `stage-requests`, most urgent first; returns how many.

    Returns when they are taken out of the queue; what follows runs beside.
    """
    async with life.index_lock:  # no claim is half done
        waiting = sorted(life.book.at(Place.WAITING), key=lambda held: held.score)
        for held in waiting:
            life.endings.stop_counting(held)
    gate = asyncio.Semaphore(HAND_BACKS_AT_ONCE)

    async def hand_back(held: HeldCall) -> None:
        async with gate:
            await life.endings.hand_back(held, cause)

    for held in waiting:
        life.spawn(hand_back(held), name=f"hand-back-{held.request_id}")
    return len(waiting)


class SickWatch:
    """Moves the waiting calls, once each time the engine begins to get nowhere.

    Dispatchers see the same signs in the instance's state and give the calls to others, or, where
    most instances seem sick, here again.

    Args:
        life: Whose calls.
        rules: When an engine gets nowhere.
    """

    def __init__(self, life: Life, rules: OutlierRules) -> None:
        self._life = life
        self._rules = rules
        self._is_sick = False

    async def watch_forever(self) -> None:
        """Look every little while; runs until cancelled."""
        while True:
            await self._life.clock.sleep_wall(self._life.params.heal_s)
            await self.look()

    async def look(self) -> None:
        """Look once."""
        was_sick, self._is_sick = self._is_sick, self._gets_nowhere()
        if self._is_sick and not was_sick:
            num_moved = await hand_back_waiting(self._life, "sick")
            pulse = self._life.pulse
            log.warning("engine_gets_nowhere", failures=pulse.failures, num_moved=num_moved)

    def _gets_nowhere(self) -> bool:
        pulse, book = self._life.pulse, self._life.book
        num_held = book.num_running + book.num_waiting
        mean_s = book.backlog_s / num_held if num_held else 0.0
        stalled_s = pulse.stalled_s(book.num_running)
        return pulse.failures >= self._rules.failures or is_stalled(stalled_s, mean_s, self._rules)
