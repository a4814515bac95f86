"""The dispatcher: reads calls, decides who gets them, publishes them to the instances' topics.

The order of things that keeps every call (DESIGN.md §3): a call is handed on when its record on an
instance's topic, or its outcome, is acknowledged; only then is its place on `stage-requests`
finished; commits never pass a place that is not finished. Nothing in the reading path waits for a
publish: decisions are made in one step over all waiting calls, on every arrival and on every
change of an instance's state, and published by tasks of their own.
"""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, suppress

import structlog

from services.dispatcher.answers import Answers
from services.dispatcher.call_book import CallBook, OpenCall, Origin
from services.dispatcher.control import Cancellations, Control
from services.dispatcher.fleet_state import FleetState
from services.dispatcher.following import Tables, all_caught_up
from services.dispatcher.gate import Gate
from services.dispatcher.handoff import Handoff
from services.dispatcher.intake import Intake, QueryMemory, Refusal
from services.dispatcher.params import DispatcherParams
from services.dispatcher.partitions import Partitions
from services.dispatcher.peers import Peers
from services.dispatcher.planner import Planner
from services.dispatcher.recovery import GROUP as RECOVERY_GROUP
from services.dispatcher.recovery import Recovery
from shared.contracts.topics import STAGE_REQUESTS, Topics
from shared.errors import BrokerUnavailable, ConfigError, UnknownTopic
from shared.ports import Broker, Clock, Consumer, Record, TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import Publisher
from shared.runtime.tracing import NO_TRACES, Traces, traceparent_of
from shared.scheduling.outliers import OutlierRules

GROUP = "dispatcher"
LONGEST_FETCH_S = 90.0  # while the broker is away: a look at it, and a new consumer
RELEARN_S = 1.0
RETRY_S = 0.2
SETTLE_S = 0.2
log = structlog.get_logger(__name__)


class Dispatcher:
    """One dispatcher; any number of them share `stage-requests` by partition.

    Args:
        broker: Messages.
        clock: Time.
        topics: Names.
        params: How it behaves.
        metrics: Counts.
        health: Progress.
        recovery: Watches instances and hands back what dead ones held.
        traces: Where spans go.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        clock: Clock,
        topics: Topics,
        params: DispatcherParams,
        metrics: Metrics,
        health: Health,
        recovery: Recovery,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._topics = topics
        self._params = params
        self._metrics = metrics
        self._health = health
        self._recovery = recovery
        self._wake = asyncio.Event()
        self._learned_s = 0.0
        self._book = CallBook(params.remembered_calls)
        floor_s = params.suspect_s * clock.time_scale
        self._fleet = FleetState(params.live_s, OutlierRules(stall_floor_s=floor_s))
        self._cancellations = Cancellations()
        control = Control(params.policy, params.alpha)
        memory = QueryMemory(params.remembered_queries)
        self._intake = Intake(clock, params, metrics, memory)
        self._gate = Gate(control, clock, params)
        self._peers = Peers(params.dispatcher_id, params.peer_silence_s)
        self._planner = Planner(
            self._book, self._fleet, control, self._gate, self._cancellations, memory, clock, params
        )
        self._tables = Tables(
            fleet=self._fleet,
            control=control,
            cancellations=self._cancellations,
            gate=self._gate,
            peers=self._peers,
            clock=clock,
            topics=topics,
            metrics=metrics,
            health=health,
            on_change=self._wake.set,
        )
        publisher = Publisher(broker, topics, clock, traces)
        self._handoff = Handoff(
            publisher=publisher,
            answers=Answers(publisher, topics, clock, metrics, lambda: self._handoff.is_stopping),
            book=self._book,
            fleet=self._fleet,
            cancellations=self._cancellations,
            clock=clock,
            params=params,
            metrics=metrics,
            wake=self._wake.set,
        )

    async def serve(self, stop: asyncio.Event) -> None:
        """Dispatch until `stop` is set, then drain.

        Stopping order: no more fetching, what is being published is acknowledged, positions are
        committed, the group is left. Calls not assigned stay uncommitted for the next owner.
        """
        async with AsyncExitStack() as stack:
            await self._learn_reply_partitions()
            await self._dismiss(self._params.dispatcher_id)  # an earlier life of ours, if it died
            followers = await self._tables.open(self._broker, stack)
            async with asyncio.TaskGroup() as group:
                done = asyncio.Event()
                for topic, follower in followers.items():
                    group.create_task(follower.follow(done), name=f"follow-{topic}")
                if await all_caught_up(followers.values(), stop):
                    self._tables.begin_present()
                    recovery = group.create_task(self._recovery.run(stop), name="recovery")
                    await self._dispatch(group, stop)
                    await recovery
                done.set()
        self._tables.retire()

    async def _dispatch(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        opened: list[Partitions] = []  # the hook needs what exists once the consumer is open

        async def on_revoked(tps: Collection[TopicPartition]) -> None:
            for partitions in opened:
                await self._give_up(partitions, tps)

        name = self._topics.name(STAGE_REQUESTS)
        group_name = self._topics.group(GROUP)
        async with self._broker.group_consumer(
            [name], group_name, on_revoked=on_revoked
        ) as consumer:
            partitions = Partitions(consumer, self._clock, self._params.recommit_s)
            opened.append(partitions)
            side = [
                group.create_task(self._plan_on_change(group), name="plan"),
                group.create_task(self._tick(), name="tick"),
                group.create_task(self._watch_peers(), name="peers"),
                group.create_task(self._commit_regularly(partitions), name="commit"),
            ]
            self._health.beat("intake", LONGEST_FETCH_S)
            self._health.beat("plan")
            log.info("dispatcher_serving", dispatcher_id=self._params.dispatcher_id)
            await self._read(consumer, partitions, group, stop)
            await self._drain(side, partitions)

    async def _drain(self, side: "Sequence[asyncio.Task[None]]", partitions: Partitions) -> None:
        self._health.block("stop", "draining")
        self._handoff.is_stopping = True
        while self._handoff.num_in_flight:
            await self._handoff.settled(SETTLE_S)
        for task in side:
            task.cancel()
        await partitions.commit()
        for name in ("intake", "plan"):
            self._health.retire(name)
        log.info(
            "dispatcher_drained",
            dispatcher_id=self._params.dispatcher_id,
            waiting=self._book.num_waiting,
            totals=self._metrics.totals(),
        )

    # Reading.

    async def _read(
        self,
        consumer: Consumer,
        partitions: Partitions,
        group: asyncio.TaskGroup,
        stop: asyncio.Event,
    ) -> None:
        while not stop.is_set():
            try:
                records = await consumer.fetch(max_records=self._params.fetch_records)
            except BrokerUnavailable as exc:
                # A new process would not reach it either, and would start when it is long back.
                self._health.beat("intake", LONGEST_FETCH_S)
                self._health.block("broker", str(exc))
                await asyncio.sleep(RETRY_S)
                continue
            self._health.beat("intake", LONGEST_FETCH_S)
            self._health.clear()  # ready once it was allowed to read
            self._health.clear("broker")
            trackers = await partitions.trackers_for(records, stop)
            for record in records:
                tracker = trackers.get(record.tp)
                if tracker is not None:
                    tracker.seen(record.offset)
                    if not tracker.is_finished(record.offset):
                        self._accept(record, Origin(record.tp, record.offset, tracker), group)
            while self._handoff.num_in_flight >= self._params.max_in_flight and not stop.is_set():
                await self._handoff.settled(SETTLE_S)

    def _accept(self, record: Record, origin: Origin, group: asyncio.TaskGroup) -> None:
        """Take one record; nothing here waits."""
        self._metrics.messages.add(topic=STAGE_REQUESTS)
        found = self._intake.read(record)
        if isinstance(found, Refusal):

            async def reconsider() -> bool:
                await self._learn_reply_partitions_again()
                again = self._intake.read(record)
                if isinstance(again, Refusal) and again.retry_topics:
                    return False
                self._accept(record, origin, group)
                return True

            self._handoff.start_refusal(record, found, origin, group, reconsider)
            return
        size_bytes = len(record.value or b"")
        now_s = self._clock.monotonic_s()
        if self._book.add(OpenCall(found, origin, size_bytes, now_s, traceparent_of(record))):
            self._cancellations.check(
                self._clock.now_s(), found.effective_query_id, found.request_id
            )
            self._wake.set()
        else:
            self._metrics.duplicates.add(topic=STAGE_REQUESTS)
            log.info("delivery_repeated", request_id=found.request_id, attempt=found.attempt)

    async def _learn_reply_partitions(self) -> None:
        self._intake.reply_partitions = {
            topic: await self._broker.partitions_of(self._topics.name(topic))
            for topic in self._params.reply_topics
        }
        self._learned_s = self._clock.monotonic_s()

    async def _learn_reply_partitions_again(self) -> None:
        """Look at the reply topics as they are now, once a second at most."""
        if self._clock.monotonic_s() - self._learned_s < RELEARN_S:
            return
        with suppress(BrokerUnavailable, UnknownTopic):
            await self._learn_reply_partitions()

    async def _dismiss(self, dispatcher_id: str) -> None:
        """Let what a dead dispatcher owned move now, where Kafka has not noticed yet."""
        for group in (GROUP, RECOVERY_GROUP):
            name = self._topics.group(group)
            with suppress(BrokerUnavailable, ConfigError):
                if await self._broker.dismiss(name, dispatcher_id):
                    log.warning("member_dismissed", group=name, dispatcher_id=dispatcher_id)

    async def _watch_peers(self) -> None:
        """Take over from dispatchers that have died, until cancelled."""
        while True:
            await self._clock.sleep_wall(self._params.peer_silence_s / 8)
            for dispatcher_id in self._peers.take_dead(self._clock.monotonic_s()):
                await self._dismiss(dispatcher_id)

    # Deciding.

    async def _plan_on_change(self, group: asyncio.TaskGroup) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._health.beat("plan")
            if self._book.num_waiting and not self._handoff.is_stopping:
                self._handoff.start(self._planner.decide(), group)

    async def _tick(self) -> None:
        """Wake the planner for what only time changes, and report."""
        while True:
            await self._clock.sleep_wall(self._params.tick_s)
            self._wake.set()
            self._cancellations.forget_expired(self._clock.now_s())
            self._gate.tidy()
            self._metrics.waiting.set(self._book.num_waiting)
            self._metrics.backlog.set(self._fleet.backlog_s())

    # Offsets.

    async def _commit_regularly(self, partitions: Partitions) -> None:
        while True:
            await self._clock.sleep_wall(self._params.commit_interval_s)
            partitions.apply_pauses()
            await partitions.commit()

    async def _give_up(self, partitions: Partitions, tps: Collection[TopicPartition]) -> None:
        """Let partitions move to another dispatcher.

        Calls not assigned yet are dropped first; publishes under way are waited for, within a
        bound, so that the new owner does not repeat them.
        """
        partitions.begin_move(tps)
        dropped = self._book.drop_origins(tps, waiting_only=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._params.revoke_wait_s):
                while self._book.publishing_from(tps):
                    await self._handoff.settled(SETTLE_S)
        await partitions.commit(only=tps)
        self._book.drop_origins(tps, waiting_only=False)
        partitions.end_move(tps)
        log.info("partitions_given_up", partitions=len(tps), calls_dropped=dropped)
