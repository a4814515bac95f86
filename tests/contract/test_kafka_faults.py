"""The Kafka adapter through broker restarts, outages and refusals, on real Apache Kafka."""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from shared.adapters.clock import ManualClock, SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_consumer import COORDINATOR_TASKS, KafkaConsumer
from shared.adapters.kafka_params import KafkaParams
from shared.adapters.local_process import free_port
from shared.errors import BrokerUnavailable, StaleAssignment, TooLarge, UnknownTopic
from shared.ports import Ack, Committed, Consumer, Record, TopicPartition
from tests.support.broker import make_topic, numbers, publish_all, take, tps, until
from tests.support.servers import KafkaServer

pytestmark = pytest.mark.real


def params(server: KafkaServer, **changes: object) -> KafkaParams:
    """Return parameters that notice trouble soon."""
    settings: dict[str, object] = {"stall_s": 0.5, "request_timeout_s": 5.0, **changes}
    return KafkaParams(bootstrap_servers=server.bootstrap, **settings)  # type: ignore[arg-type]


@pytest.fixture
def prefix() -> str:
    """Return a prefix of topics and groups that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}."


async def keep_publishing(broker: KafkaBroker, topic: str, stop: asyncio.Event) -> int:
    """Publish 0, 1, 2, ... until told to stop; returns how many were acknowledged."""
    count = 0
    while not stop.is_set():
        await broker.publish(topic, b"%d" % count)
        count += 1
        await asyncio.sleep(0.01)
    return count


async def keep_reading(consumer: Consumer, found: list[Record], done: Callable[[], bool]) -> int:
    """Fetch until told to stop; returns how often the broker was unavailable."""
    outages = 0
    while not done():
        try:
            found += await consumer.fetch(timeout_s=0.2)
        except BrokerUnavailable:
            outages += 1
    return outages


@pytest.mark.slow
async def test_restarted_broker_loses_nothing(own_kafka: KafkaServer, prefix: str) -> None:
    """A publisher, a reader and a group member go on by themselves after the broker was killed."""
    stop = asyncio.Event()
    by_reader: list[Record] = []
    by_member: list[Record] = []
    total: list[int] = []

    def done() -> bool:
        return bool(total) and all(
            set(range(total[0])) <= set(numbers(found)) for found in (by_reader, by_member)
        )

    async with KafkaBroker.open(params(own_kafka)) as broker:
        topic = await make_topic(broker, prefix + "restart")
        async with (
            broker.partition_consumer(tps(topic), start="beginning") as reader,
            broker.group_consumer([topic], prefix + "g") as member,
            asyncio.timeout(120),
            asyncio.TaskGroup() as group,
        ):
            publishing = group.create_task(keep_publishing(broker, topic, stop))
            reading = group.create_task(keep_reading(reader, by_reader, done))
            group.create_task(keep_reading(member, by_member, done))
            for downtime_s in (0.0, 6.0):
                before = len(by_reader)
                await until(lambda before=before: len(by_reader) > before + 20, pause)  # type: ignore[misc]
                await asyncio.to_thread(own_kafka.kill)
                await asyncio.sleep(downtime_s)
                await asyncio.to_thread(own_kafka.start)
            before = len(by_reader)
            await until(lambda: len(by_reader) > before + 20, pause)
            stop.set()
            total.append(await publishing)
    assert reading.result() > 0
    assert [record.offset for record in by_reader] == sorted(
        {record.offset for record in by_reader}
    )


async def pause() -> None:
    """Let other tasks run."""
    await asyncio.sleep(0.02)


async def test_unreachable_broker_is_named(prefix: str) -> None:
    """Where nobody listens, opening fails with the address and what to do."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(BrokerUnavailable, match=f"{address}.*check"):
        async with KafkaBroker.open(KafkaParams(bootstrap_servers=address)):
            pytest.fail(prefix)


@asynccontextmanager
async def listener(greeting: bytes) -> AsyncIterator[int]:
    """Listen on a port, which is yielded, and answer whatever comes with a greeting or nothing."""
    handlers: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1024):
                writer.write(greeting)
                await writer.drain()
                if greeting:
                    break
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.ensure_future(answer(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*handlers)
        await asyncio.sleep(0)


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_what_is_no_broker_is_given_up_in_time(greeting: bytes, prefix: str) -> None:
    """Where somebody listens who never answers, or speaks HTTP, opening fails in time."""
    async with listener(greeting) as port:
        settings = KafkaParams(bootstrap_servers=f"127.0.0.1:{port}", connect_timeout_s=0.5)
        with pytest.raises(BrokerUnavailable, match=str(port)):
            async with KafkaBroker.open(settings):
                pytest.fail(prefix)


@pytest.mark.slow
async def test_outage_is_reported_and_ends(own_kafka: KafkaServer, prefix: str) -> None:
    """While the broker is down everything raises BrokerUnavailable; afterwards all of it works."""
    settings = params(own_kafka, publish_timeout_s=2.0, request_timeout_s=2.0)
    async with KafkaBroker.open(settings) as broker:
        topic = await make_topic(broker, prefix + "outage")
        (tp,) = tps(topic)
        await publish_all(broker, topic, range(2))
        async with broker.partition_consumer([tp], start="committed", group=prefix + "g") as one:
            assert numbers(await take(one, 2)) == [0, 1]
            await one.commit({tp: Committed(offset=1, metadata="kept")})
            await asyncio.to_thread(own_kafka.kill)
            with pytest.raises(BrokerUnavailable):
                await broker.publish(topic, b"lost?")
            with pytest.raises(BrokerUnavailable):
                await take(one, 1)
            with pytest.raises(BrokerUnavailable):
                await one.commit({tp: Committed(offset=2)})
            with pytest.raises(BrokerUnavailable):
                await one.committed(tp)
            with pytest.raises(BrokerUnavailable):
                await one.end_offsets()
            await asyncio.to_thread(own_kafka.start)
            await publish_until_accepted(broker, topic)
            await until_read(one, b"accepted")
            assert await one.committed(tp) == Committed(offset=1, metadata="kept")
            await one.commit({tp: Committed(offset=3)})


async def publish_until_accepted(broker: KafkaBroker, topic: str) -> None:
    """Publish one record as a caller does that repeats what was not acknowledged."""
    async with asyncio.timeout(60):
        while True:
            try:
                await broker.publish(topic, b"accepted")
            except BrokerUnavailable:
                continue
            return


async def until_read(consumer: Consumer, value: bytes) -> None:
    """Fetch until a value came."""
    async with asyncio.timeout(60):
        while True:
            try:
                records = await consumer.fetch(timeout_s=0.2)
            except BrokerUnavailable:
                continue
            if value in [record.value for record in records]:
                return


@pytest.mark.slow
async def test_closing_is_bounded_while_the_broker_is_down(
    own_kafka: KafkaServer, prefix: str
) -> None:
    """Leaving every context ends although the broker is gone and a record is unacknowledged."""
    async with asyncio.timeout(60), KafkaBroker.open(params(own_kafka)) as broker:
        topic = await make_topic(broker, prefix + "closing")
        async with (
            broker.partition_consumer(tps(topic), start="end") as _reader,
            broker.group_consumer([topic], prefix + "g") as _member,
        ):
            await publish_all(broker, topic, range(1))
            await asyncio.to_thread(own_kafka.kill)
            hanging = asyncio.ensure_future(broker.publish(topic, b"v"))
            await asyncio.sleep(0.2)
            hanging.cancel()


async def test_batch_refused_by_the_broker_does_not_stop_its_partition(
    kafka_server: KafkaServer, prefix: str
) -> None:
    """After the broker refused a batch, later records of the partition are taken.

    aiokafka's producer counts the refused batch's sequence numbers, and the broker then refuses
    every later one.
    """
    async with KafkaBroker.open(params(kafka_server)) as broker:
        topic = await make_topic(broker, prefix + "shrunk")
        await publish_all(broker, topic, range(1))
        await set_limit(kafka_server, topic, 50_000)
        with pytest.raises(TooLarge):
            await broker.publish(topic, os.urandom(160_000))
        await publish_all(broker, topic, range(1, 4))
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            assert numbers(await take(consumer, 4)) == [0, 1, 2, 3]


async def set_limit(server: KafkaServer, topic: str, limit: int) -> None:
    """Change a topic's size limit behind the adapter's back."""
    admin = AIOKafkaAdminClient(bootstrap_servers=server.bootstrap)
    await admin.start()  # type: ignore[no-untyped-call]
    try:
        settings = {"max.message.bytes": str(limit), "message.timestamp.type": "LogAppendTime"}
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, configs=settings)  # type: ignore[no-untyped-call]
        await admin.alter_configs([resource])
    finally:
        await admin.close()  # type: ignore[no-untyped-call]


async def test_publish_to_a_topic_deleted_by_others(kafka_server: KafkaServer, prefix: str) -> None:
    """A publish to a topic that somebody else deleted raises UnknownTopic, and others go on."""
    async with (
        KafkaBroker.open(params(kafka_server)) as broker,
        KafkaBroker.open(params(kafka_server)) as somebody,
    ):
        doomed = await make_topic(broker, prefix + "doomed")
        other = await make_topic(broker, prefix + "other")
        await publish_all(broker, doomed, range(2))
        await somebody.delete_topics([doomed])
        with pytest.raises(UnknownTopic):
            await broker.publish(doomed, b"v")
        await publish_all(broker, other, range(2))
        await make_topic(somebody, doomed)
        assert (await broker.publish(doomed, b"v")).offset == 0


async def test_revoked_hook_ends_before_the_partition_moves(
    kafka_server: KafkaServer, prefix: str
) -> None:
    """`on_revoked` is awaited, and may commit, before another member gets the partition."""
    events: list[str] = []
    members: list[Consumer] = []

    async def on_revoked(gone: Collection[TopicPartition]) -> None:
        events.append("revoking")
        await members[0].commit({tp: Committed(offset=2) for tp in gone})
        await asyncio.sleep(0.2)
        events.append("revoked")

    async def on_assigned(_came: Collection[TopicPartition]) -> None:
        events.append("assigned")

    async with KafkaBroker.open(params(kafka_server)) as broker:
        topic = await make_topic(broker, prefix + "moves", 2)
        await publish_all(broker, topic, range(3), partition=0)
        await publish_all(broker, topic, range(3), partition=1)
        group = prefix + "g"
        async with broker.group_consumer([topic], group, on_revoked=on_revoked) as first:
            members.append(first)
            await take(first, 6)
            async with broker.group_consumer([topic], group, on_assigned=on_assigned) as second:
                assert events == ["revoking", "revoked", "assigned"]
                assert numbers(await take(second, 1)) == [2]


async def test_member_without_heartbeats_loses_its_partitions(
    kafka_server: KafkaServer, prefix: str
) -> None:
    """A member whose process stood still cannot commit until it has joined again."""
    joined: list[Collection[TopicPartition]] = []

    async def on_assigned(came: Collection[TopicPartition]) -> None:
        joined.append(came)

    settings = params(kafka_server, session_timeout_s=1.0)
    async with KafkaBroker.open(settings) as broker:
        topic = await make_topic(broker, prefix + "paused")
        (tp,) = tps(topic)
        async with broker.group_consumer([topic], prefix + "g", on_assigned=on_assigned) as member:
            # The event loop stands still: no heartbeat leaves this process.
            time.sleep(2.5)  # noqa: ASYNC251
            with pytest.raises(StaleAssignment):
                await member.commit({tp: Committed(offset=1)})
            await until(lambda: len(joined) == 2, member.fetch)
            await member.commit({tp: Committed(offset=0)})


async def test_a_dead_member_can_be_dismissed(kafka_server: KafkaServer, prefix: str) -> None:
    """Its partitions move long before its session ends, those of its earlier life too."""
    group = prefix + "g"
    dead = params(kafka_server, session_timeout_s=60.0, client_id=prefix + "dead")
    alive = params(kafka_server, session_timeout_s=60.0, client_id=prefix + "alive")
    async with KafkaBroker.open(dead) as first, KafkaBroker.open(alive) as second:
        topic = await make_topic(second, prefix + "t", 3)
        async with (
            first.group_consumer([topic], group) as earlier,
            first.group_consumer([topic], group) as silent,
            second.group_consumer([topic], group) as heir,
        ):

            async def fetch_all() -> None:
                for member in (heir, silent, earlier):
                    await member.fetch()

            members = (heir, silent, earlier)
            await until(lambda: [len(m.assignment()) for m in members] == [1, 1, 1], fetch_all)
            for member in (silent, earlier):  # no heartbeat any more, and no goodbye
                for name in COORDINATOR_TASKS:
                    task = getattr(member._client._coordinator, name, None)
                    if task is not None:
                        task.cancel()
            assert await second.dismiss(group, prefix + "nobody") == 0
            assert await second.dismiss(group, prefix + "dead") == 2
            await until(lambda: len(heir.assignment()) == 3, heir.fetch)


async def test_append_times_come_from_the_broker(kafka_server: KafkaServer, prefix: str) -> None:
    """Topics are created with LogAppendTime, and every acknowledgement teaches the clock."""
    clock = ManualClock()
    async with KafkaBroker.open(params(kafka_server), clock) as broker:
        topic = await make_topic(broker, prefix + "clock")
        ack = await broker.publish(topic, b"v")
    ((append_unix_s, sent_s, acked_s),) = clock.observed
    assert append_unix_s == ack.append_unix_s
    assert sent_s <= acked_s
    assert abs(append_unix_s - time.time()) < 60


async def test_system_clock_agrees_with_the_broker(kafka_server: KafkaServer, prefix: str) -> None:
    """A host whose clock is 90 s ahead follows the broker after its first acknowledgement."""
    clock = SystemClock(wall=lambda: time.time() + 90)
    async with KafkaBroker.open(params(kafka_server), clock) as broker:
        topic = await make_topic(broker, prefix + "skew")
        acks = [await broker.publish(topic, b"v") for _ in range(20)]
        now_s = clock.now_s()
    assert clock.skew_s == pytest.approx(-90, abs=2 * clock.skew_bound_s + 0.05)
    assert now_s == pytest.approx(acks[-1].append_unix_s, abs=1.0)


async def end_fetching(consumer: Consumer) -> None:
    """Let the client library's fetching end silently, as it may after a broker restart."""
    assert isinstance(consumer, KafkaConsumer)
    client = await consumer.opened()
    assert client._fetcher is not None
    client._fetcher._fetch_task.cancel()


async def test_silent_stall_goes_unnoticed_by_the_caller(
    kafka_server: KafkaServer, prefix: str
) -> None:
    """Readers whose client library stopped fetching go on by themselves and miss nothing."""
    async with KafkaBroker.open(params(kafka_server)) as broker:
        topic = await make_topic(broker, prefix + "stall", 2)
        (first, second) = tps(topic, 2)
        await publish_all(broker, topic, range(2))
        async with (
            broker.partition_consumer([first, second], start="beginning") as reader,
            broker.group_consumer([topic], prefix + "g") as member,
        ):
            reader.pause(second)
            for consumer in (reader, member):
                assert numbers(await take(consumer, 2)) == [0, 1]
                await end_fetching(consumer)
            await member.commit({first: Committed(offset=2)})
            await publish_all(broker, topic, range(2, 4))
            await publish_all(broker, topic, range(10, 12), partition=1)
            assert numbers(await take(reader, 2)) == [2, 3]
            # A group goes on where it committed, so it may see again what it did not commit.
            seen: set[int] = set()
            while len(seen) < 4:
                seen.update(numbers(await take(member, 1)))
            assert seen == {2, 3, 10, 11}
            reader.resume(second)
            assert numbers(await take(reader, 2)) == [10, 11]


async def test_cancelled_publishes_do_not_break_the_order(
    kafka_server: KafkaServer, prefix: str
) -> None:
    """While many publishes are cancelled at random moments, the others keep their order."""
    async with KafkaBroker.open(params(kafka_server)) as broker:
        topic = await make_topic(broker, prefix + "churn")
        tasks = []
        for index in range(600):
            # Large enough that batches fill and publishers queue.
            payload = str(index).encode().zfill(4_000)
            tasks.append(asyncio.ensure_future(broker.publish(topic, payload)))
            if index % 50 == 49:
                await asyncio.sleep(0.002)
                for victim in tasks[index - 49 : index + 1 : 7]:
                    victim.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        last = await broker.publish(topic, b"600")
        async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
            found = numbers(await take(consumer, last.offset + 1))
    acknowledged = [index for index, ack in enumerate(outcomes) if isinstance(ack, Ack)]
    assert len(acknowledged) >= 500
    assert set(acknowledged) <= set(found)
    assert found == sorted(set(found))
