"""The tables a dispatcher follows from their beginning: instance states, control, cancellations.

Each is read to where it ended at the start before the first call is assigned. A record that cannot
be read is counted, logged and skipped: every dispatcher reads these topics, so burying it would
bury it many times, and the table's last good value stays in force.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

import structlog

from services.dispatcher.control import Cancellations, Control
from services.dispatcher.fleet_state import FleetState
from services.dispatcher.gate import Gate
from services.dispatcher.peers import PROBE_KEY, Peers
from shared.contracts.codec import decode, decode_any
from shared.contracts.messages import (
    AlphaUpdate,
    CancelQuery,
    ControlMessage,
    InstanceState,
    LatencyEvent,
    RecoveryProbe,
    SpeedUpdate,
    WorkflowProfile,
)
from shared.contracts.topics import (
    CANCELLATIONS,
    CONTROL,
    INSTANCE_STATES,
    LATENCY_EVENTS,
    Topics,
)
from shared.errors import ContractError
from shared.ports import Broker, Clock, Record
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.tables import Follower, OnRecord, follow_topic

EVENTS_TAIL = 500
"""Of each partition of `latency-events`: tells a new dispatcher how fast the fleet is."""
log = structlog.get_logger(__name__)


class Tables:
    """Applies what is published on the followed topics.

    Args:
        fleet: Instance states go here.
        control: α, profiles and speeds go here.
        cancellations: Tombstones go here.
        gate: Ends of calls go here, the last ones of the past too.
        peers: Probes of dispatchers go here.
        clock: Time.
        topics: Names.
        metrics: Counts records and what could not be read.
        health: Told that the readers make progress.
        on_change: Called when waiting calls may have a new chance.
    """

    def __init__(
        self,
        *,
        fleet: FleetState,
        control: Control,
        cancellations: Cancellations,
        gate: Gate,
        peers: Peers,
        clock: Clock,
        topics: Topics,
        metrics: Metrics,
        health: Health,
        on_change: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._control = control
        self._cancellations = cancellations
        self._gate = gate
        self._peers = peers
        self._clock = clock
        self._topics = topics
        self._metrics = metrics
        self._health = health
        self._on_change = on_change
        self._is_past = True

    async def open(self, broker: Broker, stack: AsyncExitStack) -> dict[str, Follower]:
        """Open the followers; topic name -> follower."""
        handlers: dict[str, OnRecord] = {
            INSTANCE_STATES: self._on_state,
            CONTROL: self._on_control,
            CANCELLATIONS: self._on_cancellation,
            LATENCY_EVENTS: self._on_call_ended,
        }
        return {
            topic: await stack.enter_async_context(
                follow_topic(
                    broker,
                    self._topics.name(topic),
                    self._guarded(topic, handler),
                    lambda topic=topic: self._health.beat(topic),  # type: ignore[misc]
                    tail=EVENTS_TAIL if topic == LATENCY_EVENTS else None,
                )
            )
            for topic, handler in handlers.items()
        }

    def begin_present(self) -> None:
        """Take records from now on for news: the past has been read."""
        self._is_past = False

    def retire(self) -> None:
        """Tell health that the followers ended on purpose."""
        for topic in (INSTANCE_STATES, CONTROL, CANCELLATIONS, LATENCY_EVENTS):
            self._health.retire(topic)

    def _guarded(self, topic: str, handler: OnRecord) -> OnRecord:
        def on_record(record: Record) -> None:
            self._metrics.messages.add(topic=topic)
            try:
                handler(record)
            except ContractError as exc:
                self._metrics.unreadable.add(topic=topic, reason=exc.reason)
                log.warning(
                    "record_unreadable",
                    topic=topic,
                    partition=record.tp.partition,
                    offset=record.offset,
                    reason=exc.reason,
                    detail=exc.detail,
                )

        return on_record

    def _on_state(self, record: Record) -> None:
        self._fleet.listen(self._clock.monotonic_s())
        self._peers.listen(self._clock.monotonic_s())
        if record.value is None:
            key = (record.key or b"").decode(errors="replace")
            self._fleet.remove(key)
            self._peers.left(key)
            return
        message = decode_any(record.value, InstanceState, RecoveryProbe)
        is_peer = (record.key or b"").startswith(PROBE_KEY.encode())
        if isinstance(message, RecoveryProbe) and is_peer and not self._is_past:
            self._peers.heard(message, self._clock.monotonic_s())
        if isinstance(message, InstanceState):
            heard_at_s = self._clock.monotonic_s() - self._age_s(record)
            if self._fleet.observe(record.offset, message, heard_at_s):
                self._on_change()

    def _age_s(self, record: Record) -> float:
        """Return how old a record is, wall seconds; a record just appended is news.

        Only while reading the past are hosts' clocks compared: an old state is then no sign of
        life. If the clocks disagree, the next heartbeat puts it right.
        """
        if not self._is_past:
            return 0.0
        now_unix_s = self._clock.now_s() / self._clock.time_scale
        return max(0.0, now_unix_s - record.append_unix_s)

    def _on_control(self, record: Record) -> None:
        if record.value is None:
            return
        message = decode_any(record.value, AlphaUpdate, WorkflowProfile, SpeedUpdate)
        if not isinstance(message, ControlMessage) or not self._control.apply(message):
            return
        if isinstance(message, AlphaUpdate):
            self._metrics.alpha.set(message.alpha, pool=message.pool)
        log.info("control_applied", kind=type(message).__name__, revision=message.revision)

    def _on_call_ended(self, record: Record) -> None:
        if record.value is None:
            return
        event = decode(record.value, LatencyEvent)
        self._gate.see(event)
        times = event.times
        if times.started_at_s is not None and times.finished_at_s is not None:
            service_s = times.finished_at_s - times.started_at_s
            if event.kind == "completed":
                self._fleet.drift.finished(event.instance_id, service_s, event.t_comp_s)

    def _on_cancellation(self, record: Record) -> None:
        if record.value is None:
            return
        tombstone = decode(record.value, CancelQuery)
        if self._cancellations.add(tombstone, self._clock.now_s()):
            self._on_change()


async def all_caught_up(followers: Iterable[Follower], stop: asyncio.Event) -> bool:
    """Return True once all followers have read the past, False when `stop` came first."""
    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(f.caught_up(), name="caught-up") for f in followers]
        stopping = group.create_task(stop.wait(), name="stop")
        await asyncio.wait(
            {stopping, group.create_task(_all(reading), name="all")},
            return_when=asyncio.FIRST_COMPLETED,
        )
        done = all(task.done() for task in reading)
        for task in (*reading, stopping):
            task.cancel()
    return done


async def _all(tasks: "Iterable[asyncio.Task[None]]") -> None:
    await asyncio.wait(list(tasks))
