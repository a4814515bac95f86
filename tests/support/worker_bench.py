"""One worker on real wiring: in-memory broker, real Lua scripts on Valkey, simulated engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from services.worker.app import build_worker
from services.worker.params import WorkerParams
from services.worker.worker import Worker
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.codec import decode, encode
from shared.contracts.messages import (
    BoundCall,
    CallOutcome,
    CancelQuery,
    DeadLetter,
    InstanceState,
    LatencyEvent,
    Message,
    ReplyTo,
    ScoreTerms,
    SimulatedLengths,
    StageRequest,
)
from shared.contracts.topics import (
    CANCELLATIONS,
    DEAD_LETTERS,
    INSTANCE_STATES,
    LATENCY_EVENTS,
    STAGE_REQUESTS,
    STAGE_RESULTS,
    Topics,
)
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.errors import MeshError
from shared.ports import Ack, Broker, Clock, Record, TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics

INSTANCE = "a100-0"
TOPICS = Topics(request_partitions=3, result_partitions=2, state_partitions=2)
SPEC = InstanceSpec(
    instance_id=INSTANCE,
    gpu="A100",
    kv_tokens=100_000,
    max_num_seqs=8,
    latency=LatencyModel(prefill_s_per_token=0.001, weights_s=0.1),
)
QUICK = WorkerParams(
    instance_id=INSTANCE,
    capacity=8,
    failure_pause_s=0.05,
    heartbeat_s=0.05,
    coalesce_s=0.005,
    commit_s=0.02,
    heal_s=0.05,
    recheck_s=0.02,
    drain_s=5.0,
    linger_s=0.05,
    abort_s=2.0,
    standby_s=0.2,
)
WITHIN_S = 60.0
M = TypeVar("M", bound=Message)


def bound_call(
    request_id: str,
    *,
    score: float = 0.0,
    t_comp_s: float = 1.0,
    output_tokens: int = 5,
    input_tokens: int = 50,
    deadline_s: float = 1e15,
    **fields: Any,
) -> BoundCall:
    """Return a call as a dispatcher binds it; `fields` go into its request."""
    given: dict[str, Any] = {
        "query_id": f"query-of-{request_id}",
        "model": "default",
        "prompt": "x",
        "arrival_s": 900.0,
        "slo_s": 100.0,
        "ready_at_s": 1_000.0,
        "t_slo_s": 10.0,
        "simulated": SimulatedLengths(input_tokens=input_tokens, output_tokens=output_tokens),
    }
    return BoundCall(
        request=StageRequest(request_id=request_id, **(given | fields)),
        queue_score=score,
        t_comp_s=t_comp_s,
        deadline_s=deadline_s,
        predicted_input_tokens=input_tokens,
        predicted_output_tokens=float(output_tokens),
        terms=ScoreTerms(policy="flow", score=1.0, t_queue_s=0.5, t_comp_s=t_comp_s, alpha=0.2),
        dispatched_at_s=1_001.0,
        dispatcher_id="d",
    )


@dataclass
class Bench:
    """What a test of the worker handles."""

    broker: Broker
    store: RedisStore
    engine: SimulatedEngine
    clock: SystemClock
    spec: InstanceSpec = SPEC
    metrics: Metrics = field(default_factory=lambda: Metrics("worker", INSTANCE))
    health: Health = field(init=False)

    async def send(self, *calls: BoundCall) -> list[Ack]:
        """Publish calls on the instance's topic, in order."""
        return [
            await self.broker.publish(TOPICS.instance(INSTANCE), encode(call)) for call in calls
        ]

    async def send_raw(self, value: bytes) -> Ack:
        """Publish bytes on the instance's topic."""
        return await self.broker.publish(TOPICS.instance(INSTANCE), value)

    async def cancel(self, query_id: str, reason: str = "the user left") -> None:
        """Publish a tombstone that lasts."""
        tombstone = CancelQuery(query_id=query_id, until_s=1e15, reason=reason)
        await self.broker.publish(
            TOPICS.name(CANCELLATIONS), encode(tombstone), key=query_id.encode()
        )

    async def fence(self) -> None:
        """Publish a recovery owner's fence for the instance."""
        await self.publish_state(phase="gone")

    async def publish_state(self, **fields: Any) -> None:
        """Publish a state of the instance, as somebody else would."""
        given: dict[str, Any] = {"instance_id": INSTANCE, "spec": self.spec}
        state = InstanceState(**(given | fields))
        await self.broker.publish(
            TOPICS.name(INSTANCE_STATES), encode(state), key=INSTANCE.encode()
        )

    async def records(self, full_name: str) -> list[Record]:
        """Return everything on a topic."""
        found: list[Record] = []
        for index in range(await self.broker.partitions_of(full_name)):
            tp = TopicPartition(full_name, index)
            async with self.broker.partition_consumer([tp], start="beginning") as reader:
                while records := await reader.fetch(timeout_s=0):
                    found += records
        return found

    async def messages(self, topic: str, cls: type[M]) -> list[M]:
        """Return every message on a topic that is of a class, in order per partition."""
        return [decode(r.value, cls) for r in await self.records(TOPICS.name(topic)) if r.value]

    async def outcomes(self) -> list[CallOutcome]:
        """Return every outcome."""
        return await self.messages(STAGE_RESULTS, CallOutcome)

    async def handed_back(self) -> list[StageRequest]:
        """Return every call on `stage-requests`."""
        return await self.messages(STAGE_REQUESTS, StageRequest)

    async def states(self) -> list[InstanceState]:
        """Return every state that is kept."""
        return await self.messages(INSTANCE_STATES, InstanceState)

    async def dead_letters(self) -> list[DeadLetter]:
        """Return every dead letter."""
        return await self.messages(DEAD_LETTERS, DeadLetter)

    async def events(self) -> list[LatencyEvent]:
        """Return every latency event."""
        return await self.messages(LATENCY_EVENTS, LatencyEvent)

    async def committed(self) -> tuple[int, str]:
        """Return the committed offset of the instance's topic and its metadata."""
        tp = TopicPartition(TOPICS.instance(INSTANCE), 0)
        async with self.broker.partition_consumer(
            [tp], start="end", group=TOPICS.worker_group(INSTANCE)
        ) as reader:
            found = await reader.committed(tp)
        return (0, "") if found is None else (found.offset, found.metadata)

    async def outcomes_once(self, count: int) -> list[CallOutcome]:
        """Return the outcomes as soon as there are at least `count`."""
        found: list[CallOutcome] = await until(self.outcomes, lambda found: len(found) >= count)
        return found

    async def running(self, count: int) -> None:
        """Return when the engine has been given at least `count` calls in all."""
        await until(self._started, lambda found: found >= count)

    async def waiting(self, count: int) -> None:
        """Return when the urgency set holds this many waiting calls."""
        index = self.store.urgency_set(INSTANCE)
        await until(index.sizes, lambda sizes: sizes[0] == count)

    async def _started(self) -> float:
        return self.metrics.totals().get("hexflow_calls_started_total{}", 0.0)

    @asynccontextmanager
    async def worker(self, params: WorkerParams = QUICK) -> AsyncIterator["RunningWorker"]:
        """Run a worker, with a health of its own; it is drained when the block ends."""
        self.health = Health(self.clock)
        worker = build_worker(
            broker=self.broker,
            store=self.store,
            engine=self.engine,
            clock=self.clock,
            topics=TOPICS,
            params=params,
            metrics=self.metrics,
            health=self.health,
        )
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_serve(worker, stop), name="worker")
            running = RunningWorker(task, stop)
            await until(self._is_ready, lambda is_ready: is_ready or task.done())
            try:
                yield running
            finally:
                stop.set()

    async def _is_ready(self) -> bool:
        return not self.health.unready_causes()


@dataclass
class RunningWorker:
    """A worker that serves."""

    task: "asyncio.Task[MeshError | None]"
    stop: asyncio.Event

    async def drained(self) -> None:
        """Tell it to stop; returns when it has."""
        self.stop.set()
        async with asyncio.timeout(WITHIN_S):
            await asyncio.wait({self.task})

    async def crash(self) -> MeshError | None:
        """Return the error it ends with by itself."""
        async with asyncio.timeout(WITHIN_S):
            await asyncio.wait({self.task})
        return self.task.result()

    async def killed(self) -> None:
        """End it as a crash would: nothing is finished, committed or said."""
        self.task.cancel()
        await asyncio.wait({self.task})


async def _serve(worker: Worker, stop: asyncio.Event) -> MeshError | None:
    try:
        await worker.serve(stop)
    except MeshError as exc:
        return exc
    return None


async def until(ask: Callable[[], Any], is_enough: Callable[[Any], bool]) -> Any:
    """Ask again and again until the answer will do, and return it."""
    async with asyncio.timeout(WITHIN_S):
        while not is_enough(answer := await ask()):
            await asyncio.sleep(0.005)
    return answer


@asynccontextmanager
async def open_bench(
    redis_url: str,
    prefix: str,
    *,
    time_scale: float = 100.0,
    spec: InstanceSpec = SPEC,
    make_broker: Callable[[Clock], MemoryBroker] = MemoryBroker,
    wrap: Callable[[Broker], Broker] = lambda broker: broker,
    topics: Topics = TOPICS,
) -> AsyncIterator[Bench]:
    """Open adapters for one test; the mesh's topics and the instance's own exist."""
    clock = SystemClock(time_scale=time_scale)
    broker = make_broker(clock)
    await broker.create_topics([*topics.specs(), topics.instance_spec(INSTANCE)])
    async with (
        RedisStore.open(RedisParams(url=redis_url, prefix=prefix, timeout_s=0.5)) as store,
        SimulatedEngine.open(spec, clock) as engine,
    ):
        yield Bench(broker=wrap(broker), store=store, engine=engine, clock=clock, spec=spec)


def altered(params: WorkerParams = QUICK, **changes: Any) -> WorkerParams:
    """Return parameters with some changed."""
    return replace(params, **changes)


def reply_to(topic: str, partition: int = 0) -> ReplyTo:
    """Return a reply address."""
    return ReplyTo(topic=topic, partition=partition)


def replaced(call: BoundCall, **fields: Any) -> BoundCall:
    """Return a call whose request has other fields."""
    request = msgspec.structs.replace(call.request, **fields)
    return msgspec.structs.replace(call, request=request)
