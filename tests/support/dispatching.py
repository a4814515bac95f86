"""A dispatcher on the in-process broker, with instances that are played by the test."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from services.dispatcher.app import build_dispatcher
from services.dispatcher.params import DispatcherParams
from shared.adapters.clock import ManualClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.codec import decode, encode
from shared.contracts.messages import (
    BoundCall,
    CallOutcome,
    DeadLetter,
    InstanceState,
    Message,
    ReplyTo,
    StageRequest,
)
from shared.contracts.topics import (
    DEAD_LETTERS,
    INSTANCE_STATES,
    STAGE_REQUESTS,
    STAGE_RESULTS,
    Topics,
    TopicSpec,
)
from shared.errors import BrokerUnavailable
from shared.ports import (
    Ack,
    AssignedHook,
    Committed,
    Consumer,
    Record,
    RevokedHook,
    StartAt,
    TopicPartition,
)
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from tests.support.scheduling import make_spec

TOPICS = Topics(prefix="t.", request_partitions=3, result_partitions=4, state_partitions=2)


def make_request(request_id: str, **fields: Any) -> StageRequest:
    """Return a valid call of its own query."""
    values: dict[str, Any] = {
        "model": "default",
        "query_id": f"q-{request_id}",
        "prompt": "a prompt of some length",
        "reply_to": ReplyTo(partition=1),
        "slo_s": 60.0,
    }
    return StageRequest(request_id=request_id, **(values | fields))


class WeakBroker:
    """A broker that can be cut off: nothing gets in or out while `is_down`.

    Args:
        broker: The broker behind it.
    """

    def __init__(self, broker: MemoryBroker) -> None:
        self.inner = broker
        self.is_down = False
        self.refuse_publish: Callable[[str], bool] = lambda _: False
        self.hooks: dict[str, RevokedHook] = {}
        self.consumers: dict[str, Consumer] = {}
        self.dismissed: list[tuple[str, str]] = []

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Ack:
        """Publish unless cut off."""
        if self.is_down or self.refuse_publish(topic):
            raise BrokerUnavailable("cut off")
        return await self.inner.publish(topic, value, key=key, partition=partition, headers=headers)

    @asynccontextmanager
    async def group_consumer(
        self,
        topics: Sequence[str],
        group: str,
        *,
        on_assigned: AssignedHook | None = None,
        on_revoked: RevokedHook | None = None,
    ) -> AsyncIterator[Consumer]:
        """Open a group consumer that can be cut off, and keep its hook."""
        async with self.inner.group_consumer(
            topics, group, on_assigned=on_assigned, on_revoked=on_revoked
        ) as consumer:
            if on_revoked is not None:
                self.hooks[group] = on_revoked
            self.consumers[group] = consumer
            yield WeakConsumer(self, consumer)

    @asynccontextmanager
    async def partition_consumer(
        self, partitions: Sequence[TopicPartition], *, start: StartAt, group: str | None = None
    ) -> AsyncIterator[Consumer]:
        """Open a consumer that can be cut off."""
        async with self.inner.partition_consumer(partitions, start=start, group=group) as consumer:
            yield WeakConsumer(self, consumer)

    async def dismiss(self, group: str, client_id: str) -> int:
        """Note who was to be removed from which group."""
        self.dismissed.append((group, client_id))
        return await self.inner.dismiss(group, client_id)

    async def partitions_of(self, topic: str) -> int:
        """Return the number of partitions."""
        return await self.inner.partitions_of(topic)

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create topics."""
        return await self.inner.create_topics(specs)

    async def describe_topics(self) -> dict[str, TopicSpec]:
        """Describe topics."""
        return await self.inner.describe_topics()

    async def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics."""
        await self.inner.delete_topics(names)


class WeakConsumer:
    """A consumer that answers nothing while its broker is cut off."""

    def __init__(self, broker: WeakBroker, inner: Consumer) -> None:
        self._broker = broker
        self._inner = inner

    async def fetch(self, *, max_records: int = 500, timeout_s: float = 0.2) -> list[Record]:
        """Fetch unless cut off."""
        self._check()
        return await self._inner.fetch(max_records=max_records, timeout_s=min(timeout_s, 0.02))

    async def commit(self, positions: Mapping[TopicPartition, Committed]) -> None:
        """Commit unless cut off."""
        self._check()
        await self._inner.commit(positions)

    async def committed(self, tp: TopicPartition) -> Committed | None:
        """Return the committed position unless cut off."""
        self._check()
        return await self._inner.committed(tp)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _check(self) -> None:
        if self._broker.is_down:
            raise BrokerUnavailable("cut off")


class Instance:
    """An instance played by the test.

    Args:
        mesh: Where it lives.
        instance_id: Its id.
        fields: Fields of its spec.
    """

    def __init__(self, mesh: "Mesh", instance_id: str, fields: dict[str, Any]) -> None:
        self._mesh = mesh
        self.instance_id = instance_id
        self.spec = make_spec(instance_id, **fields)
        self.epoch = -1

    async def begin(self) -> int:
        """Begin a new life; returns its epoch."""
        self.epoch = -1
        self.epoch = await self.say("begin")
        return self.epoch

    async def say(self, phase: str = "serving", **fields: Any) -> int:
        """Publish a state and return its offset."""
        state = InstanceState(
            instance_id=self.instance_id,
            phase=phase,  # type: ignore[arg-type]
            epoch=self.epoch,
            spec=self.spec,
            **fields,
        )
        return (await self._mesh.publish(INSTANCE_STATES, state, key=self.instance_id)).offset

    async def received(self) -> list[BoundCall]:
        """Return every call on its topic."""
        records = await self._mesh.records(f"instance.{self.instance_id}")
        return [decode(record.value or b"", BoundCall) for record in records]


class Mesh:
    """Broker, clock, topics, and what the tests read from them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.broker = WeakBroker(MemoryBroker(self.clock))
        self.topics = TOPICS
        self.instances: dict[str, Instance] = {}

    async def open(self) -> "Mesh":
        """Create the topics."""
        await self.broker.create_topics(TOPICS.specs())
        return self

    async def instance(
        self, instance_id: str = "a", *, topic: bool = True, **spec: Any
    ) -> Instance:
        """Add an instance that serves."""
        if topic:
            await self.broker.create_topics([TOPICS.instance_spec(instance_id)])
        found = self.instances[instance_id] = Instance(self, instance_id, spec)
        await found.begin()
        await found.say()
        return found

    async def publish(self, topic: str, message: Message, **where: Any) -> Ack:
        """Publish a message past the weak broker."""
        key = where.pop("key", None)
        return await self.broker.inner.publish(
            TOPICS.name(topic), encode(message), key=key and key.encode(), **where
        )

    async def submit(self, *requests: StageRequest) -> None:
        """Publish calls as a producer does."""
        for request in requests:
            await self.publish(STAGE_REQUESTS, request, key=request.effective_query_id)

    async def submit_raw(self, raw: bytes, partition: int = 0) -> None:
        """Publish bytes on `stage-requests`."""
        await self.broker.inner.publish(TOPICS.name(STAGE_REQUESTS), raw, partition=partition)

    async def records(self, topic: str) -> list[Record]:
        """Return all records of a topic (short name), by partition and offset."""
        name = TOPICS.name(topic)
        count = await self.broker.partitions_of(name)
        tps = [TopicPartition(name, index) for index in range(count)]
        found: list[Record] = []
        async with self.broker.inner.partition_consumer(tps, start="beginning") as consumer:
            while batch := await consumer.fetch(max_records=10_000, timeout_s=0):
                found += batch
        return sorted(found, key=lambda record: (record.tp, record.offset))

    async def outcomes(self) -> list[CallOutcome]:
        """Return every outcome."""
        return [decode(r.value or b"", CallOutcome) for r in await self.records(STAGE_RESULTS)]

    async def dead_letters(self) -> list[DeadLetter]:
        """Return every dead letter."""
        return [decode(r.value or b"", DeadLetter) for r in await self.records(DEAD_LETTERS)]

    async def requests(self) -> list[StageRequest]:
        """Return every readable call on `stage-requests`."""
        return [decode(r.value or b"", StageRequest) for r in await self.records(STAGE_REQUESTS)]

    async def bound(self) -> list[BoundCall]:
        """Return every call on every instance's topic."""
        names = await self.broker.describe_topics()
        return [
            call
            for instance in self.instances.values()
            if TOPICS.instance(instance.instance_id) in names
            for call in await instance.received()
        ]

    def committed(self, topic: str, group: str = "dispatcher", partition: int = 0) -> int:
        """Return a group's committed offset, 0 when there is none."""
        tp = TopicPartition(TOPICS.name(topic), partition)
        found = self.broker.inner.committed(TOPICS.group(group), tp)
        return found.offset if found else 0

    async def until(self, fact: Callable[[], Any], *, seconds: float = 20.0) -> Any:
        """Wait (real time) until `fact`, plain or async, holds; return its value."""
        async with asyncio.timeout(seconds):
            while True:
                value = fact()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(0.002)

    async def pass_time(self, seconds: float, *, beating: Sequence[Instance] = ()) -> None:
        """Let wall time pass in steps of half a second; `beating` instances give heartbeats."""
        for _ in range(round(seconds / 0.5)):
            for instance in beating:
                if not self.broker.is_down:
                    await instance.say()
            await self.clock.advance(0.5)
            await asyncio.sleep(0.004)  # readers that wait for the real loop get their turn
            await self.clock.settle()

    async def pass_time_until(
        self, fact: Callable[[], Any], *, beating: Sequence[Instance] = ()
    ) -> Any:
        """Let time pass until an async fact holds; return its value."""
        async with asyncio.timeout(60):
            while not (value := await fact()):
                await self.pass_time(0.5, beating=beating)
            return value

    def running(self, **params: Any) -> AbstractAsyncContextManager["Running"]:
        """Run a dispatcher while the context is open; it is stopped cleanly at its end.

        Nobody is declared dead unless `dead_after_s` is given, and every query is let in unless
        `admission` is.
        """
        params.setdefault("admission", False)
        params.setdefault("peer_silence_s", 2.0)
        params.setdefault("probe_interval_s", 1.0)  # compaction must not outrun the tests
        params.setdefault("dead_after_s", 1e9)
        self.metrics, self.health = Metrics("dispatcher"), Health(self.clock)
        return _running(self, DispatcherParams(dispatcher_id=params.pop("id", "d1"), **params))


class Running:
    """A running dispatcher."""

    def __init__(self, task: "asyncio.Task[None]", stop: asyncio.Event) -> None:
        self._task = task
        self._stop = stop

    async def kill(self) -> None:
        """End it without any of its clean-up becoming visible to others."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def stop(self) -> None:
        """Stop it cleanly."""
        self._stop.set()
        await asyncio.wait({self._task})


@asynccontextmanager
async def _running(mesh: Mesh, params: DispatcherParams) -> AsyncIterator[Running]:
    dispatcher = build_dispatcher(
        broker=mesh.broker,
        clock=mesh.clock,
        topics=mesh.topics,
        params=params,
        metrics=mesh.metrics,
        health=mesh.health,
    )
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(dispatcher.serve(stop), name="dispatcher")
        ready = group.create_task(
            mesh.until(lambda: task.done() or not mesh.health.unready_causes()), name="ready"
        )
        await ready
        yield Running(task, stop)
        stop.set()
