"""Leaves the mesh in order: on SIGTERM, or because the engine died.

Unready, then nothing new is started; waiting calls are handed back; running ones finish within a
bound, or are cut off and handed back; late arrivals are forwarded until the topic is quiet; then
offsets are committed and the instance says `gone`. Where that does not succeed in time it does not
say so: what is uncommitted is then recovered as after a crash.
"""

import asyncio

import structlog

from services.worker.bells import heard_within
from services.worker.intake import Intake
from services.worker.life import End, Life
from services.worker.moving import hand_back_waiting
from services.worker.running import Runner
from services.worker.state_report import StateReporter
from services.worker.upkeep import Upkeep
from services.worker.vitals import BROKER
from shared.errors import BrokerUnavailable
from shared.ports import Consumer

QUIET_CHECK_S = 0.05
EVENTS_S = 1.0
log = structlog.get_logger(__name__)


class Drain:
    """Ends a life in order.

    Args:
        life: Which life.
        intake: Takes late arrivals.
        runner: Runs calls.
        reporter: Announces what happens.
        upkeep: Commits.
        consumer: Tells whether the topic is read to its end.
    """

    def __init__(
        self,
        life: Life,
        *,
        intake: Intake,
        runner: Runner,
        reporter: StateReporter,
        upkeep: Upkeep,
        consumer: Consumer,
    ) -> None:
        self._life = life
        self._intake = intake
        self._runner = runner
        self._reporter = reporter
        self._upkeep = upkeep
        self._consumer = consumer

    async def leave(self) -> bool:
        """Hand everything on, within the bounds; returns whether nothing is left."""
        life, params = self._life, self._life.params
        started_at_s = life.clock.monotonic_s()
        life.vitals.block("drain", "draining")
        self._reporter.phase = "draining"
        self._runner.is_taking = False
        self._intake.is_leaving = True
        life.bells.ring()
        await hand_back_waiting(life, self._cause())
        has_finished = await self._running_finished()
        if life.over.end is End.FENCED:  # others have these calls
            life.cancel_all()
            return False
        if not has_finished:
            self._runner.abort_running()
        try:
            async with asyncio.timeout(params.abort_s):
                left_s = params.linger_s - (life.clock.monotonic_s() - started_at_s)
                await life.clock.sleep_wall(max(0.0, left_s))
                await self._quiet()
        except TimeoutError:
            log.warning("drain_incomplete", num_left=len(life.book))
        return await self._close_books()

    def _cause(self) -> str:
        return "engine_dead" if self._life.over.end is End.ENGINE_DEAD else "drain"

    async def _running_finished(self) -> bool:
        life = self._life
        give_up_at_s = life.clock.monotonic_s() + life.params.drain_s
        while life.book.num_running > 0:
            if life.over.end > End.STOPPED or life.clock.monotonic_s() >= give_up_at_s:
                return False
            await heard_within(life.bells.left, QUIET_CHECK_S)
        return True

    async def _quiet(self) -> None:
        """Return when nothing is held and the topic is read to its end."""
        life = self._life
        while life.over.end is not End.FENCED:
            if len(life.book) == 0 and self._intake.num_burials == 0 and await self._is_read():
                return
            await heard_within(life.bells.left, QUIET_CHECK_S)

    async def _is_read(self) -> bool:
        try:
            ends = await self._consumer.end_offsets()
            for tp, end in ends.items():
                if await self._consumer.position(tp) < end:
                    return False
        except BrokerUnavailable as exc:
            self._life.vitals.trouble(BROKER, exc)
            return False
        return True

    async def _close_books(self) -> bool:
        """Commit and say goodbye, if there is nothing left and nobody has taken over."""
        life = self._life
        is_empty = len(life.book) == 0 and self._intake.num_burials == 0
        try:
            async with asyncio.timeout(life.params.abort_s):
                is_committed = await self._upkeep.commit()
                await life.endings.events_sent()
                if not (is_empty and is_committed) or life.over.end is End.FENCED:
                    return False
                self._reporter.phase = "gone"
                await self._reporter.report()
        except (TimeoutError, BrokerUnavailable) as exc:
            log.warning("goodbye_failed", error=str(exc))
            return False
        return True
