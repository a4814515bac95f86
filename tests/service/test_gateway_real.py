"""Gateway replicas as processes on real Apache Kafka and Redis."""

import asyncio
import secrets
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from services.cli.options import mesh_settings
from services.cli.processes import ProcessesParams, open_processes
from shared.adapters.local_process import free_port
from shared.contracts.codec import decode
from shared.contracts.messages import CallOutcome
from shared.contracts.topics import STAGE_RESULTS
from shared.ports import TopicPartition
from tests.support.gateway import quick_fleet
from tests.support.servers import KafkaServer, RedisServer

HELLO = [{"role": "user", "content": "hello"}]
NUM_CALLS = 20

pytestmark = [pytest.mark.real, pytest.mark.slow]


async def test_two_replicas_share_a_mesh(
    kafka_server: KafkaServer, redis_server: RedisServer, tmp_path: Path
):
    """Each answers its own clients, whole and streamed, from a reply partition of its own."""
    base = mesh_settings(kafka=kafka_server.bootstrap, redis=redis_server.url, time_scale=1.0)
    prefix = f"gw-{secrets.token_hex(4)}."
    settings = base.model_copy(update={"topics": base.topics.model_copy(update={"prefix": prefix})})
    ports = [free_port(), free_port()]
    params = ProcessesParams(
        fleet=quick_fleet(), dispatchers=1, tunes=False, gateway_ports=tuple(ports)
    )
    async with open_processes(settings, params, tmp_path) as mesh:
        ids = await asyncio.gather(*(_use(port) for port in ports))
        name = mesh.topics.name(STAGE_RESULTS)
        found = {0: set(), 1: set()}
        tps = [TopicPartition(name, index) for index in found]
        async with mesh.broker.partition_consumer(tps, start="beginning") as consumer:
            while sum(map(len, found.values())) < 2 * NUM_CALLS:
                for record in await consumer.fetch(timeout_s=1.0):
                    outcome = decode(record.value or b"", CallOutcome)
                    found[record.tp.partition].add(outcome.request_id)
    differences = [found[index] ^ ids[index] for index in found]
    assert differences == [set(), set()]


async def _use(port: int) -> set[str]:
    """Make calls through one replica and return their ids."""
    ids = set()
    deadline = {"x-hexflow-slo-s": "60"}
    async with AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="none",
        max_retries=0,
        default_headers=deadline,
    ) as client:
        for number in range(NUM_CALLS):
            if number % 2:
                whole = await client.chat.completions.create(
                    model="default", messages=HELLO, max_tokens=5
                )
                assert whole.choices[0].message.content
                ids.add(whole.id.removeprefix("chatcmpl-"))
                continue
            stream = await client.chat.completions.create(
                model="default", messages=HELLO, max_tokens=40, stream=True
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason
            ids.add(chunks[0].id.removeprefix("chatcmpl-"))
    return ids
