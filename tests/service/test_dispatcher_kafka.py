"""Two dispatchers on real Apache Kafka: partitions move, one dies, an instance dies."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.dispatcher.app import build_dispatcher
from services.dispatcher.params import DispatcherParams
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from shared.contracts.codec import decode, encode
from shared.contracts.messages import BoundCall, InstanceState, StageRequest
from shared.contracts.topics import INSTANCE_STATES, STAGE_REQUESTS, Topics
from shared.ports import TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from tests.support.dispatching import make_request
from tests.support.scheduling import make_spec
from tests.support.servers import KafkaServer

pytestmark = pytest.mark.slow


class RealMesh:
    """Topics of one test on the shared broker, and instances played by the test."""

    def __init__(self, server: KafkaServer) -> None:
        self.params = KafkaParams(bootstrap_servers=server.bootstrap)
        self.topics = Topics(
            prefix=f"disp{secrets.token_hex(4)}.", request_partitions=6, state_partitions=2
        )
        self.clock = SystemClock()

    @asynccontextmanager
    async def dispatcher(self, name: str) -> AsyncIterator["asyncio.Task[None]"]:
        """Run a dispatcher with a connection of its own; stopped cleanly unless cancelled."""
        health = Health(self.clock)
        stop = asyncio.Event()

        async def run() -> None:
            async with KafkaBroker.open(self.params) as broker:
                params = DispatcherParams(
                    dispatcher_id=name,
                    dead_after_s=4.0,
                    live_s=3.0,
                    max_attempts=20,
                    admission=False,
                )
                await build_dispatcher(
                    broker=broker,
                    clock=self.clock,
                    topics=self.topics,
                    params=params,
                    metrics=Metrics("dispatcher"),
                    health=health,
                ).serve(stop)

        async with asyncio.TaskGroup() as group:
            task = group.create_task(run(), name=name)
            await until(lambda: task.done() or not health.unready_causes())
            yield task
            stop.set()


@asynccontextmanager
async def beating(mesh: RealMesh, broker: KafkaBroker, *names: str) -> AsyncIterator[set[str]]:
    """Play instances that give heartbeats; take a name out of the set to let it die."""
    await broker.create_topics([mesh.topics.instance_spec(name) for name in names])
    alive = set(names)
    epochs: dict[str, int] = {}

    async def say(name: str, phase: str) -> int:
        state = InstanceState(
            instance_id=name,
            phase=phase,  # type: ignore[arg-type]
            epoch=epochs.get(name, -1),
            spec=make_spec(name),
        )
        topic = mesh.topics.name(INSTANCE_STATES)
        return (await broker.publish(topic, encode(state), key=name.encode())).offset

    async def beat() -> None:
        while True:
            for name in sorted(alive):
                await say(name, "serving")
            await asyncio.sleep(0.5)

    for name in names:
        epochs[name] = await say(name, "begin")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(beat(), name="beat")
        yield alive
        task.cancel()


async def until(fact: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until a fact, plain or async, holds; return its value."""
    async with asyncio.timeout(seconds):
        while True:
            value = fact()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.1)


async def read(broker: KafkaBroker, topic: str) -> list[bytes]:
    """Return the values of a topic."""
    tps = [TopicPartition(topic, p) for p in range(await broker.partitions_of(topic))]
    found: list[bytes] = []
    async with broker.partition_consumer(tps, start="beginning") as consumer:
        left = dict(await consumer.end_offsets())
        while any([await consumer.position(tp) < end for tp, end in left.items()]):
            found += [r.value or b"" for r in await consumer.fetch(timeout_s=0.5)]
    return found


async def bound(mesh: RealMesh, broker: KafkaBroker, *names: str) -> Counter[tuple[str, int]]:
    """Return how often each delivery was bound to an instance."""
    keys: Counter[tuple[str, int]] = Counter()
    for name in names:
        for value in await read(broker, mesh.topics.instance(name)):
            request = decode(value, BoundCall).request
            keys[request.request_id, request.attempt] += 1
    return keys


async def submit(mesh: RealMesh, broker: KafkaBroker, first: int, count: int) -> None:
    """Publish calls as a producer does."""
    topic = mesh.topics.name(STAGE_REQUESTS)
    async with asyncio.TaskGroup() as group:
        for index in range(first, first + count):
            request = make_request(f"r{index}")
            group.create_task(
                broker.publish(topic, encode(request), key=request.query_id.encode()),
                name="submit",
            )


async def test_no_call_is_lost_while_dispatchers_come_and_go(kafka_server: KafkaServer):
    """Partitions move between two dispatchers, one of which dies: every call is bound."""
    mesh = RealMesh(kafka_server)
    async with KafkaBroker.open(mesh.params) as broker:
        await broker.create_topics(mesh.topics.specs())
        async with beating(mesh, broker, "a", "b"), mesh.dispatcher("d1"):
            await submit(mesh, broker, 0, 200)
            async with mesh.dispatcher("d2") as second:
                await submit(mesh, broker, 200, 200)
                await asyncio.sleep(1)
                await submit(mesh, broker, 400, 200)
                second.cancel()
                await asyncio.wait({second})
            await submit(mesh, broker, 600, 200)

            async def all_bound() -> Counter[tuple[str, int]] | None:
                keys = await bound(mesh, broker, "a", "b")
                return keys if len(keys) == 800 else None

            keys = await until(all_bound)
            assert keys.keys() == {(f"r{i}", 0) for i in range(800)}
            assert keys.total() < 1_000  # what was in flight may come twice, not everything
            await until(lambda: _is_committed(mesh, broker))


async def _is_committed(mesh: RealMesh, broker: KafkaBroker) -> bool:
    topic = mesh.topics.name(STAGE_REQUESTS)
    tps = [TopicPartition(topic, p) for p in range(6)]
    async with broker.partition_consumer(
        tps, start="committed", group=mesh.topics.group("dispatcher")
    ) as consumer:
        ends = await consumer.end_offsets()
        found = [await consumer.committed(tp) for tp in tps]
    return all(c is not None and c.offset == ends[tp] for tp, c in zip(tps, found, strict=True))


async def test_the_calls_of_a_dead_instance_go_to_another(kafka_server: KafkaServer):
    """Silence, fence, hand-back and re-dispatch, with two recovery owners on real partitions."""
    mesh = RealMesh(kafka_server)
    async with KafkaBroker.open(mesh.params) as broker:
        await broker.create_topics(mesh.topics.specs())
        async with (
            beating(mesh, broker, "a", "b") as alive,
            mesh.dispatcher("d1"),
            mesh.dispatcher("d2"),
        ):
            await submit(mesh, broker, 0, 40)
            await until(lambda: _bound_at_least(mesh, broker, 40))
            held = await bound(mesh, broker, "a")
            assert held
            alive.discard("a")

            async def rescued() -> bool:
                return {(key, 1) for key, _ in held} <= set(await bound(mesh, broker, "b"))

            await until(rescued)
            requests = [
                decode(value, StageRequest)
                for value in await read(broker, mesh.topics.name(STAGE_REQUESTS))
            ]
            again = Counter(r.request_id for r in requests if r.attempt == 1)
            assert again == Counter(key for key, _ in held)


async def _bound_at_least(mesh: RealMesh, broker: KafkaBroker, count: int) -> bool:
    return (await bound(mesh, broker, "a", "b")).total() >= count
