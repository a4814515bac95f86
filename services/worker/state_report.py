"""Tells the mesh what this instance is doing.

A report goes out on every change, coalesced to 50 ms, and as a heartbeat once a second. It names
the last offset contained in its numbers, so a dispatcher adds exactly what it sent after that.
"""

import asyncio

from services.worker.bells import heard_within
from services.worker.life import Life
from services.worker.vitals import BROKER
from shared.contracts.messages import InstancePhase, InstanceState
from shared.contracts.topics import INSTANCE_STATES
from shared.errors import BrokerUnavailable
from shared.ports import Engine
from shared.runtime.publishing import Publisher


class StateReporter:
    """Publishes the states of one life.

    Args:
        life: What is reported.
        engine: For its description and memory in use.
        publisher: How.
    """

    def __init__(self, life: Life, engine: Engine, publisher: Publisher) -> None:
        self._life = life
        self._engine = engine
        self._publisher = publisher
        self._seq = 0
        self._turn = asyncio.Lock()
        self.phase: InstancePhase = "serving"

    async def report_forever(self) -> None:
        """Report changes and heartbeats; runs until cancelled."""
        life = self._life
        while True:
            life.vitals.beat("report")
            try:
                await self.report()
            except BrokerUnavailable as exc:
                life.vitals.trouble(BROKER, exc)
            await life.clock.sleep_wall(life.params.coalesce_s)
            await heard_within(life.bells.report, life.params.heartbeat_s)

    async def report(self) -> None:
        """Publish the present state, once.

        Raises:
            BrokerUnavailable: Not acknowledged.
        """
        async with self._turn:
            state = self._snapshot()
            await self._publisher.once(INSTANCE_STATES, state, key=state.instance_id)

    def _snapshot(self) -> InstanceState:
        life, book = self._life, self._life.book
        self._seq += 1
        life.metrics.waiting.set(book.num_waiting)
        life.metrics.running.set(book.num_running)
        life.metrics.backlog.set(book.backlog_s)
        return InstanceState(
            instance_id=life.params.instance_id,
            phase=self.phase,
            epoch=life.epoch,
            seq=self._seq,
            nonce=life.nonce,
            spec=self._engine.spec,
            at_s=max(0.0, life.clock.now_s()),
            accounted_offset=book.accounted_offset,
            num_waiting=book.num_waiting,
            num_running=book.num_running,
            backlog_s=max(0.0, book.backlog_s),
            head_score=book.head_score(),
            backlog_tokens=book.backlog_tokens,
            kv_used_tokens=self._engine.kv_used_tokens(),
            capacity=life.params.capacity,
            queue_bound=life.params.queue_bound,
            foreign_s=self._engine.foreign_s(),
            failures_in_a_row=life.pulse.failures,
            stalled_s=life.pulse.stalled_s(book.num_running),
        )


def begin_state(
    engine: Engine, *, instance_id: str, capacity: int, queue_bound: int, nonce: str, at_s: float
) -> InstanceState:
    """Return the record that begins a life; its offset becomes the epoch."""
    return InstanceState(
        instance_id=instance_id,
        phase="begin",
        nonce=nonce,
        spec=engine.spec,
        at_s=max(0.0, at_s),
        capacity=capacity,
        queue_bound=queue_bound,
        reset_prefixes=True,
    )
