"""Mutated messages on every topic the services read: nobody ends, nothing sticks, all is counted.

The short form by default; `FUZZ_MESSAGES=100000` (`make fuzz`) runs the long one.
"""

import asyncio
import os
import zlib
from collections import Counter

import pytest

from services.cli.embedded import EmbeddedMesh, EmbeddedParams, open_embedded
from services.cli.session import receiving_client
from shared.contracts.codec import decode_any, mint_request_id
from shared.contracts.messages import (
    ALL_MESSAGES,
    DeadLetter,
    ReplyTo,
    SimulatedLengths,
    StageRequest,
)
from shared.contracts.topics import (
    CANCELLATIONS,
    CONTROL,
    DEAD_LETTERS,
    INSTANCE_STATES,
    LATENCY_EVENTS,
    STAGE_REQUESTS,
    STAGE_RESULTS,
)
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.errors import ContractError
from shared.ports import TopicPartition
from tests.support.message_samples import SAMPLES
from tests.support.mutation import mutations

MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "3000"))
COMPACTED = {INSTANCE_STATES, CONTROL, CANCELLATIONS}
FLEET = tuple(
    InstanceSpec(
        instance_id=f"fast-{index}",
        gpu="none",
        max_num_seqs=64,
        kv_tokens=1_000_000,
        latency=LatencyModel(prefill_s_per_token=1e-9, weights_s=1e-6),
    )
    for index in range(2)
)
TOPICS = (
    STAGE_REQUESTS,
    "instance.fast-0",
    INSTANCE_STATES,
    CONTROL,
    CANCELLATIONS,
    LATENCY_EVENTS,
    STAGE_RESULTS,
)


@pytest.mark.timeout(3_600)
def test_no_bytes_raise_anything_but_a_contract_error():
    """Whatever comes, a message is read or refused, and what was read can be written again."""
    found: Counter[str] = Counter()
    for raw in mutations(SAMPLES, 7, MESSAGES):
        try:
            message = decode_any(raw, *ALL_MESSAGES)
        except ContractError as exc:
            found[exc.reason] += 1
        else:
            found[type(message).__name__] += 1
    assert found["undecodable"] > MESSAGES / 4
    assert len(found) > len(SAMPLES) / 2


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("topic", TOPICS)
async def test_services_survive_mutated_messages(topic: str):
    """Every mutated record is taken and counted, and calls around them still get an outcome."""
    count = max(50, MESSAGES // len(TOPICS))
    params = EmbeddedParams(fleet=FLEET, admission=True, drain_s=0.5, time_scale=100.0)
    async with open_embedded(params) as mesh:
        name = mesh.topics.name(topic)
        partitions = await mesh.broker.partitions_of(name)
        for index, raw in enumerate(mutations(SAMPLES, zlib.crc32(topic.encode()), count)):
            key = f"k{index % 97}".encode()
            await mesh.broker.publish(name, raw, key=key, partition=index % partitions)
            if index % 500 == 0:
                await asyncio.sleep(0)
        kinds = await _calls(mesh, 20)
        async with asyncio.timeout(300):
            await _all_read(mesh, topic)
        assert sum(kinds.values()) == 20
        assert set(kinds) <= {"completed", "rejected"}
        for probe in mesh.services.values():
            assert probe.health.unready_causes() == {}
        if topic in (STAGE_REQUESTS, "instance.fast-0"):
            await _each_refusal_is_counted(mesh, topic)


async def _calls(mesh: EmbeddedMesh, count: int) -> Counter[str]:
    """Submit good calls and return how they ended."""
    kinds: Counter[str] = Counter()
    async with receiving_client(mesh, "good") as client, asyncio.timeout(600):
        for number in range(count):
            query_id = f"good-{number}"
            outcome = await client.call(
                StageRequest(
                    request_id=mint_request_id(query_id, "s", 0, 0),
                    query_id=query_id,
                    stage="s",
                    workflow="w",
                    model="default",
                    prompt="x",
                    slo_s=1e6,
                    reply_to=ReplyTo(),
                    simulated=SimulatedLengths(input_tokens=10, output_tokens=2),
                )
            )
            kinds[outcome.kind] += 1
    return kinds


async def _all_read(mesh: EmbeddedMesh, topic: str) -> None:
    """Return when the services have committed, or counted, everything on a topic."""
    service = {"instance.fast-0": "worker fast-0"}.get(topic, "dispatcher")
    group = mesh.topics.worker_group("fast-0") if "instance." in topic else None
    group = mesh.topics.group("dispatcher") if topic == STAGE_REQUESTS else group
    while True:
        if group is not None:
            if await _is_committed(mesh, topic, group):
                return
        elif topic == STAGE_RESULTS or await _is_counted(mesh, topic, service):
            return
        await asyncio.sleep(0.05)


async def _is_committed(mesh: EmbeddedMesh, topic: str, group: str) -> bool:
    name = mesh.topics.name(topic)
    tps = [TopicPartition(name, index) for index in range(await mesh.broker.partitions_of(name))]
    async with mesh.broker.partition_consumer(tps, start="end", group=group) as reader:
        ends = await reader.end_offsets()
        for tp in tps:
            found = await reader.committed(tp)
            if (found.offset if found else 0) < ends[tp]:
                return False
    return True


async def _is_counted(mesh: EmbeddedMesh, topic: str, service: str) -> bool:
    name = mesh.topics.name(topic)
    total = 0
    tps = [TopicPartition(name, index) for index in range(await mesh.broker.partitions_of(name))]
    async with mesh.broker.partition_consumer(tps, start="end") as reader:
        total = sum((await reader.end_offsets()).values())
    counted = mesh.services[service].metrics.totals()
    return counted.get(f"hexflow_messages_read_total{{topic={topic}}}", 0) >= total


async def _each_refusal_is_counted(mesh: EmbeddedMesh, topic: str) -> None:
    """The dead letters on the topic are as many as the services say, each of a place of its own."""
    name = mesh.topics.name(DEAD_LETTERS)
    places = []
    tp = TopicPartition(name, 0)
    async with mesh.broker.partition_consumer([tp], start="beginning") as reader:
        while records := await reader.fetch(timeout_s=0):
            for record in records:
                letter = decode_any(record.value or b"", DeadLetter)
                places.append((letter.topic, letter.partition, letter.offset))
    counted = sum(
        value
        for probe in mesh.services.values()
        for key, value in probe.metrics.totals().items()
        if key.startswith("hexflow_dead_letters_total")
    )
    assert len(places) == counted
    ours = [place for place in places if place[0] == topic]
    assert len(ours) > 0
    assert len(set(ours)) == len(ours)
