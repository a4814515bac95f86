"""What a worker survives: its own death, a wiped store, an absent broker, a newer life."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from shared.adapters.embedded_redis import EmbeddedRedis
from shared.adapters.memory_broker import MemoryBroker
from shared.errors import BrokerUnavailable, EngineDead
from shared.ports import (
    Ack,
    Broker,
    Committed,
    Consumer,
    QueueEntry,
    StartAt,
    Token,
    TopicPartition,
)
from tests.support.worker_bench import (
    INSTANCE,
    TOPICS,
    Bench,
    altered,
    bound_call,
    open_bench,
    until,
)

ONE_AT_A_TIME = altered(capacity=1)


class FlakyBroker:
    """A broker that can be taken away."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.is_down = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    @asynccontextmanager
    async def partition_consumer(
        self,
        partitions: Sequence[TopicPartition],
        *,
        start: StartAt,
        group: str | None = None,
    ) -> AsyncIterator[Any]:
        async with self._broker.partition_consumer(
            partitions, start=start, group=group
        ) as consumer:
            yield FlakyConsumer(self, consumer)

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Ack:
        if self.is_down:
            raise BrokerUnavailable("it is down")
        return await self._broker.publish(
            topic, value, key=key, partition=partition, headers=headers
        )


class FlakyConsumer:
    """A reader of a broker that can be taken away."""

    FAILING = frozenset({"fetch", "commit", "committed", "end_offsets"})

    def __init__(self, broker: FlakyBroker, consumer: Consumer) -> None:
        self._broker = broker
        self._consumer = consumer

    def __getattr__(self, name: str) -> Any:
        if self._broker.is_down and name in self.FAILING:
            return self._refuse
        return getattr(self._consumer, name)

    async def _refuse(self, *_: Any, **__: Any) -> None:
        await asyncio.sleep(0.001)
        raise BrokerUnavailable("it is down")


async def test_restart_repeats_only_what_was_unfinished(bench: Bench) -> None:
    """After a crash the next worker runs what had no outcome, and nothing that had one."""
    async with bench.worker(ONE_AT_A_TIME) as first:
        bench.engine.hang()
        await bench.send(bound_call("slow", score=0.0))
        await bench.running(1)
        await bench.send(*(bound_call(f"c{i}", score=1.0) for i in range(4)))
        await bench.waiting(4)
        await first.killed()
    bench.engine.recover()
    async with bench.worker() as second:
        await bench.outcomes_once(5)
        await second.drained()
    assert sorted(o.request_id for o in await bench.outcomes()) == ["c0", "c1", "c2", "c3", "slow"]
    assert await bench.committed() == (5, "")


async def test_finished_ranges_survive_a_restart(bench: Bench) -> None:
    """Calls that ended behind a stuck one are not repeated: their offsets travel as ranges."""
    async with bench.worker(altered(capacity=2)) as first:
        bench.engine.hang()
        await bench.send(bound_call("stuck", query_id="stuck"))
        await bench.running(1)
        await bench.send(*(bound_call(f"c{i}", query_id=f"q{i}") for i in range(3)))
        await bench.running(2)
        await bench.cancel("q0")
        await bench.cancel("q2")
        await bench.outcomes_once(2)
        await until(bench.committed, lambda found: found[1].count("+") == 2)
        await first.killed()
    assert (await bench.committed())[0] == 0
    bench.engine.recover()
    async with bench.worker() as second:
        await bench.outcomes_once(4)
        await second.drained()
    outcomes = await bench.outcomes()
    assert sorted(o.request_id for o in outcomes) == ["c0", "c1", "c2", "stuck"]
    assert {o.request_id: o.kind for o in outcomes}["c1"] == "completed"


async def test_each_life_has_a_higher_epoch(bench: Bench) -> None:
    """A restarted worker's states carry a higher epoch than those of its earlier life."""
    epochs = []
    for _ in range(2):
        async with bench.worker() as worker:
            states = await until(bench.states, lambda found: found[-1].phase == "serving")
            epochs.append(states[-1].epoch)
            await worker.drained()
    assert epochs[0] < epochs[1]


async def test_wiped_store_heals(bench: Bench) -> None:
    """FLUSHALL loses no call: waiting ones are added again, running ones finish."""
    bench.engine.hang()
    async with bench.worker(ONE_AT_A_TIME) as worker:
        await bench.send(*(bound_call(f"c{i}", score=float(-i)) for i in range(8)))
        await bench.running(1)
        await bench.waiting(7)
        await _keys_deleted(bench)
        await bench.waiting(7)
        bench.engine.recover()
        outcomes = await bench.outcomes_once(8)
        await worker.drained()
    assert len(await bench.outcomes()) == 8
    order = [outcome.request_id for outcome in outcomes][1:]
    assert order == sorted(order, reverse=True)
    assert await bench.store.urgency_set(INSTANCE).members() == {}


async def test_claim_whose_reply_was_lost_is_released(bench: Bench) -> None:
    """An entry claimed in the store but unknown as running is given out again."""
    bench.engine.hang()
    async with bench.worker(ONE_AT_A_TIME) as worker:
        await bench.send(bound_call("running", score=-1.0))
        await bench.running(1)
        await bench.send(bound_call("lost"))
        await bench.waiting(1)
        epoch = (await bench.states())[-1].epoch
        claimed = await bench.store.urgency_set(INSTANCE).claim(epoch, limit=1, now_s=0.0)
        assert [entry.request_id for entry in claimed] == ["lost"]
        bench.engine.recover()
        await bench.outcomes_once(2)
        await worker.drained()
    assert len(await bench.outcomes()) == 2


async def test_leftover_entries_are_dropped(bench: Bench) -> None:
    """Entries of the store that memory does not know never reach the engine."""
    async with bench.worker() as worker:
        epoch = (await until(bench.states, lambda found: found[-1].phase == "serving"))[-1].epoch
        await bench.send(bound_call("a"))
        await bench.outcomes_once(1)
        index = bench.store.urgency_set(INSTANCE)
        token = Token(epoch, 9, 0)
        await index.add([QueueEntry(request_id="ghost", score=0.0, arrival=9, token=token)])
        await until(index.members, lambda found: found == {})
        await worker.drained()
    assert [outcome.request_id for outcome in await bench.outcomes()] == ["a"]


async def test_absent_store_makes_unready_and_nothing_is_lost() -> None:
    """While the store is away calls wait, the worker is unready; then all complete."""
    with EmbeddedRedis() as server:
        async with open_bench(server.url, f"{uuid.uuid4().hex}:") as bench, bench.worker():
            await bench.send(bound_call("before"))
            await bench.outcomes_once(1)
            await asyncio.to_thread(server.stop)
            await bench.send(*(bound_call(f"c{i}") for i in range(5)))
            await until(_causes(bench), lambda causes: f"{INSTANCE}/state_store" in causes)
            assert len(await bench.outcomes()) == 1
            await asyncio.to_thread(server.start)
            await bench.outcomes_once(6)
            await until(_causes(bench), lambda causes: not causes)


async def test_absent_broker_makes_unready_and_nothing_is_lost(valkey_url: str) -> None:
    """While nothing can be published calls stay held; each outcome comes once afterwards."""
    async with open_bench(valkey_url, f"{uuid.uuid4().hex}:", wrap=FlakyBroker) as bench:
        broker = bench.broker
        assert isinstance(broker, FlakyBroker)
        async with bench.worker() as worker:
            await bench.send(*(bound_call(f"c{i}", output_tokens=200) for i in range(5)))
            await bench.running(5)
            broker.is_down = True
            await until(_causes(bench), lambda causes: f"{INSTANCE}/broker" in causes)
            await asyncio.sleep(0.3)
            broker.is_down = False
            await bench.outcomes_once(5)
            await until(_causes(bench), lambda causes: not causes)
            await worker.drained()
        assert len(await bench.outcomes()) == 5
        assert await bench.committed() == (5, "")


async def test_drain_ends_although_the_broker_is_down(valkey_url: str) -> None:
    """A worker that cannot publish still stops within its bounds, and does not claim success."""
    async with open_bench(valkey_url, f"{uuid.uuid4().hex}:", wrap=FlakyBroker) as bench:
        broker = bench.broker
        assert isinstance(broker, FlakyBroker)
        bench.engine.hang()
        async with bench.worker(altered(drain_s=0.1, abort_s=0.2)) as worker:
            await bench.send(bound_call("a"))
            await bench.running(1)
            broker.is_down = True
            await worker.drained()
        broker.is_down = False
        assert (await bench.states())[-1].phase != "gone"
        assert await bench.committed() == (0, "")


async def test_dead_engine_gives_everything_back(bench: Bench) -> None:
    """When the engine dies, waiting and running calls are handed back and the worker fails."""
    bench.engine.hang()
    async with bench.worker(altered(capacity=2)) as worker:
        await bench.send(*(bound_call(f"c{i}") for i in range(5)))
        await bench.running(2)
        await bench.waiting(3)
        bench.engine.die()
        assert isinstance(await worker.crash(), EngineDead)
    handed = await bench.handed_back()
    assert sorted(request.request_id for request in handed) == ["c0", "c1", "c2", "c3", "c4"]
    assert {request.attempt for request in handed} == {1}
    assert await bench.outcomes() == []
    assert await bench.committed() == (5, "")
    assert (await bench.states())[-1].phase == "gone"


async def test_call_that_streamed_ends_failed_when_its_engine_dies(bench: Bench) -> None:
    """A call whose tokens were forwarded is not given to another instance."""
    async with bench.worker() as worker:
        await bench.send(bound_call("a", stream=True, output_tokens=5_000))
        await until(_chunks(bench, "a"), lambda chunks: len(chunks) > 0)
        bench.engine.die()
        assert isinstance(await worker.crash(), EngineDead)
    (outcome,) = await bench.outcomes()
    assert (outcome.kind, outcome.reason) == ("failed", "engine_dead")


async def test_fenced_worker_begins_anew(bench: Bench) -> None:
    """A recovery owner's fence makes the worker drop its work and start a new, higher epoch."""
    bench.engine.hang()
    async with bench.worker(altered(capacity=1)) as worker:
        await bench.send(bound_call("a"), bound_call("b"))
        await bench.running(1)
        await bench.waiting(1)
        old = (await bench.states())[-1].epoch
        await bench.fence()
        states = await until(
            bench.states, lambda found: found[-1].phase == "serving" and found[-1].epoch > old
        )
        bench.engine.recover()
        await bench.outcomes_once(2)
        await worker.drained()
    assert states[-1].epoch > old
    assert sorted(outcome.request_id for outcome in await bench.outcomes()) == ["a", "b"]
    assert await bench.committed() == (2, "")


async def test_fenced_worker_publishes_nothing_of_its_old_life(bench: Bench) -> None:
    """Calls that recovery has given to others are not answered, and not committed, from here."""
    bench.engine.hang()
    async with bench.worker(altered(standby_s=30.0)) as worker:
        await bench.send(bound_call("a"))
        await bench.running(1)
        epoch = (await bench.states())[-1].epoch
        await bench.publish_state(phase="serving", epoch=epoch + 1_000, nonce="other")
        await until(_causes(bench), lambda causes: f"{INSTANCE}/standby" in causes)
        bench.engine.recover()
        await worker.drained()
    assert await bench.outcomes() == []
    assert await bench.handed_back() == []
    assert await bench.committed() == (0, "")


async def test_worker_stands_by_while_another_lives(bench: Bench) -> None:
    """Under an id in use by a live worker it waits, and takes over when that one is silent."""
    async with bench.worker(altered(standby_s=0.3)) as worker:
        epoch = (await until(bench.states, lambda found: found[-1].phase == "serving"))[-1].epoch
        for _ in range(4):
            await bench.publish_state(phase="serving", epoch=epoch + 2, nonce="other")
            await asyncio.sleep(0.1)
        assert (await bench.states())[-1].nonce == "other"
        await until(bench.states, lambda found: found[-1].nonce != "other")
        await worker.drained()


async def test_worker_fenced_while_it_drains_leaves_its_calls_to_others(bench: Bench) -> None:
    """A fence during the drain ends it: nothing more is published or committed."""
    bench.engine.hang()
    async with bench.worker() as worker:
        await bench.send(bound_call("a"))
        await bench.running(1)
        worker.stop.set()
        await until(bench.states, lambda found: found[-1].phase == "draining")
        await bench.fence()
        await worker.drained()
    assert await bench.outcomes() == []
    assert await bench.handed_back() == []
    assert await bench.committed() == (0, "")


async def test_stale_states_do_not_fence(bench: Bench) -> None:
    """A last word of an earlier life, arriving late, changes nothing."""
    async with bench.worker() as worker:
        before = (await until(bench.states, lambda found: found[-1].phase == "serving"))[-1]
        await bench.publish_state(phase="serving", epoch=0, nonce="earlier")
        await bench.send(bound_call("a"))
        await bench.outcomes_once(1)
        after = await until(bench.states, lambda found: found[-1].nonce == before.nonce)
        assert after[-1].epoch == before.epoch
        await worker.drained()


async def test_higher_epoch_in_the_store_is_overruled(bench: Bench) -> None:
    """A store that remembers epochs of a history the broker has lost does not stop the worker."""
    await bench.store.urgency_set(INSTANCE).begin(10**9)
    async with bench.worker():
        await bench.send(bound_call("a"))
        await bench.outcomes_once(1)


async def test_commit_beyond_the_topic_is_not_trusted(bench: Bench) -> None:
    """When the topic was lost and begins again at 0, its calls are not taken for finished."""
    async with bench.worker() as worker:
        await bench.send(*(bound_call(f"c{i}") for i in range(4)))
        await bench.outcomes_once(4)
        await worker.drained()
    committed = await bench.committed()
    assert committed == (4, "")
    name = TOPICS.instance(INSTANCE)
    await bench.broker.delete_topics([name])
    async with bench.worker():
        await bench.send(bound_call("new"))
        await bench.outcomes_once(5)


async def test_idle_positions_are_committed_again(valkey_url: str) -> None:
    """Committed offsets of an idle instance are renewed, as brokers forget old ones."""

    class Counting(MemoryBroker):
        num_commits = 0

        def commit(self, group: str, positions: Mapping[TopicPartition, Committed]) -> None:
            self.num_commits += 1
            super().commit(group, positions)

    async def renewed() -> int:
        assert isinstance(bench.broker, Counting)
        return bench.broker.num_commits

    prefix = f"{uuid.uuid4().hex}:"
    async with open_bench(valkey_url, prefix, make_broker=Counting) as bench:
        async with bench.worker(altered(recommit_s=0.05)):
            await until(renewed, lambda count: count >= 3)
        before = await renewed()
        async with bench.worker() as worker:  # recommits hourly
            await bench.send(bound_call("a"))
            await until(bench.committed, lambda found: found == (1, ""))
            await asyncio.sleep(0.2)
            await worker.drained()
        assert await renewed() - before <= 3


async def test_position_beyond_the_topic_is_not_trusted(bench: Bench) -> None:
    """A committed position that the topic never reached does not hide its calls."""
    tp = TopicPartition(TOPICS.instance(INSTANCE), 0)
    async with bench.broker.partition_consumer(
        [tp], start="end", group=TOPICS.worker_group(INSTANCE)
    ) as consumer:
        await consumer.commit({tp: Committed(offset=50)})
    async with bench.worker():
        await bench.send(bound_call("a"))
        await bench.outcomes_once(1)


async def test_topic_that_begins_again_under_the_worker(bench: Bench) -> None:
    """Records at offsets that were finished before the topic was lost are not skipped."""
    async with bench.worker():
        await bench.send(bound_call("a"), bound_call("b"))
        await bench.outcomes_once(2)
        await bench.broker.delete_topics([TOPICS.instance(INSTANCE)])
        await bench.broker.create_topics([TOPICS.instance_spec(INSTANCE)])
        await bench.send(bound_call("c"))
        await bench.outcomes_once(3)


async def test_worker_waits_for_its_broker(valkey_url: str) -> None:
    """A worker that starts while nothing can be published begins once it can."""
    async with open_bench(valkey_url, f"{uuid.uuid4().hex}:", wrap=FlakyBroker) as bench:
        broker = bench.broker
        assert isinstance(broker, FlakyBroker)
        await bench.send(bound_call("a"))
        async with asyncio.TaskGroup() as group:
            broker.is_down = True
            back = group.create_task(_back_after(broker, 0.2), name="back")
            async with bench.worker():
                assert back.done()
                await bench.outcomes_once(1)


async def test_topic_deleted_under_the_worker_is_made_again(bench: Bench) -> None:
    """A worker whose topic vanishes begins anew on a new one."""
    async with bench.worker():
        await bench.send(bound_call("a"))
        await bench.outcomes_once(1)
        await bench.broker.delete_topics([TOPICS.instance(INSTANCE)])
        await until(bench.broker.describe_topics, lambda found: TOPICS.instance(INSTANCE) in found)
        await bench.send(bound_call("b"))
        await bench.outcomes_once(2)


async def _back_after(broker: FlakyBroker, wall_seconds: float) -> None:
    await asyncio.sleep(wall_seconds)
    broker.is_down = False


def _causes(bench: Bench) -> Any:
    async def ask() -> dict[str, str]:
        return bench.health.unready_causes()

    return ask


def _chunks(bench: Bench, request_id: str) -> Any:
    async def ask() -> list[Any]:
        async for chunk in bench.store.chunks(request_id, timeout_s=0.01):
            return [chunk]
        return []

    return ask


async def _keys_deleted(bench: Bench) -> None:
    params = bench.store._client.params
    client = Redis(
        unix_socket_path=params.url.removeprefix("unix://"), protocol=2, decode_responses=False
    )
    async with client:
        keys = await client.keys(f"{params.prefix}*")
        assert keys
        await client.delete(*keys)
