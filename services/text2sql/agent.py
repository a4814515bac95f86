"""The agent: takes questions from `queries`, and ends each with one result.

Partitions move between agents as in any consumer group; each has a lane. A lane that has to go is
cancelled where it is: its questions are read again by the partition's next owner, which finds the
outcomes of their calls and goes on where this one was.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from services.text2sql.desk import Desk, open_desk
from services.text2sql.lane import Lane, try_keep
from services.text2sql.params import GROUP, AgentParams
from services.text2sql.presence import Presence, notice_of
from shared.contracts.codec import decode
from shared.contracts.messages import CancelQuery
from shared.contracts.topics import CANCELLATIONS, QUERIES, STAGE_RESULTS, Topics
from shared.errors import BrokerUnavailable, ContractError, StaleAssignment
from shared.ports import Broker, Clock, Consumer, Record, StateStore, TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.offsets import OffsetTracker
from shared.runtime.publishing import DeadLetters, Publisher
from shared.runtime.tables import counting, follow_topic
from shared.runtime.tracing import NO_TRACES, Traces
from shared.sdk import Producer, open_producer

MAX_TOMBSTONES = 100_000
LEAVE_WITHIN_S = 2.0
CHECK_S = 0.05
log = structlog.get_logger(__name__)


class Agent:
    """Answers questions.

    Args:
        broker: The mesh's broker.
        clock: Mesh clock.
        topics: Names.
        store: Where progress is told, and that it is there; None: nowhere.
        params: How it behaves.
        metrics: Counts.
        health: Whether it makes progress.
        traces: Where spans go.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        clock: Clock,
        topics: Topics,
        store: StateStore | None,
        params: AgentParams,
        metrics: Metrics,
        health: Health,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._topics = topics
        self._store = store
        self._params = params
        self._metrics = metrics
        self._health = health
        self._publisher = Publisher(broker, topics, clock, traces)
        self._dead_letters = DeadLetters(self._publisher, topics, clock, metrics, "text2sql")
        self._slots = asyncio.Semaphore(params.max_open)
        self._lanes: dict[TopicPartition, tuple[Lane, asyncio.Task[None]]] = {}
        self._tombstones: dict[str, CancelQuery] = {}
        self._consumer: Consumer | None = None
        self._moves: Counter[TopicPartition] = Counter()
        self._num_replies = 1
        self._is_paused = False

    async def serve(self, stop: asyncio.Event) -> None:
        """Answer questions until `stop` is set, then finish what is open within the drain bound.

        Raises:
            ConfigError: A database or a workflow cannot be read.
        """
        self._num_replies = await self._broker.partitions_of(self._topics.name(STAGE_RESULTS))
        over = asyncio.Event()
        async with AsyncExitStack() as stack:
            desk = await stack.enter_async_context(
                open_desk(self._params, self._clock, self._store)
            )
            follower = await stack.enter_async_context(
                follow_topic(
                    self._broker,
                    self._topics.name(CANCELLATIONS),
                    counting(self._metrics, CANCELLATIONS, self._on_cancellation),
                )
            )
            group = await stack.enter_async_context(asyncio.TaskGroup())
            group.create_task(follower.follow(over), name="agent-cancellations")
            await follower.caught_up()
            async with self._present(desk, group):
                await self._consume(stop, desk, group)
            over.set()
        log.info("agent_stopped", totals=self._metrics.totals())

    @asynccontextmanager
    async def _present(self, desk: Desk, group: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Say that the agent is there, from before it takes questions until it takes none."""
        if self._store is None:
            yield
            return
        agent_id = self._params.agent_id
        presence = Presence(self._store, self._clock, agent_id, notice_of(desk))
        await presence.say()
        task = group.create_task(presence.keep(), name="agent-presence")
        try:
            yield
        finally:
            task.cancel()

    async def _consume(self, stop: asyncio.Event, desk: Desk, group: asyncio.TaskGroup) -> None:
        async with self._broker.group_consumer(
            [self._topics.name(QUERIES)],
            self._topics.group(GROUP),
            on_revoked=self._on_revoked,
        ) as consumer:
            self._consumer = consumer
            self._health.clear()
            due_s = self._clock.monotonic_s()
            while not stop.is_set():
                self._health.beat("queries")
                try:
                    await self._take_all(await consumer.fetch(timeout_s=0.2), desk, group)
                except BrokerUnavailable:
                    await asyncio.sleep(CHECK_S)
                self._apply_pause(consumer)
                if self._clock.monotonic_s() >= due_s:
                    await self._commit([lane for lane, _ in self._lanes.values()])
                    due_s = self._clock.monotonic_s() + self._params.commit_interval_s
            await self._drain(consumer)

    @property
    def _consumer_now(self) -> Consumer:
        if self._consumer is None:
            raise RuntimeError("the agent does not serve")
        return self._consumer

    async def _take_all(
        self, records: Sequence[Record], desk: Desk, group: asyncio.TaskGroup
    ) -> None:
        """Give records just fetched to their lanes; those that cannot be given are fetched again.

        Those of a partition that moves meanwhile are left out, even if it comes back: it is read
        anew from its committed position then, and what lies before must not seem to be absent.
        """
        moves = self._moves.copy()
        for place, record in enumerate(records):
            try:
                lane = await self._lane_of(record, moves, desk, group)
            except BrokerUnavailable:
                left = {one.tp: one.offset for one in reversed(records[place:])}
                for tp, offset in left.items():
                    if self._moves[tp] == moves[tp]:
                        self._consumer_now.seek(tp, offset)
                raise
            if lane is not None:
                lane.put(record)

    async def _lane_of(
        self, record: Record, moves: Counter[TopicPartition], desk: Desk, group: asyncio.TaskGroup
    ) -> Lane | None:
        """Return the lane of a record, opened when it is its partition's first; None: it moved."""
        tp, consumer = record.tp, self._consumer_now
        if self._moves[tp] != moves[tp]:
            return None
        if tp in self._lanes:
            return self._lanes[tp][0]
        committed = await consumer.committed(tp)
        ends = await consumer.end_offsets()
        if self._moves[tp] != moves[tp] or tp not in ends:
            return None
        lane = Lane(
            tp=tp,
            tracker=OffsetTracker.restore(committed, record.offset),
            known_end=ends[tp],
            desk=desk,
            open_producer=self._producer_of,
            publisher=self._publisher,
            dead_letters=self._dead_letters,
            metrics=self._metrics,
            slots=self._slots,
            tombstone=self._tombstones.get,
        )
        self._lanes[tp] = (lane, group.create_task(lane.run(), name=f"lane-{tp.partition}"))
        return lane

    @asynccontextmanager
    async def _producer_of(self, tp: TopicPartition) -> AsyncIterator[Producer]:
        async with open_producer(
            self._broker,
            self._topics,
            self._clock,
            partition=tp.partition % self._num_replies,
            store=self._store,
            resume_as=f"{GROUP}-replies-{tp.partition}",
        ) as producer:
            yield producer

    def _apply_pause(self, consumer: Consumer) -> None:
        """Take no more questions while enough are open here: another agent may have room."""
        num_open = sum(lane.num_open for lane, _ in self._lanes.values())
        self._metrics.queries_open.set(num_open)
        is_full = num_open >= self._params.max_open
        if is_full and not self._is_paused:
            consumer.pause(*consumer.assignment())
        elif not is_full and self._is_paused:
            consumer.resume(*consumer.assignment())
        self._is_paused = is_full

    async def _commit(self, lanes: Sequence[Lane]) -> None:
        """Commit what has changed, and now and then what has not: positions expire."""
        now_s = self._clock.monotonic_s()
        for lane in lanes:
            position = lane.tracker.committable()
            if not lane.is_due(position, now_s):
                continue
            try:
                await self._consumer_now.commit({lane.tp: position})
            except (BrokerUnavailable, StaleAssignment) as exc:
                log.warning("commit_failed", partition=lane.tp.partition, error=str(exc))
                continue
            await try_keep(lane, position, now_s)

    async def _drain(self, consumer: Consumer) -> None:
        consumer.pause(*consumer.assignment())
        give_up_s = self._clock.monotonic_s() + self._params.drain_s
        while self._clock.monotonic_s() < give_up_s and any(
            lane.num_open for lane, _ in self._lanes.values()
        ):
            self._health.beat("queries")
            await asyncio.sleep(CHECK_S)
        await self._leave(list(self._lanes))

    async def _on_revoked(self, tps: Collection[TopicPartition]) -> None:
        self._moves.update(tps)
        await self._leave([tp for tp in tps if tp in self._lanes])

    async def _leave(self, tps: Collection[TopicPartition]) -> None:
        """End the lanes of partitions and commit what they did; open calls go on in the mesh.

        In this order: a result that is told but not committed would be told again by the next
        owner.
        """
        left = [self._lanes.pop(tp) for tp in tps]
        await _end({task for lane, _ in left for task in lane.leave()}, "results_left_late")
        await self._commit([lane for lane, _ in left])
        for _, task in left:
            task.cancel()
        await _end({task for _, task in left}, "lanes_left_late")

    def _on_cancellation(self, record: Record) -> None:
        try:
            tombstone = decode(record.value or b"", CancelQuery)
        except ContractError as exc:
            log.warning("cancellation_unreadable", detail=exc.detail)
            return
        if tombstone.until_s < self._clock.now_s():
            return
        self._tombstones[tombstone.query_id] = tombstone
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        for lane, _ in self._lanes.values():
            lane.cancel(tombstone.query_id, tombstone.reason)


async def _end(tasks: Collection[asyncio.Task[None]], event: str) -> None:
    """Wait for tasks to end, within a bound."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=LEAVE_WITHIN_S)
    if late:
        log.warning(event, num_tasks=len(late))
