"""The worker: one instance's calls, most urgent first, on its engine; life after life.

A *life* begins with a record on `instance-states` whose offset is its epoch. It ends because the
process is told to stop, because the engine died, or because a newer epoch was found (the worker was
paused, or recovery took it for dead): then everything held is dropped, since Kafka holds it and
others may have it by now, and a new life begins from the committed offset.

Only ports are used here; `app.py` chooses the adapters.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Literal

import structlog

from services.worker.bells import Bells
from services.worker.calls import CallBook, Cut, EndedCalls, Place
from services.worker.drain import Drain
from services.worker.endings import Endings
from services.worker.fencing import EpochWatch
from services.worker.intake import Intake
from services.worker.life import End, Life
from services.worker.messages import Verdict
from services.worker.moving import SickWatch
from services.worker.params import WorkerParams
from services.worker.pulse import Pulse
from services.worker.running import Runner, cut_off
from services.worker.state_report import StateReporter, begin_state
from services.worker.tombstones import Tombstones
from services.worker.upkeep import Upkeep
from services.worker.vitals import BROKER, Vitals
from shared.contracts.topics import CANCELLATIONS, INSTANCE_STATES, Topics
from shared.errors import BrokerUnavailable, EngineDead, Fenced, StateUnavailable
from shared.ports import Ack, Broker, Clock, Consumer, Engine, Record, StateStore, TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.offsets import OffsetTracker
from shared.runtime.publishing import DeadLetters, Publisher
from shared.runtime.tables import Follower, counting, follow_topic
from shared.runtime.tracing import NO_TRACES, Traces
from shared.scheduling.outliers import OutlierRules

BACKOFF_S = 0.5
LOOPS = ("intake", "claim", "report", "commit", "heal", "epoch")
log = structlog.get_logger(__name__)


class Worker:
    """Serves one instance.

    Args:
        broker: Carries everything.
        store: Orders the queue and carries streamed chunks.
        engine: Runs the calls.
        clock: Mesh clock.
        topics: Names.
        params: Bounds and periods.
        metrics: Counts.
        health: Readiness and pulses of the process.
        traces: Where spans go.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        store: StateStore,
        engine: Engine,
        clock: Clock,
        topics: Topics,
        params: WorkerParams,
        metrics: Metrics,
        health: Health,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._broker = broker
        self._store = store
        self._engine = engine
        self._clock = clock
        self._topics = topics
        self._params = params
        self._metrics = metrics
        self._vitals = Vitals(health, params.instance_id)
        self._index = store.urgency_set(params.instance_id)
        self._publisher = Publisher(broker, topics, clock, traces)
        self._dead_letters = DeadLetters(self._publisher, topics, clock, metrics, "worker")
        self._tombstones = Tombstones()
        self._ended = EndedCalls(params.num_remembered)
        self._tp = TopicPartition(topics.instance(params.instance_id), 0)
        self._life: Life | None = None

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain.

        Raises:
            EngineDead: The engine died; its calls are handed back.
            UnknownTopic: The mesh's topics do not exist.
        """
        self._vitals.block("start", "starting")
        try:
            async with follow_topic(
                self._broker,
                self._topics.name(CANCELLATIONS),
                counting(self._metrics, CANCELLATIONS, self._see_cancellation),
                lambda: self._vitals.beat("cancellations"),
            ) as cancellations:
                await self._serve_lives(cancellations, stop)
        finally:
            self._vitals.retire("cancellations", *LOOPS)
            log.info(
                "worker_stopped",
                instance_id=self._params.instance_id,
                totals=self._metrics.totals(),
            )

    async def _serve_lives(self, cancellations: Follower, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            following = group.create_task(
                cancellations.follow(asyncio.Event()), name="cancellations"
            )
            await self._caught_up(cancellations, stop)
            end = End.FENCED
            while end is End.FENCED and not stop.is_set():
                end = await self._live(stop)
            following.cancel()
        if end is End.ENGINE_DEAD:
            raise EngineDead(f"the engine of {self._params.instance_id} died")

    async def _caught_up(self, cancellations: Follower, stop: asyncio.Event) -> None:
        """Return when every tombstone is known (before the first claim), or told to stop."""
        async with asyncio.TaskGroup() as group:
            await _first_of(
                group.create_task(cancellations.caught_up(), name="tombstones"),
                group.create_task(stop.wait(), name="stop"),
            )

    async def _live(self, stop: asyncio.Event) -> End:
        nonce = secrets.token_hex(8)
        begun = await self._begin(nonce, stop)
        if begun is None:
            return End.STOPPED
        async with (
            self._broker.partition_consumer(
                [self._tp],
                start="committed",
                group=self._topics.worker_group(self._params.instance_id),
            ) as calls,
            self._broker.partition_consumer([begun.tp], start="end") as states,
        ):
            states.seek(begun.tp, begun.offset + 1)
            offsets = await self._restore(calls)
            async with asyncio.TaskGroup() as group:
                life = self._new_life(begun.offset, nonce, offsets, group)
                self._life = life
                try:
                    return await self._run(life, calls, states, stop)
                finally:
                    self._life = None
                    life.cancel_all()

    async def _begin(self, nonce: str, stop: asyncio.Event) -> Ack | None:
        """Create the instance's topic and begin an epoch; None when told to stop before that."""
        state = begin_state(
            self._engine,
            instance_id=self._params.instance_id,
            capacity=self._params.capacity,
            queue_bound=self._params.queue_bound,
            nonce=nonce,
            at_s=self._clock.now_s(),
        )
        while not stop.is_set():
            try:
                spec = self._topics.instance_spec(self._params.instance_id)
                await self._broker.create_topics([spec])
                ack = await self._publisher.once(INSTANCE_STATES, state, key=state.instance_id)
            except BrokerUnavailable as exc:
                self._vitals.trouble(BROKER, exc)
                await self._clock.sleep_wall(BACKOFF_S)
                continue
            self._vitals.recovered(BROKER)
            return ack
        return None

    async def _restore(self, calls: Consumer) -> OffsetTracker:
        """Return what earlier lives have handed on; start over where the topic was lost."""
        while True:
            try:
                committed = await calls.committed(self._tp)
                begin = (await calls.beginning_offsets())[self._tp]
                end = (await calls.end_offsets())[self._tp]
            except BrokerUnavailable as exc:
                self._vitals.trouble(BROKER, exc)
                await self._clock.sleep_wall(BACKOFF_S)
                continue
            if committed is not None and committed.offset > end:
                log.error("topic_rewound", committed_offset=committed.offset, end_offset=end)
                committed = None
            offsets = OffsetTracker.restore(committed, begin)
            calls.seek(self._tp, offsets.position)
            return offsets

    def _new_life(
        self, epoch: int, nonce: str, offsets: OffsetTracker, group: asyncio.TaskGroup
    ) -> Life:
        book = CallBook(accounted_offset=offsets.position - 1)
        bells = Bells()
        endings = Endings(
            book=book,
            offsets=offsets,
            ended=self._ended,
            index=self._index,
            publisher=self._publisher,
            dead_letters=self._dead_letters,
            clock=self._clock,
            metrics=self._metrics,
            params=self._params,
            bells=bells,
            vitals=self._vitals,
        )
        return Life(
            epoch=epoch,
            nonce=nonce,
            params=self._params,
            clock=self._clock,
            metrics=self._metrics,
            vitals=self._vitals,
            tombstones=self._tombstones,
            index=self._index,
            offsets=offsets,
            book=book,
            ended=self._ended,
            bells=bells,
            endings=endings,
            pulse=Pulse(self._clock),
            group=group,
        )

    async def _run(self, life: Life, calls: Consumer, states: Consumer, stop: asyncio.Event) -> End:
        await self._begin_index(life)
        log.info("life_begun", instance_id=self._params.instance_id, epoch=life.epoch)
        intake = Intake(life, calls)
        runner = Runner(life, self._engine, self._store)
        reporter = StateReporter(life, self._engine, self._publisher)
        upkeep = Upkeep(life, calls, self._tp)
        watch = EpochWatch(life, states)
        life.spawn(_end_on(stop.wait, life, End.STOPPED), name="stop")
        life.spawn(_end_on(self._engine.wait_dead, life, End.ENGINE_DEAD), name="engine")
        watching = life.spawn(watch.watch_forever(), name="epoch")
        life.spawn(life.endings.send_events(), name="events")
        life.spawn(intake.take_forever(), name="intake")
        life.spawn(runner.claim_forever(), name="claim")
        life.spawn(runner.watch_room(), name="room")
        life.spawn(reporter.report_forever(), name="report")
        life.spawn(upkeep.commit_forever(), name="commit")
        life.spawn(upkeep.heal_forever(), name="heal")
        floor_s = self._params.suspect_s * self._clock.time_scale
        rules = OutlierRules(failures=self._params.failure_threshold, stall_floor_s=floor_s)
        life.spawn(SickWatch(life, rules).watch_forever(), name="sick")
        self._vitals.ready()
        await life.over.changed.wait()
        cause = life.over.end
        if cause is End.FENCED:
            await self._drop(life, watch, watching, stop)
            return End.STOPPED if stop.is_set() else End.FENCED
        drain = Drain(
            life,
            intake=intake,
            runner=runner,
            reporter=reporter,
            upkeep=upkeep,
            consumer=calls,
        )
        is_clean = await drain.leave()
        log.info("life_ended", epoch=life.epoch, end=life.over.end.name, is_clean=is_clean)
        return max(cause, End.ENGINE_DEAD) if life.over.is_engine_dead else cause

    async def _begin_index(self, life: Life) -> None:
        try:
            try:
                await life.index.begin(life.epoch)
            except Fenced as exc:
                # Kafka gave out this epoch last; a higher one in the store is from a history
                # that Kafka has lost. A truly newer life is seen on instance-states.
                log.warning("stale_index_dropped", epoch=life.epoch, error=str(exc))
                await life.index.drop()
                await life.index.begin(life.epoch)
        except (Fenced, StateUnavailable) as exc:  # the first claim or addition begins it too
            log.warning("index_not_begun", epoch=life.epoch, error=str(exc))

    async def _drop(
        self, life: Life, watch: EpochWatch, watching: asyncio.Task[None], stop: asyncio.Event
    ) -> None:
        """Abort and drop everything, then wait until no other life is heard of."""
        self._life = None
        life.cancel_all(keep=watching)
        log.warning("life_dropped", epoch=life.epoch, num_dropped=len(life.book))
        async with asyncio.TaskGroup() as group:
            await _first_of(
                group.create_task(watch.rival_silent(), name="standby"),
                group.create_task(stop.wait(), name="stop"),
            )

    def _see_cancellation(self, record: Record) -> None:
        query_id = self._tombstones.put(record, self._clock.now_s())
        life = self._life
        if query_id is None or life is None:
            return
        tombstone = self._tombstones.find(query_id)
        verdict = Verdict(
            kind="cancelled", reason="cancelled", detail=tombstone.reason if tombstone else ""
        )
        for held in life.book.cancelled_by(query_id):
            if held.place is Place.RUNNING:
                cut_off(held, Cut.CANCELLED)
            elif held.place is Place.WAITING:
                life.endings.stop_counting(held)
                life.spawn(life.endings.answer(held, verdict), name=f"cancel-{held.request_id}")


async def _end_on(happens: Callable[[], Awaitable[object]], life: Life, end: End) -> None:
    await happens()
    life.over.set(end)


async def _first_of(*tasks: asyncio.Task[None] | asyncio.Task[Literal[True]]) -> None:
    """Return when one task is done; the others are cancelled."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
