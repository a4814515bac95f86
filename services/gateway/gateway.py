"""The gateway: what it follows, what it serves, and in which order it starts and stops.

Stopping order: unready, take requests for a little longer, stop accepting, finish open calls and
questions within the drain bound, publish the tombstones of those that were cut off, close.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import structlog
from starlette.types import ASGIApp

from services.gateway.access import Access
from services.gateway.admission import Admission
from services.gateway.agents import Agents
from services.gateway.board import Board
from services.gateway.call_routes import CallRoutes
from services.gateway.calls import CallDesk
from services.gateway.chunk_reader import ChunkReader
from services.gateway.dead_letters import MAX_LETTERS, DeadLetterDesk
from services.gateway.fleet import Fleet
from services.gateway.live import Live
from services.gateway.mesh_routes import MeshRoutes
from services.gateway.metrics import GatewayMetrics
from services.gateway.middleware import loopback_names
from services.gateway.open_requests import OpenRequests
from services.gateway.params import GatewayParams
from services.gateway.query_desk import QueryDesk
from services.gateway.query_memory import QueryMemory
from services.gateway.query_records import QueryRecords
from services.gateway.query_routes import QueryRoutes
from services.gateway.result_recorder import ResultRecorder
from services.gateway.routing import application
from services.gateway.server import serving
from services.gateway.waiting import WaitingLines
from shared.contracts.codec import decode_any
from shared.contracts.messages import (
    AlphaUpdate,
    CallOutcome,
    InstanceState,
    LatencyEvent,
    RecoveryProbe,
    SpeedUpdate,
    StageRequest,
    WorkflowProfile,
)
from shared.contracts.query_window import implausible
from shared.contracts.topics import (
    CONTROL,
    DEAD_LETTERS,
    INSTANCE_STATES,
    LATENCY_EVENTS,
    Topics,
)
from shared.errors import ContractError
from shared.ports import Broker, Clock, Record, StateStore, TopicPartition
from shared.runtime.health import Health
from shared.runtime.tables import Follower, counting, follow_topic
from shared.runtime.tracing import NO_TRACES, Traces
from shared.sdk import Producer, Questions, open_producer, open_questions

REMEMBERED_QUERIES = 20_000
MAX_EVENTS = 20_000
CANCELS_WITHIN_S = 5.0
CHECK_S = 0.05
REPORT_S = 1.0
Start = Callable[[Coroutine[None, None, None], str], None]
log = structlog.get_logger(__name__)


class Gateway:
    """Serves HTTP in front of a mesh.

    Args:
        broker: The mesh's broker.
        store: The mesh's state store.
        clock: Mesh clock.
        topics: Names.
        params: How it behaves.
        metrics: What it counts.
        health: Whether it is ready.
        drain_s: Longest time for open calls and questions at the end, wall seconds.
        linger_s: How much of it new requests are still taken, wall seconds.
        traces: Where spans go.

    Raises:
        ConfigError: The keys file is wrong.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        store: StateStore,
        clock: Clock,
        topics: Topics,
        params: GatewayParams,
        metrics: GatewayMetrics,
        health: Health,
        drain_s: float,
        linger_s: float = 0.0,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._broker = broker
        self._store = store
        self._clock = clock
        self._topics = topics
        self._params = params
        self.metrics = metrics
        self._health = health
        self._drain_s = drain_s
        self._linger_s = linger_s
        self._is_local = True
        self._traces = traces
        self.access = Access(params.keys_file, clock, params.keys_check_s, metrics)
        self.fleet = Fleet(clock)
        self.board = Board(params.max_queries, params.quiet_s)
        self.letters = DeadLetterDesk(broker, topics, clock)
        self.agents = Agents(store, clock)
        self.live = Live(
            board=self.board,
            fleet=self.fleet,
            letters=self.letters,
            agents=self.agents,
            lines=WaitingLines(store, clock),
            clock=clock,
            params=params,
        )
        self.desk: CallDesk | None = None
        """The calls; None before the gateway serves."""
        self.query_desk: QueryDesk | None = None
        """The questions; None before the gateway serves."""

    async def serve(self, sock: socket.socket, stop: asyncio.Event) -> None:
        """Serve on a listening socket until `stop` is set."""
        self._is_local = ipaddress.ip_address(sock.getsockname()[0]).is_loopback
        # Whatever reads ends before its consumer is closed: tasks inside, consumers outside.
        async with AsyncExitStack() as stack, _background() as start:
            await self._follow_tables(stack, start)
            await self._follow_tail(stack, start, LATENCY_EVENTS, self._on_event, MAX_EVENTS)
            await self._follow_tail(stack, start, DEAD_LETTERS, self.letters.take, MAX_LETTERS)
            producer = await stack.enter_async_context(
                open_producer(
                    self._broker,
                    self._topics,
                    self._clock,
                    partition=self._params.reply_partition,
                    store=self._store,
                )
            )
            questions = await stack.enter_async_context(
                open_questions(
                    self._broker,
                    self._topics,
                    self._clock,
                    partition=self._params.reply_partition,
                    store=self._store,
                )
            )
            requests = OpenRequests()
            desk, app = self._application(producer, questions, requests, start)
            async with serving(
                app,
                sock,
                requests,
                header_timeout_s=self._params.header_timeout_s,
                drain_s=self._drain_s,
                linger_s=self._linger_s,
            ):
                self._health.clear()
                log.info("gateway_serving", address=sock.getsockname())
                await stop.wait()
                self._health.block("stop", "draining")
                self.live.end()
                end_s = self._clock.monotonic_s() + self._drain_s
            await self._questions_ended(end_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCELS_WITHIN_S):
                    await desk.cancels_sent()
        log.info("gateway_drained", **desk.counts)

    def _application(
        self, producer: Producer, questions: Questions, requests: OpenRequests, start: Start
    ) -> tuple[CallDesk, ASGIApp]:
        params, clock = self._params, self._clock
        chunks = ChunkReader(self._store)
        memory = QueryMemory(REMEMBERED_QUERIES)
        desk = CallDesk(producer, chunks, clock, params, memory, self._on_unbound)
        self.desk = desk
        start(chunks.run(), "chunks")
        start(desk.run(), "cancels")
        start(self.access.follow(), "keys")
        start(self.live.run(), "live")
        admission = Admission(
            clock,
            max_open=params.max_open,
            max_waiting=params.max_waiting,
            retry_after_s=params.retry_after_s,
        )
        calls = CallRoutes(
            desk=desk,
            fleet=self.fleet,
            access=self.access,
            admission=admission,
            memory=memory,
            clock=clock,
            params=params,
            metrics=self.metrics,
        )
        mesh = MeshRoutes(
            live=self.live,
            board=self.board,
            letters=self.letters,
            access=self.access,
            clock=clock,
            shows_text=params.shows_text,
        )
        records = QueryRecords(self._store)
        self.query_desk = QueryDesk(questions, chunks, records, clock, params)
        start(self.query_desk.run(), "queries")
        recorder = ResultRecorder(
            self._broker, self._topics, records, self._health, self._params.gateway_id
        )
        start(recorder.run(), "results")
        start(self.agents.run(), "agents")
        queries = QueryRoutes(
            desk=self.query_desk,
            access=self.access,
            admission=admission,
            agents=self.agents,
            fleet=self.fleet,
            params=params,
        )
        start(self._report(desk), "report")
        return desk, application(
            calls, queries, mesh, self.metrics, self._is_host_allowed, requests, self._traces
        )

    async def _questions_ended(self, end_s: float) -> None:
        """Return when no question is open, or at `end_s` (monotonic wall seconds).

        Other gateways record the results of those that are left, but may not be there.
        """
        desk = self.query_desk
        while desk is not None and desk.num_open and self._clock.monotonic_s() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(CHECK_S)

    def _is_host_allowed(self, host: str) -> bool:
        return not (self._is_local and self.access.tenants.is_open) or loopback_names(host)

    async def _report(self, desk: CallDesk) -> None:
        """Keep the gauges up to date; runs until cancelled."""
        while True:
            self.metrics.open_calls.set(desk.num_open)
            self.metrics.event_clients.set(self.live.num_clients)
            await self._clock.sleep_wall(REPORT_S)

    async def _follow_tables(self, stack: AsyncExitStack, start: Start) -> None:
        """Follow the mesh's tables; returns when they are read up to the present."""
        tables: dict[str, Callable[[Record], None]] = {
            INSTANCE_STATES: self._on_state,
            CONTROL: self._on_control,
        }
        for topic, take in tables.items():
            name = f"follow-{topic}"
            follower = await stack.enter_async_context(
                follow_topic(
                    self._broker,
                    self._topics.name(topic),
                    counting(self.metrics, topic, take),
                    lambda pulse=name: self._health.beat(pulse),  # type: ignore[misc]
                )
            )
            start(follower.follow(asyncio.Event()), name)
            await follower.caught_up()

    async def _follow_tail(
        self,
        stack: AsyncExitStack,
        start: Start,
        topic: str,
        take: Callable[[Record], None],
        num_records: int,
    ) -> None:
        """Follow a log from its last records on."""
        name = self._topics.name(topic)
        count = await self._broker.partitions_of(name)
        partitions = [TopicPartition(name, index) for index in range(count)]
        consumer = await stack.enter_async_context(
            self._broker.partition_consumer(partitions, start="end")
        )
        first = await consumer.beginning_offsets()
        for tp, end in (await consumer.end_offsets()).items():
            consumer.seek(tp, max(first[tp], end - num_records))
        pulse = f"follow-{topic}"
        follower = Follower(
            consumer, counting(self.metrics, topic, take), lambda: self._health.beat(pulse)
        )
        start(follower.follow(asyncio.Event()), pulse)
        await follower.caught_up()

    def _on_event(self, record: Record) -> None:
        found = _read(record, LatencyEvent)
        if isinstance(found, LatencyEvent) and implausible(found) is None:
            self.board.take(found)

    def _on_unbound(self, request: StageRequest, outcome: CallOutcome) -> None:
        self.board.take(event_of(request, outcome))

    def _on_state(self, record: Record) -> None:
        if record.value is None:
            instance_id = (record.key or b"").decode(errors="replace")
            self.fleet.forget(instance_id)
            self.board.forget_instance(instance_id)
            return
        state = _read(record, InstanceState, RecoveryProbe)
        if isinstance(state, InstanceState):
            self.fleet.take(record.offset, state)

    def _on_control(self, record: Record) -> None:
        update = _read(record, AlphaUpdate, WorkflowProfile, SpeedUpdate)
        if isinstance(update, SpeedUpdate):
            self.fleet.speeds[update.instance_id] = update
        elif isinstance(update, AlphaUpdate):
            self.board.take_alpha(update)


@asynccontextmanager
async def _background() -> AsyncIterator[Start]:
    """Run tasks until the block ends."""
    tasks: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as group:
        try:
            yield lambda work, name: tasks.append(group.create_task(work, name=name))
        finally:
            for task in tasks:
                task.cancel()


def _read(record: Record, *classes: type) -> object:
    try:
        return decode_any(record.value or b"", *classes)
    except ContractError:
        return None


def event_of(request: StageRequest, outcome: CallOutcome) -> LatencyEvent:
    """Return the event of a call that no instance had, as a worker would tell of it."""
    ended_s = outcome.times.finished_at_s
    arrival_s = request.arrival_s or outcome.times.ready_at_s or ended_s or 0.0
    slo_s = request.slo_s
    if slo_s is None:
        slo_s = outcome.deadline_s - arrival_s if outcome.deadline_s is not None else 1.0
    return LatencyEvent(
        request_id=request.request_id,
        query_id=request.effective_query_id,
        workflow=request.workflow,
        stage=request.stage,
        iteration=request.iteration,
        sibling=request.sibling,
        siblings=request.siblings,
        parents=request.parents,
        tenant=request.tenant,
        model=request.model,
        kind=outcome.kind,
        reason=outcome.reason,
        attempt=outcome.attempt,
        arrival_s=arrival_s,
        slo_s=slo_s,
        times=outcome.times,
        t_slo_s=outcome.t_slo_s or 0.0,
    )
