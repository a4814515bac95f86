"""Reads latency events, replays the window, re-publishes α and learned profiles on `control`.

One tuner acts: the owner of the only partition of `latency-events` in group `tuner`; others stand
by. A tuner that dies leaves the last good values on the compacted `control` topic.
"""

import asyncio
from collections.abc import Collection
from typing import Protocol, TypeVar

import msgspec
import structlog

from services.tuner.judgement import judge
from services.tuner.replay import Replay, ReplayRequest, alphas_to_try, shares_of
from services.tuner.window import Episode, Window, episode
from shared.contracts.codec import decode, decode_any
from shared.contracts.messages import (
    AlphaUpdate,
    InstanceState,
    LatencyEvent,
    RecoveryProbe,
    SpeedUpdate,
    WorkflowProfile,
)
from shared.contracts.topics import CONTROL, INSTANCE_STATES, LATENCY_EVENTS, Topics
from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.errors import BrokerUnavailable, ContractError, StaleAssignment
from shared.ports import Broker, Clock, Committed, Consumer, Record, TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import DeadLetters, Publisher
from shared.runtime.tables import follow_topic
from shared.scheduling.attainment import Summary, summarize
from shared.scheduling.profiles import default_shapes, shape_from_trace
from shared.scheduling.tuning import ALPHA_GRID, TuningDecision, TuningRules, refine_alphas

log = structlog.get_logger(__name__)

GROUP = "tuner"
CHECK_WALL_S = 0.5


class TunerParams(msgspec.Struct, frozen=True, kw_only=True):
    """When and how the tuner acts.

    Attributes:
        tuner_id: Name in messages and logs.
        policy: Policy replayed.
        initial_alpha: α in force before anything is published.
        window_queries: Most queries remembered.
        min_queries: Fewest ended queries for a decision.
        period_s: Time between scheduled decisions, mesh seconds.
        degradation: P95 now divided by P95 at the last decision that triggers one at once.
        quiet_s: Silence after which a query counts as ended, mesh seconds.
        rules: When a better α is worth a change.
        enabled: Whether it publishes α at all.
    """

    tuner_id: str = "tuner"
    policy: str = "hexgen-flow"
    initial_alpha: float = 0.1
    window_queries: int = 600
    min_queries: int = 100
    period_s: float = 300.0
    degradation: float = 1.2
    quiet_s: float = 120.0
    rules: TuningRules = TuningRules()
    enabled: bool = True


class _Revised(Protocol):
    @property
    def revision(self) -> int: ...


Update = TypeVar("Update", bound=_Revised)


def _keep_newest(table: dict[str, Update], key: str, update: Update) -> None:
    known = table.get(key)
    if known is None or update.revision > known.revision:
        table[key] = update


class Tuner:
    """The use case; ports only.

    Args:
        broker: Where events come from and decisions go.
        replay: Predicts P95 per α.
        clock: Mesh clock.
        topics: Names.
        params: When and how to act.
        metrics: What is counted.
        health: Progress.
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
    ) -> None:
        self._broker = broker
        self._replay = replay
        self._clock = clock
        self._topics = topics
        self._params = params
        self._metrics = metrics
        self._health = health
        self._publisher = Publisher(broker, topics, clock)
        self._dead_letters = DeadLetters(self._publisher, topics, clock, metrics, "tuner")
        self._window = Window(params.window_queries)
        self._fleet: dict[str, InstanceSpec] = {}
        self._alphas: dict[str, AlphaUpdate] = {}
        self._profiles: dict[str, WorkflowProfile] = {}
        self._speeds: dict[str, SpeedUpdate] = {}
        self._owned: set[TopicPartition] = set()
        self._next_offset: dict[TopicPartition, int] = {}
        self._decided_at_s: float | None = None
        self._p95_at_decision_s: float | None = None

    async def serve(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set."""
        states = self._topics.name(INSTANCE_STATES)
        control = self._topics.name(CONTROL)
        async with (
            follow_topic(self._broker, states, self._on_state) as state_follower,
            follow_topic(self._broker, control, self._on_control) as control_follower,
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
                        await self._take(record)
                    await self._commit(consumer)
                except BrokerUnavailable:
                    await asyncio.sleep(CHECK_WALL_S)

    async def _on_assigned(self, partitions: Collection[TopicPartition]) -> None:
        self._owned |= set(partitions)

    async def _on_revoked(self, partitions: Collection[TopicPartition]) -> None:
        self._owned -= set(partitions)
        self._window = Window(self._params.window_queries)
        self._next_offset.clear()

    async def _take(self, record: Record) -> None:
        self._metrics.messages.add(topic=LATENCY_EVENTS)
        self._next_offset[record.tp] = record.offset + 1
        try:
            event = decode(record.value or b"", LatencyEvent)
        except ContractError as exc:
            await self._dead_letters.bury(record, exc)
            return
        if not self._window.add(event, record.offset):
            self._metrics.duplicates.add(topic=LATENCY_EVENTS)

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

    def _on_state(self, record: Record) -> None:
        try:
            state = decode_any(record.value or b"", InstanceState, RecoveryProbe)
        except ContractError:
            return  # a tombstone, or garbage that the dispatcher already counts
        if isinstance(state, InstanceState):
            if state.phase in {"draining", "gone"}:
                self._fleet.pop(state.instance_id, None)
            else:
                self._fleet[state.instance_id] = state.spec

    def _on_control(self, record: Record) -> None:
        try:
            update = decode_any(record.value or b"", AlphaUpdate, WorkflowProfile, SpeedUpdate)
        except ContractError:
            return
        if isinstance(update, AlphaUpdate):
            _keep_newest(self._alphas, update.pool, update)
            self._metrics.alpha.set(self._alphas[update.pool].alpha, pool=update.pool)
        elif isinstance(update, WorkflowProfile):
            _keep_newest(self._profiles, update.shape.workflow, update)
        elif isinstance(update, SpeedUpdate):
            _keep_newest(self._speeds, update.instance_id, update)

    async def _watch(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._health.beat("watch", max_silence_s=120.0)
            try:
                await asyncio.wait_for(stop.wait(), CHECK_WALL_S)
            except TimeoutError:
                if self._owned:
                    await self._consider()

    async def _consider(self) -> None:
        records = self._window.ended(self._clock.now_s(), self._params.quiet_s)
        if len(records) < self._params.min_queries:
            return
        recent = records[-self._params.min_queries :]
        summary = summarize([record.end() for record in recent], len(recent))
        trigger = self._trigger(summary)
        if trigger is None:
            return
        self._decided_at_s = self._clock.now_s()
        self._p95_at_decision_s = summary.p95_s
        log.info("tuning_started", trigger=trigger, p95_s=summary.p95_s, num_queries=len(records))
        window = episode(records)
        await self._learn(window)
        for pool in sorted({query.model for query in window.queries}):
            await self._tune(pool, window)

    def _trigger(self, summary: Summary) -> str | None:
        if self._decided_at_s is None or self._p95_at_decision_s is None:
            return "first"
        if self._clock.now_s() - self._decided_at_s >= self._params.period_s:
            return "schedule"
        if summary.p95_s > self._params.degradation * self._p95_at_decision_s:
            return "degradation"
        return None

    async def _learn(self, window: Episode) -> None:
        for workflow, shape in shape_from_trace(window.queries, priors=self._shapes()).items():
            known = self._profiles.get(workflow)
            profile = WorkflowProfile(
                shape=shape,
                revision=1 if known is None else known.revision + 1,
                at_s=self._clock.now_s(),
                tuner_id=self._params.tuner_id,
            )
            await self._publisher.until_taken(CONTROL, profile, key=f"profile/{workflow}")

    async def _tune(self, pool: str, window: Episode) -> None:
        fleet = tuple(spec for _, spec in sorted(self._fleet.items()) if spec.model == pool)
        queries = tuple(query for query in window.queries if query.model == pool)
        if not fleet or not queries or not self._params.enabled:
            return
        known = self._alphas.get(pool)
        current = known.alpha if known is not None else self._params.initial_alpha
        request = ReplayRequest(
            queries=queries,
            fleet=fleet,
            policy=self._params.policy,
            shapes=self._shapes(),
            alphas=alphas_to_try(ALPHA_GRID, current),
            speed_factors={key: speed.factor for key, speed in self._speeds.items()},
        )
        replayed = await self._replay.sweep(request)
        refined = refine_alphas({run.alpha: run.p95_s for run in replayed})
        if refined:
            replayed += await self._replay.sweep(msgspec.structs.replace(request, alphas=refined))
        decision = judge(
            replayed,
            current=current,
            previous=known.previous_alpha if known is not None else None,
            observed_s=[end.latency_s for end in window.ends if end.completed],
            observed_shares=shares_of(window.generated_tokens),
            rules=self._params.rules,
        )
        log.info("tuning_decided", pool=pool, alpha=decision.alpha, reason=decision.reason)
        if decision.is_change:
            await self._publish(pool, current, decision, known)

    async def _publish(
        self, pool: str, current: float, decision: TuningDecision, known: AlphaUpdate | None
    ) -> None:
        update = AlphaUpdate(
            pool=pool,
            alpha=decision.alpha,
            revision=1 if known is None else known.revision + 1,
            reason=decision.reason,
            predicted_p95_s=decision.predicted_p95_s,
            previous_alpha=current,
            at_s=self._clock.now_s(),
            tuner_id=self._params.tuner_id,
        )
        await self._publisher.until_taken(CONTROL, update, key=f"alpha/{pool}")

    def _shapes(self) -> dict[str, WorkflowShape]:
        learned = {name: profile.shape for name, profile in self._profiles.items()}
        return {**default_shapes(), **learned}
