"""Services learn the broker's time before they read their clock."""

import time

import pytest

from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.topics import INSTANCE_STATES, Topics
from shared.ports import TopicPartition
from shared.runtime.publishing import CLOCK_KEY, Publisher

TOPICS = Topics(state_partitions=1)


@pytest.mark.parametrize("ahead_s", [-86_400.0, 7_200.0])
async def test_a_host_with_a_wrong_clock_has_the_brokers_time_at_its_first_reading(ahead_s: float):
    """Hours of skew are gone at once, and nothing is left of the probe that showed them."""
    true = SystemClock()
    wrong = SystemClock(wall=lambda: time.time() + ahead_s)
    broker = MemoryBroker(true)
    await broker.create_topics(TOPICS.specs())
    await Publisher(broker, TOPICS, wrong).learn_time("worker-a")
    assert abs(wrong.now_s() - true.now_s()) < 60
    tp = TopicPartition(TOPICS.name(INSTANCE_STATES), 0)
    async with broker.partition_consumer([tp], start="beginning") as consumer:
        last = (await consumer.fetch())[-1]
    assert (last.key, last.value) == (f"{CLOCK_KEY}worker-a".encode(), None)
