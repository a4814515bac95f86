"""Topics that get more partitions while the adapter uses them, on real Apache Kafka."""

import uuid

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from shared.errors import UnknownTopic
from tests.support.broker import make_topic, publish_all
from tests.support.servers import KafkaServer

pytestmark = pytest.mark.real


async def add_partitions(server: KafkaServer, topic: str, total: int) -> None:
    """Give a topic more partitions behind the adapter's back."""
    admin = AIOKafkaAdminClient(bootstrap_servers=server.bootstrap)
    await admin.start()  # type: ignore[no-untyped-call]
    try:
        await admin.create_partitions({topic: NewPartitions(total)})  # type: ignore[no-untyped-call]
    finally:
        await admin.close()  # type: ignore[no-untyped-call]


async def test_publish_to_a_partition_added_by_others(kafka_server: KafkaServer) -> None:
    """A topic that grew takes records on its new partitions at once; beyond them is unknown."""
    async with KafkaBroker.open(KafkaParams(bootstrap_servers=kafka_server.bootstrap)) as broker:
        topic = await make_topic(broker, f"t-{uuid.uuid4().hex[:12]}.grown")
        await publish_all(broker, topic, range(1))
        await add_partitions(kafka_server, topic, 3)
        assert (await broker.publish(topic, b"v", partition=2)).tp.partition == 2
        with pytest.raises(UnknownTopic):
            await broker.publish(topic, b"v", partition=3)
