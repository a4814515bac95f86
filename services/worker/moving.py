"""Moves waiting calls away: when the worker leaves, or when its engine gets nowhere."""

import asyncio
from collections.abc import Callable

import structlog

from services.worker.calls import HeldCall, Place
from services.worker.life import Life
from services.worker.messages import Verdict
from shared.errors import EngineUnavailable
from shared.scheduling.outliers import OutlierRules, is_stalled

HAND_BACKS_AT_ONCE = 64
Choose = Callable[[list[HeldCall]], list[HeldCall]]
log = structlog.get_logger(__name__)


async def hand_back_waiting(
    life: Life, cause: str, choose: Choose = lambda waiting: waiting
) -> list[HeldCall]:
    """Put waiting calls back on `stage-requests`, most urgent first; returns which.

    Returns when they are taken out of the queue; what follows runs beside.

    Args:
        life: Whose calls.
        cause: Constant word.
        choose: Picks among the waiting calls, which come in order of urgency; by default all.
    """
    waiting = await _take_out(life, choose)
    gate = asyncio.Semaphore(HAND_BACKS_AT_ONCE)

    async def hand_back(held: HeldCall) -> None:
        async with gate:
            await life.endings.hand_back(held, cause)

    for held in waiting:
        life.spawn(hand_back(held), name=f"hand-back-{held.request_id}")
    return waiting


async def _take_out(life: Life, choose: Choose) -> list[HeldCall]:
    """Take some of the waiting calls out of the queue; what follows is paperwork."""
    async with life.index_lock:  # no claim is half done
        chosen = choose(sorted(life.book.at(Place.WAITING), key=lambda held: held.score))
        for held in chosen:
            life.endings.stop_counting(held)
    return chosen


class SickWatch:
    """Moves the waiting calls while the engine gets nowhere, each call once.

    Dispatchers see the same signs in the instance's state and give the calls to others, or, where
    most instances seem sick, here again. A failing engine keeps the most urgent one, to be tried.
    Where it takes no call at all, those that came back and are late by now are told so: each try
    takes seconds, and they would hear of it one after the other.

    Args:
        life: Whose calls.
        rules: When an engine gets nowhere.
    """

    def __init__(self, life: Life, rules: OutlierRules) -> None:
        self._life = life
        self._rules = rules
        self._moved: set[str] = set()

    async def watch_forever(self) -> None:
        """Look every little while; runs until cancelled."""
        while True:
            await self._life.clock.sleep_wall(self._life.params.heal_s)
            await self.look()

    async def look(self) -> None:
        """Look once."""
        if not self._gets_nowhere():
            self._moved.clear()
            return
        await self._give_up_late()
        moved = await hand_back_waiting(self._life, "sick", self._movable)
        self._moved.update(held.request_id for held in moved)
        if moved:
            failures = self._life.pulse.failures
            log.warning("engine_gets_nowhere", failures=failures, num_moved=len(moved))

    async def _give_up_late(self) -> None:
        life, detail = self._life, self._life.pulse.unavailable
        if not detail:
            return
        verdict = Verdict(kind="failed", reason=EngineUnavailable.reason, detail=detail)
        for held in await _take_out(life, self._late):
            life.spawn(life.endings.answer(held, verdict), name=f"end-{held.request_id}")

    def _late(self, waiting: list[HeldCall]) -> list[HeldCall]:
        now_s = self._life.clock.now_s()
        return [
            held
            for held in waiting
            if held.request_id in self._moved and now_s >= held.call.deadline_s
        ]

    def _movable(self, waiting: list[HeldCall]) -> list[HeldCall]:
        has_other = self._life.book.num_running > 0
        others = waiting if has_other else waiting[1:]
        return [held for held in others if held.request_id not in self._moved]

    def _gets_nowhere(self) -> bool:
        pulse, book = self._life.pulse, self._life.book
        num_held = book.num_running + book.num_waiting
        mean_s = book.backlog_s / num_held if num_held else 0.0
        stalled_s = pulse.stalled_s(book.num_running)
        return pulse.failures >= self._rules.failures or is_stalled(stalled_s, mean_s, self._rules)
