"""Claims calls in order of urgency and runs them on the engine.

The head of the queue goes first. While the engine has no room for it, smaller calls behind it may
start, but only so often: then it blocks them, because under load the large call would otherwise
wait for ever. Only an engine that runs nothing is given a call it says it has no room for, so that
a call too large fails instead of blocking the queue. A call whose query can no longer be in time
goes behind all that still can, when its turn comes.
"""

import asyncio
from contextlib import aclosing

import msgspec
import structlog

from services.worker.bells import heard_within
from services.worker.calls import Cut, HeldCall, Place
from services.worker.life import End, Life
from services.worker.messages import Verdict, check_result, verdict_if_hopeless
from services.worker.params import MAX_PASSES
from services.worker.vitals import STORE
from shared.errors import (
    CallRefused,
    EngineDead,
    EngineUnavailable,
    Fenced,
    GenerationFailed,
    InstanceLost,
    StateUnavailable,
)
from shared.ports import Chunk, Engine, Finished, FirstToken, StateStore

IDLE_S = 1.0
log = structlog.get_logger(__name__)


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A generation without a result.

    Attributes:
        reason: Constant word.
        detail: One sentence for people.
        blames_instance: Whether the instance was lost, so that the call's own tries do not count.
        is_final: Whether no other try would help.
    """

    reason: str
    detail: str
    blames_instance: bool = False
    is_final: bool = False

    @property
    def is_unavailable(self) -> bool:
        """Whether the engine took no call at all."""
        return self.reason == EngineUnavailable.reason


class Breaker:
    """Slows an engine down that fails call after call, so that it does not eat the queue.

    After `threshold` failures in a row one call at a time is tried, with pauses that double.

    Args:
        threshold: Failures in a row that are tolerated.
        first_pause_s: First pause, wall seconds.
        longest_pause_s: Longest pause, wall seconds.
    """

    def __init__(self, threshold: int, first_pause_s: float, longest_pause_s: float) -> None:
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._num_failures = 0
        self._closed_until_s = 0.0

    def succeeded(self) -> None:
        """Note a result."""
        self._num_failures = 0

    def failed(self, now_s: float) -> None:
        """Note a failure at a monotonic instant, wall seconds."""
        self._num_failures += 1
        doublings = self._num_failures - self._threshold
        if doublings >= 0:
            pause_s = min(self._longest_pause_s, self._first_pause_s * 2 ** min(doublings, 16))
            self._closed_until_s = now_s + pause_s

    def allows(self, num_running: int, now_s: float) -> bool:
        """Return whether a further call may start."""
        if self._num_failures < self._threshold:
            return True
        return num_running == 0 and now_s >= self._closed_until_s


class Runner:
    """Feeds the engine.

    Args:
        life: Whose calls.
        engine: What runs them.
        store: Takes streamed chunks.
    """

    def __init__(self, life: Life, engine: Engine, store: StateStore) -> None:
        self._life = life
        self._engine = engine
        self._store = store
        params = life.params
        self._breaker = Breaker(
            params.failure_threshold, params.failure_pause_s, params.longest_failure_pause_s
        )
        self._blocked: list[HeldCall] = []
        self._blocked_since = 0
        self.is_taking = True

    async def claim_forever(self) -> None:
        """Start calls whenever there is one and the engine has room; runs until cancelled."""
        life = self._life
        while True:
            life.vitals.beat("claim")
            try:
                while self._has_slot() and await self._start_next():
                    pass
            except StateUnavailable as exc:  # a claim whose reply was lost is released by upkeep
                life.vitals.trouble(STORE, exc)
            except Fenced:
                life.over.set(End.FENCED)
                return
            is_held_up = life.book.num_waiting > 0
            await heard_within(life.bells.claim, life.params.recheck_s if is_held_up else IDLE_S)

    async def watch_room(self) -> None:
        """Try again whenever the engine's batch has changed; runs until cancelled."""
        while True:
            await self._engine.room_changed()
            if self._blocked:
                self._life.bells.claim.set()

    def abort_running(self) -> None:
        """Cut off what runs, because the worker leaves."""
        for held in self._life.book.at(Place.RUNNING):
            cut_off(held, Cut.LEAVING)

    def _has_slot(self) -> bool:
        life, book = self._life, self._life.book
        if not self.is_taking or life.over.end is not End.NONE:
            return False
        if life.vitals.is_troubled(STORE):
            return False
        if book.num_waiting == 0 or book.num_running >= life.params.capacity:
            return False
        if self._is_head_blocked():
            return False
        return self._breaker.allows(book.num_running, life.clock.monotonic_s())

    def _is_head_blocked(self) -> bool:
        """Return whether the most urgent calls are known, and the engine has room for none yet."""
        if not self._blocked or self._life.book.num_taken != self._blocked_since:
            return False
        return not any(
            held.place is not Place.WAITING or self._has_room_for(held) for held in self._blocked
        )

    def _has_room_for(self, held: HeldCall) -> bool:
        return self._life.book.num_running == 0 or self._engine.has_room_for(held.call)

    async def _start_next(self) -> bool:
        """Claim the most urgent call there is room for, and start it; False when there is none."""
        life = self._life
        passed: list[HeldCall] = []
        async with life.index_lock:
            started = await self._claim_into(passed)
            for held in passed:
                await life.index.release(held.request_id, held.token)
        if started is None:
            self._blocked, self._blocked_since = passed, life.book.num_taken
            return False
        self._blocked = []
        # The engine counts a call from its generation's first step on, which comes two turns
        # later; asking for room before that would let in too many.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return True

    async def _claim_into(self, passed: list[HeldCall]) -> HeldCall | None:
        """Claim until one call was started; those without room are left claimed in `passed`."""
        life = self._life
        while self.is_taking:
            entries = await life.index.claim(life.epoch, limit=1, now_s=life.clock.now_s())
            if not entries:
                return None
            held = life.book.get(entries[0].request_id)
            if held is None or held.place is not Place.WAITING or held.token != entries[0].token:
                await life.index.ack(entries[0].request_id, entries[0].token)
            elif await self._is_out_of_turn(held):
                continue
            elif self.is_taking and self._has_room_for(held):
                for other in passed:
                    other.passes += 1
                life.book.start(held, life.clock.now_s())
                life.pulse.started(life.book.num_running)
                life.spawn(self._run(held), name=f"call-{held.request_id}")
                return held
            else:
                passed.append(held)
                if len(passed) > life.params.look_past or held.passes >= MAX_PASSES:
                    return None
        return None

    async def _is_out_of_turn(self, held: HeldCall) -> bool:
        """End a claimed call that is far too late, or put it behind those that can be in time."""
        life, now_s = self._life, self._life.clock.now_s()
        hopeless = verdict_if_hopeless(held, now_s, life.params.evict_after_s)
        if hopeless is not None:
            life.endings.stop_counting(held)
            life.spawn(life.endings.answer(held, hopeless), name=f"end-{held.request_id}")
            return True
        if not held.is_too_late(now_s):
            return False
        held.is_demoted = True
        life.metrics.demoted.add()
        await life.index.ack(held.request_id, held.token)
        await life.index.add([held.entry()])  # upkeep adds it, should this be lost
        return True

    async def _run(self, held: HeldCall) -> None:
        life = self._life
        life.metrics.started.add()
        life.bells.ring()
        async with asyncio.TaskGroup() as group:
            generation = group.create_task(self._generate(held), name=f"generate-{held.request_id}")
            held.abort = generation.cancel
            if held.cut is not None:
                generation.cancel()
        held.abort = None
        life.endings.stop_counting(held)
        result = self._cut_result(held) if generation.cancelled() else generation.result()
        self._judge(result)
        await self._settle(held, result)

    def _cut_result(self, held: HeldCall) -> Failed:
        if held.cut is Cut.CANCELLED:
            return Failed(reason="cancelled", detail="cancelled", blames_instance=True)
        is_dead = self._life.over.is_engine_dead
        reason = EngineDead.reason if is_dead else InstanceLost.reason
        return Failed(reason=reason, detail="its instance left", blames_instance=True)

    def _judge(self, result: Finished | Failed) -> None:
        if isinstance(result, Finished):
            self._breaker.succeeded()
            self._life.pulse.succeeded()
        elif not (result.blames_instance or result.is_final):
            self._life.pulse.failed(result.detail if result.is_unavailable else "")
            if not result.is_unavailable:  # else the adapter makes pauses of its own
                self._breaker.failed(self._life.clock.monotonic_s())

    async def _generate(self, held: HeldCall) -> Finished | Failed:
        engine_id = f"{held.request_id}:{held.token.attempt}"
        try:
            async with (
                asyncio.timeout(self._stall_limit_s(held)),
                aclosing(self._engine.generate(held.call, engine_id)) as events,
            ):
                async for event in events:
                    self._life.pulse.progressed()
                    if isinstance(event, Finished):
                        check_result(event)
                        return event
                    if isinstance(event, FirstToken):
                        held.first_token_at_s = self._life.clock.now_s()
                        self._life.bells.claim.set()
                    else:
                        await self._forward(held, event)
        except TimeoutError:
            return Failed(reason="stalled", detail="the engine gave no result in time")
        except GenerationFailed as exc:
            is_final = isinstance(exc, CallRefused)
            return Failed(reason=exc.reason, detail=str(exc), is_final=is_final)
        except EngineDead as exc:
            self._life.over.set(End.ENGINE_DEAD)
            return Failed(reason=exc.reason, detail=str(exc), blames_instance=True)
        except Exception as exc:  # an adapter's bug on one call must not take down the others
            log.exception("engine_raised", request_id=held.request_id)
            return Failed(reason=GenerationFailed.reason, detail=type(exc).__name__)
        return Failed(reason=GenerationFailed.reason, detail="the engine ended without a result")

    def _stall_limit_s(self, held: HeldCall) -> float:
        """Return how long a generation may take, wall seconds."""
        params = self._life.params
        mesh_s = max(params.stall_floor_s, params.stall_factor * held.call.t_comp_s)
        return max(params.stall_wall_s, mesh_s / self._life.clock.time_scale)

    async def _forward(self, held: HeldCall, chunk: Chunk) -> None:
        """Stream a chunk; after one that was lost none follows, the outcome has the whole text."""
        if not held.call.request.stream or held.has_lost_chunk:
            return
        index = held.num_forwarded
        held.num_forwarded += 1
        try:
            await self._store.append_chunk(held.request_id, held.token.attempt, index, chunk.text)
        except StateUnavailable as exc:
            held.has_lost_chunk = True
            self._life.vitals.trouble(STORE, exc)

    async def _settle(self, held: HeldCall, result: Finished | Failed) -> None:
        life = self._life
        tombstone = life.tombstones.find(held.query_id, held.request_id)
        if tombstone is not None:
            verdict = Verdict(kind="cancelled", reason="cancelled", detail=tombstone.reason)
        elif isinstance(result, Finished):
            verdict = Verdict(kind="completed", finished=result)
        elif self._may_try_again(held, result):
            has_failed = result.reason != InstanceLost.reason  # else it was only cut off
            await life.endings.hand_back(
                held, result.reason, failed=has_failed, counts=not result.is_unavailable
            )
            return
        else:
            verdict = Verdict(kind="failed", reason=result.reason, detail=result.detail)
        await life.endings.answer(held, verdict)

    def _may_try_again(self, held: HeldCall, failed: Failed) -> bool:
        if held.num_forwarded > 0 or failed.is_final:
            return False
        if failed.reason == InstanceLost.reason:
            return True
        params, now_s = self._life.params, self._life.clock.now_s()
        if failed.is_unavailable:  # no try of this call; the server may be back in time
            return now_s < held.call.deadline_s
        if held.request.failures + 1 >= params.max_attempts:
            return False
        return failed.blames_instance or now_s < held.call.deadline_s + params.evict_after_s


def cut_off(held: HeldCall, cut: Cut) -> None:
    """Cut off a running call's generation."""
    if held.cut is None:
        held.cut = cut
        if held.abort is not None:
            held.abort()
