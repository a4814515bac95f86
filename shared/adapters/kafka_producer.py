"""Publishing to Kafka: in order, bounded in time, and through what breaks aiokafka's producer.

Invariants:

- Concurrent publishes to a partition are appended in the order of the calls. aiokafka alone does
  not keep it when a batch is full, so callers queue in a fair lane per partition. Only records
  whose batch failed for good are appended later than others that were published after them.
- aiokafka's idempotent producer counts sequence numbers on even for a batch that failed for good;
  every later batch of that partition is then refused. After any failed batch the producer is
  therefore replaced, once the records it still holds are settled.
- A publish that ends early (time-out, cancellation) leaves nothing half done; its record may or
  may not be appended.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka import TopicPartition as KafkaTopicPartition
from aiokafka import errors as kafka
from aiokafka.partitioner import DefaultPartitioner

from shared.adapters.kafka_admin import KafkaAdmin
from shared.adapters.kafka_ending import cancel_all, ends_well
from shared.adapters.kafka_errors import translate, translated
from shared.adapters.kafka_params import MAX_BATCH_BYTES, KafkaParams
from shared.errors import BrokerUnavailable, ConfigError, TooLarge, UnknownTopic
from shared.ports import Ack, Clock, TopicPartition

log = structlog.get_logger(__name__)

FACTS_TTL_S = 60.0
LOOK_AFTER_S = 1.0
RETRY_S = 0.05
SETTLE_S = 5.0
RECORD_OVERHEAD_BYTES = 96


class _Producer(AIOKafkaProducer):
    """aiokafka's producer with a way to tell that it is broken and an end that is bounded."""

    def is_alive(self) -> bool:
        """Return whether its sender still runs."""
        task = self._sender.sender_task
        return task is not None and not task.done()

    def forget_topic(self, topic: str) -> None:
        """Fail what is still to be sent to a topic that was deleted.

        aiokafka would ask for its leader in a tight loop until the records expire.
        """
        batches = self._message_accumulator._batches  # noqa: SLF001
        for tp in [tp for tp in batches if tp.topic == topic]:
            for batch in batches.pop(tp):
                batch.failure(kafka.UnknownTopicOrPartitionError())
        self.client.set_topics(self.client._topics - {topic})  # noqa: SLF001

    async def discard(self) -> None:
        """Settle what it holds within `SETTLE_S`, then close it whatever is left."""
        if await ends_well(self.stop(), name="kafka-producer-stop", timeout_s=SETTLE_S):
            return
        self._message_accumulator.fail_all(kafka.ProducerClosed())
        await cancel_all([self._sender.sender_task], timeout_s=1.0)
        await ends_well(self.client.close(), name="kafka-producer-close", timeout_s=1.0)


@dataclass(frozen=True)
class _Facts:
    """What has to be known of a topic before publishing to it."""

    partitions: int
    max_message_bytes: int
    is_compacted: bool
    expires_s: float


class KafkaPublisher:
    """Publishes records; its producer is opened on first use and replaced when it broke.

    Args:
        params: How to reach the cluster.
        admin: Tells which topics exist.
        clock: Learns the broker's time from acknowledgements, if given.
    """

    def __init__(self, params: KafkaParams, admin: KafkaAdmin, clock: Clock | None) -> None:
        self._params = params
        self._admin = admin
        self._clock = clock
        self._producer: _Producer | None = None
        self._retired: list[_Producer] = []
        self._opening: asyncio.Task[None] | None = None
        self._facts: dict[str, _Facts] = {}
        self._topic_lanes: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._lanes: defaultdict[TopicPartition, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._partitioner = DefaultPartitioner()

    async def stop(self) -> None:
        """Settle what was sent, within a bound, and disconnect."""
        await cancel_all([self._opening], timeout_s=SETTLE_S)
        if self._producer is not None:
            self._retired.append(self._producer)
            self._producer = None
        while self._retired:
            await self._retired.pop().discard()

    def forget(self, topics: Sequence[str]) -> None:
        """Forget what is known of topics that were deleted."""
        for topic in topics:
            self._facts.pop(topic, None)

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: Sequence[tuple[str, bytes]],
    ) -> Ack:
        """Append one record; see the port."""
        failure: Exception | None = None
        try:
            async with asyncio.timeout(self._params.publish_timeout_s):
                while True:
                    try:
                        return await self._attempt(topic, value, key, partition, headers)
                    except BrokerUnavailable as exc:
                        failure = exc
                    except kafka.KafkaError as exc:
                        failure = exc
                        await self._check_worth_retrying(exc, topic)
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as exc:
            raise BrokerUnavailable(
                f"publishing to {topic}: not acknowledged by {self._params.bootstrap_servers} "
                f"within {self._params.publish_timeout_s} s; it may still be appended"
            ) from (failure or exc)

    async def _check_worth_retrying(self, error: kafka.KafkaError, topic: str) -> None:
        """Raise the mesh's error for a failure that another attempt would only repeat."""
        meaning = translate(error, f"publishing to {topic}", self._params.bootstrap_servers)
        if isinstance(meaning, TooLarge | ConfigError):
            raise meaning from error
        if isinstance(error, kafka.NotLeaderForPartitionError | kafka.UnknownTopicOrPartitionError):
            self.forget([topic])
            await self._admin.partitions_of(topic)

    async def _attempt(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: Sequence[tuple[str, bytes]],
    ) -> Ack:
        async with self._topic_lanes[topic]:
            producer = await self._ready()
            facts = await self._facts_of(topic)
            if partition is not None and partition >= facts.partitions:
                self.forget([topic])  # it may have got more of them since
                facts = await self._facts_of(topic)
            tp = self._choose(topic, facts, key, partition)
        _check_record(topic, facts, key, value, headers)
        async with self._lanes[tp]:
            await self._check_known(producer, tp)
            sent_s = time.monotonic()
            future = await producer.send(
                topic, value, key=key, partition=tp.partition, headers=list(headers)
            )
            future.add_done_callback(_retrieve)
            if facts.max_message_bytes < MAX_BATCH_BYTES:
                # The limit holds for batches too, so on such a topic each record is its own.
                await asyncio.wait({future})
        try:
            metadata = await self._acknowledged(producer, future, topic)
        except kafka.KafkaError:
            self._retire(producer)
            raise
        return self._ack(tp, metadata, sent_s)

    async def _acknowledged(
        self, producer: _Producer, future: asyncio.Future[Any], topic: str
    ) -> Any:
        """Wait for an acknowledgement, and look whether the topic was deleted under it."""
        while True:
            try:
                async with asyncio.timeout(LOOK_AFTER_S):
                    return await asyncio.shield(future)
            except TimeoutError:
                self.forget([topic])
            try:
                await self._admin.partitions_of(topic)
            except BrokerUnavailable:
                log.debug("publish_waits_for_broker", topic=topic)
            except UnknownTopic:
                producer.forget_topic(topic)
                raise

    def _ack(self, tp: TopicPartition, metadata: Any, sent_s: float) -> Ack:
        if metadata.offset < 0:
            raise BrokerUnavailable(f"a record of {tp.topic} was appended at an unknown offset")
        append_unix_s = metadata.timestamp / 1000
        if self._clock is not None and metadata.timestamp_type == 1:
            # Anchored to the same monotonic clock that the port's durations use.
            acked_s = self._clock.monotonic_s()
            self._clock.observe_append(
                append_unix_s, acked_s - (time.monotonic() - sent_s), acked_s
            )
        return Ack(tp=tp, offset=metadata.offset, append_unix_s=append_unix_s)

    def _choose(
        self, topic: str, facts: _Facts, key: bytes | None, partition: int | None
    ) -> TopicPartition:
        if partition is None:
            everywhere = list(range(facts.partitions))
            partition = self._partitioner(key, everywhere, everywhere)
        if not 0 <= partition < facts.partitions:
            raise UnknownTopic(f"topic {topic} has no partition {partition}")
        return TopicPartition(topic, partition)

    async def _check_known(self, producer: _Producer, tp: TopicPartition) -> None:
        """Make the producer look again when it does not know a partition that exists."""
        await producer.partitions_for(tp.topic)
        cluster = producer.client.cluster
        if cluster.leader_for_partition(KafkaTopicPartition(tp.topic, tp.partition)) is None:
            await producer.client.force_metadata_update()
        if cluster.leader_for_partition(KafkaTopicPartition(tp.topic, tp.partition)) is None:
            raise kafka.LeaderNotAvailableError

    async def _facts_of(self, topic: str) -> _Facts:
        facts = self._facts.get(topic)
        if facts is None or facts.expires_s < time.monotonic():
            partitions = await self._admin.partitions_of(topic)
            settings = await self._settings_of(topic)
            facts = _Facts(
                partitions=partitions,
                max_message_bytes=min(
                    int(settings.get("max.message.bytes", self._params.max_message_bytes)),
                    self._params.max_message_bytes,
                ),
                is_compacted="compact" in settings.get("cleanup.policy", ""),
                expires_s=time.monotonic() + FACTS_TTL_S,
            )
            self._facts[topic] = facts
        return facts

    async def _settings_of(self, topic: str) -> dict[str, str]:
        """Return a topic's settings; nothing where this client may write but not ask."""
        try:
            settings = (await self._admin.settings_of([topic])).get(topic, {})
        except ConfigError:
            return {}
        if settings.get("message.timestamp.type") != "LogAppendTime":
            log.warning("topic_without_append_time", topic=topic)
        return settings

    async def _ready(self) -> _Producer:
        """Return a working producer; callers that wait for a new one share its opening."""
        while (producer := self._producer) is None or not producer.is_alive():
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._reopen(), name="kafka-producer-open")
                self._opening.add_done_callback(_retrieve)
            # aiokafka leaves a connection behind when a start is cancelled, so none is.
            await asyncio.shield(self._opening)
        return producer

    async def _reopen(self) -> None:
        if self._producer is not None:
            self._retire(self._producer)
        while self._retired:
            await self._retired[-1].discard()
            self._retired.pop()
        with translated("opening a producer", self._params.bootstrap_servers):
            async with asyncio.timeout(self._params.connect_timeout_s):
                self._producer = await self._open()

    async def _open(self) -> _Producer:
        producer = _Producer(**self._params.producer())
        started = False
        try:
            await producer.start()
            started = True
        finally:
            if not started:
                await producer.discard()
        return producer

    def _retire(self, producer: _Producer) -> None:
        if self._producer is producer:
            log.warning("kafka_producer_replaced")
            self._retired.append(producer)
            self._producer = None


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a failure as seen even if nobody waits for the record any more."""
    if not future.cancelled():
        future.exception()


def _check_record(
    topic: str,
    facts: _Facts,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes]],
) -> None:
    """Refuse what the broker would refuse; a refused batch costs the producer."""
    if key is None and (value is None or facts.is_compacted):
        raise ValueError(f"a tombstone or a record of compacted topic {topic} needs a key")
    size = RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    size += sum(len(name) + len(content) + 2 for name, content in headers)
    if size > facts.max_message_bytes:
        raise TooLarge(f"{size} bytes; topic {topic} takes at most {facts.max_message_bytes}")
