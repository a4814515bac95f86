"""Records that other Kafka clients may write, read through the adapter."""

import uuid
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.util import calc_crc32c

from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from tests.support.broker import make_topic, take, tps
from tests.support.servers import KafkaServer

pytestmark = pytest.mark.real
CRC_AT, CHECKED_FROM = 17, 21
PLAIN, SNAPPY = 0, 2


class HostileBatch(BatchBuilder):
    """A batch in which the header name `????` becomes bytes that are no UTF-8."""

    def _build(self) -> bytearray:
        if self._buffer is None:
            raw = bytearray(super()._build())
            at = raw.index(b"????")
            raw[at : at + 4] = b"\xff\xfe\xfdQ"
            raw[CRC_AT:CHECKED_FROM] = calc_crc32c(bytes(raw[CHECKED_FROM:])).to_bytes(4, "big")
            self._buffer = raw
        return self._buffer


@pytest.fixture
async def producer(kafka_server: KafkaServer) -> AsyncIterator[AIOKafkaProducer]:
    """Return a producer that is not the adapter's."""
    async with AIOKafkaProducer(bootstrap_servers=kafka_server.bootstrap) as foreign:
        yield foreign


@pytest.fixture
async def broker(kafka_server: KafkaServer) -> AsyncIterator[KafkaBroker]:
    """Return the adapter."""
    async with KafkaBroker.open(KafkaParams(bootstrap_servers=kafka_server.bootstrap)) as opened:
        yield opened


@pytest.fixture
async def topic(broker: KafkaBroker) -> str:
    """Return a topic of one partition."""
    return await make_topic(broker, f"t-{uuid.uuid4().hex[:12]}.foreign")


async def test_a_header_without_a_value_has_an_empty_one(
    broker: KafkaBroker, producer: AIOKafkaProducer, topic: str
) -> None:
    """Kafka's null header values keep the type that the port promises."""
    await producer.send_and_wait(topic, b"x", headers=[("traceparent", None), ("a", b"1")])
    async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
        (record,) = await take(consumer, 1)
    assert record.headers == (("traceparent", b""), ("a", b"1"))


@pytest.mark.parametrize("compression", [PLAIN, SNAPPY])
async def test_a_header_name_that_is_no_utf8_stops_no_reader(
    broker: KafkaBroker, producer: AIOKafkaProducer, topic: str, compression: int
) -> None:
    """Every record around it arrives once, and the name with replacement characters."""
    await producer.send_and_wait(topic, b"first")
    batch = HostileBatch(16_384, compression)
    for index in range(5):
        name = "????" if index == 2 else "fine"
        batch.append(key=b"k", value=b"%d" % index, timestamp=None, headers=[(name, b"v")])
    await (await producer.send_batch(batch, topic, partition=0))
    await producer.send_and_wait(topic, b"last")
    async with broker.partition_consumer(tps(topic), start="beginning") as consumer:
        records = await take(consumer, 7, max_records=2)
    assert [record.value for record in records] == [b"first", *b"0 1 2 3 4".split(), b"last"]
    assert [record.offset for record in records] == list(range(7))
    assert records[3].headers == (("\ufffd\ufffd\ufffdQ", b"v"),)
