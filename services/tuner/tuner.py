"""Reads latency events, learns, replays the window, publishes what is better on `control`.

One tuner acts: the owner of the only partition of `latency-events` in group `tuner`; others stand
by. A tuner that dies leaves the last good values on the compacted `control` topic, and the window
is read again from the committed offset by whoever comes next.
"""

import asyncio
from collections.abc import Collection

import structlog

from services.tuner.params import TunerParams
from services.tuner.replay import Replay
from services.tuner.steering import Material, Steering
from services.tuner.tables import Tables
from services.tuner.tracing import around_decisions, trace_decision
from services.tuner.watching import Watching
from shared.contracts.codec import decode
from shared.contracts.messages import LatencyEvent
from shared.contracts.query_window import Window
from shared.contracts.topics import CONTROL, INSTANCE_STATES, LATENCY_EVENTS, Topics
from shared.errors import BrokerUnavailable, ContractError, StaleAssignment
from shared.ports import Broker, Clock, Committed, Consumer, Record, TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import DeadLetters, Publisher
from shared.runtime.tables import counting, follow_topic
from shared.runtime.tracing import NO_TRACES, Traces
from shared.runtime.tuning_journal import Decided, Journal, unheard

log = structlog.get_logger(__name__)

GROUP = "tuner"
CHECK_WALL_S = 0.5
LONGEST_STEP_WALL_S = 120.0


class Tuner:
    """The use case; ports only.

    Args:
        broker: Where events come from and decisions go.
        replay: Predicts P95 per α and fits speeds.
        clock: Mesh clock.
        topics: Names.
        params: When and how to act.
        metrics: What is counted.
        health: Progress.
        journal: Is told every decision.
        traces: Where spans go.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        replay: Replay,
        clock: Clock,
        topics: Topics,
        params: TunerParams,
        metrics: Metrics,
        health: Health,
        journal: Journal = unheard,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._topics = topics
        self._params = params
        self._metrics = metrics
        self._health = health
        self._journal = journal
        self._traces = traces
        publisher = Publisher(broker, topics, clock, traces)
        self._dead_letters = DeadLetters(publisher, topics, clock, metrics, "tuner")
        self.tables = Tables(metrics)
        self._window = Window(params.window_queries + params.lead_in)
        self._watching = Watching(params, metrics)
        self._steering = Steering(
            replay=replay,
            publisher=publisher,
            clock=clock,
            tables=self.tables,
            params=params,
            metrics=metrics,
            journal=self._on_decided,
        )
        self._owned: set[TopicPartition] = set()
        self._next_offset: dict[TopicPartition, int] = {}

    async def serve(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set."""
        on_state = counting(self._metrics, INSTANCE_STATES, self.tables.on_state)
        on_control = counting(self._metrics, CONTROL, self.tables.on_control)
        states, control = self._topics.name(INSTANCE_STATES), self._topics.name(CONTROL)
        async with (
            follow_topic(self._broker, states, on_state) as state_follower,
            follow_topic(self._broker, control, on_control) as control_follower,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(state_follower.follow(stop), name="tuner-states")
            group.create_task(control_follower.follow(stop), name="tuner-control")
            await state_follower.caught_up()
            await control_follower.caught_up()
            group.create_task(self._read_events(stop), name="tuner-events")
            group.create_task(self._watch(stop), name="tuner-watch")
            self._health.clear()
        log.info("tuner_stopped", totals=self._metrics.totals())

    async def _read_events(self, stop: asyncio.Event) -> None:
        topic = self._topics.name(LATENCY_EVENTS)
        async with self._broker.group_consumer(
            [topic],
            self._topics.group(GROUP),
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
        ) as consumer:
            while not stop.is_set():
                self._health.beat("events")
                try:
                    records = await consumer.fetch(timeout_s=0.5)
                    for record in records:
                        await self.take(record)
                    if records:
                        await self._commit(consumer)
                except BrokerUnavailable:
                    await asyncio.sleep(CHECK_WALL_S)

    async def _on_assigned(self, partitions: Collection[TopicPartition]) -> None:
        if partitions:
            log.info("tuner_acts", tuner_id=self._params.tuner_id)
        self._owned |= set(partitions)

    async def _on_revoked(self, partitions: Collection[TopicPartition]) -> None:
        if self._owned & set(partitions):
            log.info("tuner_stands_by", tuner_id=self._params.tuner_id)
        self._owned -= set(partitions)
        self._window = Window(self._params.window_queries + self._params.lead_in)
        self._watching = Watching(self._params, self._metrics)
        self._next_offset.clear()

    async def take(self, record: Record) -> None:
        """Take a record of `latency-events`."""
        self._metrics.messages.add(topic=LATENCY_EVENTS)
        self._next_offset[record.tp] = record.offset + 1
        try:
            event = decode(record.value or b"", LatencyEvent)
        except ContractError as exc:
            await self._dead_letters.bury(record, exc)
            return
        fault = self._window.add(
            event,
            record.offset,
            now_s=self._clock.now_s(),
            instances=self.tables.ever_seen,
        )
        if fault == "duplicate":
            self._metrics.duplicates.add(topic=LATENCY_EVENTS)
        elif fault is not None:
            self._metrics.events_ignored.add(cause=fault)

    async def _commit(self, consumer: Consumer) -> None:
        """Commit the oldest event the window rests on, so that a restart rebuilds the window."""
        oldest = self._window.oldest_offset()
        positions = {
            tp: Committed(offset=after if oldest is None else min(oldest, after))
            for tp, after in self._next_offset.items()
        }
        if not positions:
            return
        try:
            await consumer.commit(positions)
        except StaleAssignment:
            self._next_offset.clear()

    async def _watch(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._health.beat("watch", max_silence_s=LONGEST_STEP_WALL_S)
            try:
                await asyncio.wait_for(stop.wait(), self._params.check_wall_s)
            except TimeoutError:
                if self._owned:
                    await self.step()

    async def step(self) -> None:
        """Look at the window; learn and decide where there is reason to."""
        now_s, watching, window = self._clock.now_s(), self._watching, self._window
        ended, running = window.split(now_s, self._params.quiet_s)
        watching.look(ended)
        lately = watching.since_change(ended)
        if watching.takes_lesson(lately):
            lesson = await self._steering.learn(lately, watching.since_change(running))
            watching.cut(lesson.changed_at_s, is_other=lesson.is_other)
        if self._window is not window:
            return  # the partition went to another tuner meanwhile
        judged = watching.judged(ended)
        trigger = watching.trigger(judged, now_s)
        if trigger is not None and self._params.enabled:
            lead_in = watching.lead_in(ended, judged)
            from_s = min(record.arrival_s for record in [*lead_in, *judged])
            material = Material(
                ended=judged,
                running=[record for record in running if record.arrival_s >= from_s],
                lead_in=lead_in,
            )
            with around_decisions(self._traces, trigger=trigger, num_queries=len(judged)):
                await self._steering.decide(material, trigger)
            watching.decided(judged, self._clock.now_s())

    def _on_decided(self, decided: Decided) -> None:
        trace_decision(decided)
        self._journal(decided)
