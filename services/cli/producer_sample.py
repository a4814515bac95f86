"""A producer of a few lines that a person can copy and run against the mesh that was started."""

import sys
from pathlib import Path

from services.cli.console import shown_path
from shared.contracts.topics import STAGE_REQUESTS, STAGE_RESULTS, Topics
from shared.domain.instance import InstanceSpec

SAMPLE = """\
One call and its outcome, in Python (any language will do: docs/producers.md).
Save it as ask.py and run: {python} ask.py
(The simulated engine makes up what it answers.)

import asyncio, msgpack, uuid
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

KAFKA, REQUESTS = "{address}", "{topic}"
REPLIES = TopicPartition("{results}", 0)

async def main():
    query = uuid.uuid4().hex
    call = {{
        "type": "stage_request", "request_id": query + "-1", "query_id": query,
        "workflow": "mine", "stage": "ask", "model": "{model}",
        "prompt": "select 1?", "max_tokens": 12, "slo_s": 60.0,
        "reply_to": {{"topic": "stage-results", "partition": 0}},
    }}
    async with (
        AIOKafkaConsumer(bootstrap_servers=KAFKA) as consumer,
        AIOKafkaProducer(bootstrap_servers=KAFKA) as producer,
    ):
        consumer.assign([REPLIES])
        await consumer.seek_to_end(REPLIES)
        value = msgpack.packb(call)
        await producer.send_and_wait(REQUESTS, value, key=query.encode())
        async for record in consumer:
            outcome = msgpack.unpackb(record.value)
            if outcome["request_id"] == call["request_id"]:
                print(outcome["kind"], outcome["instance_id"], outcome["text"])
                return

asyncio.run(main())

Or a whole workload, from another terminal:

hexflow replay --generate natural --kafka {address}
"""


def sample_producer(address: str, fleet: tuple[InstanceSpec, ...], topics: Topics) -> str:
    """Return a producer that a person can copy and run against this mesh, with what to do."""
    return SAMPLE.format(
        address=address,
        model=fleet[0].model,
        topic=topics.name(STAGE_REQUESTS),
        results=topics.name(STAGE_RESULTS),
        python=shown_path(Path(sys.executable)),
    )
