"""Mutated messages on every topic that anybody reads: nobody ends, nothing sticks, all is counted.

The short form by default; `FUZZ_MESSAGES=100000` (`make fuzz`) runs the long one.
"""

import asyncio
import json
import os
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from services.cli.embedded import EmbeddedMesh, EmbeddedParams, open_embedded
from services.cli.session import receiving_client
from services.gateway.params import GatewayParams
from services.text2sql.params import GROUP as AGENTS
from services.text2sql.params import AgentParams
from services.text2sql.samples.writing import write_sample
from shared.contracts.codec import decode_any, mint_request_id
from shared.contracts.messages import (
    ALL_MESSAGES,
    AlphaUpdate,
    BoundCall,
    CallOutcome,
    CancelQuery,
    DeadLetter,
    InstanceState,
    LatencyEvent,
    Message,
    QueryRequest,
    QueryResult,
    RecoveryProbe,
    ReplyTo,
    SimulatedLengths,
    SpeedUpdate,
    StageRequest,
    WorkflowProfile,
)
from shared.contracts.topics import (
    CANCELLATIONS,
    CONTROL,
    DEAD_LETTERS,
    INSTANCE_STATES,
    LATENCY_EVENTS,
    QUERIES,
    QUERY_RESULTS,
    STAGE_REQUESTS,
    STAGE_RESULTS,
)
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.errors import ContractError
from shared.ports import TopicPartition
from shared.sdk import Producer, Questions, open_producer, open_questions
from tests.support.gateway import gateway_of
from tests.support.message_samples import SAMPLES
from tests.support.mutation import mutations

MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "3000"))
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
INSTANCE = "instance.fast-0"
KINDS: dict[str, tuple[type, ...]] = {
    STAGE_REQUESTS: (StageRequest,),
    INSTANCE: (BoundCall,),
    INSTANCE_STATES: (InstanceState, RecoveryProbe),
    CONTROL: (AlphaUpdate, WorkflowProfile, SpeedUpdate),
    CANCELLATIONS: (CancelQuery,),
    LATENCY_EVENTS: (LatencyEvent,),
    STAGE_RESULTS: (CallOutcome,),
    QUERIES: (QueryRequest,),
    QUERY_RESULTS: (QueryResult,),
    DEAD_LETTERS: (DeadLetter,),
}
"""Topic -> what belongs on it; half of what is published there is made from these."""
READERS: dict[str, tuple[str, ...]] = {
    STAGE_REQUESTS: ("dispatcher",),
    INSTANCE: ("worker fast-0",),
    INSTANCE_STATES: ("dispatcher", "tuner", "gateway gateway"),
    CONTROL: ("dispatcher", "tuner", "gateway gateway"),
    CANCELLATIONS: ("dispatcher", "worker fast-0", "worker fast-1", "text2sql"),
    LATENCY_EVENTS: ("dispatcher", "tuner", "gateway gateway"),
    STAGE_RESULTS: (),
    QUERIES: ("text2sql",),
    QUERY_RESULTS: (),
    DEAD_LETTERS: ("gateway gateway",),
}
"""Topic -> the services that count what they read of it."""
GROUPS = {STAGE_REQUESTS: "dispatcher", INSTANCE: "worker-fast-0", QUERIES: AGENTS}
"""Topic -> the group that commits what it has handed on."""
BURIED = (STAGE_REQUESTS, INSTANCE, LATENCY_EVENTS, QUERIES)
"""Topics whose unreadable records end on `dead-letters`."""
PAGES = ("/api/mesh", "/api/queries", "/api/fleet", "/api/alpha", "/api/dead-letters", "/v1/models")
NOT_READ = {"submitted", "asked", "resumed"}
"""What a client's counts hold besides records read."""
PATIENCE_S = 600.0


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


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a database that good questions are asked about."""
    address = f"sqlite:///{tmp_path_factory.mktemp('fuzz')}/league.db"
    write_sample("league", address)
    return address


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("topic", KINDS)
async def test_services_survive_mutated_messages(topic: str, database: str):
    """Every mutated record is taken and counted, and good work around them still ends.

    Good work: calls of a producer, a call over HTTP, a question to the agent, the dashboard.
    """
    async with fuzzed_mesh(database) as mesh, _Clients.open(mesh) as clients:
        await _publish_mutations(mesh, topic)
        kinds = await _calls(mesh, 20)
        assert sum(kinds.values()) == 20
        assert set(kinds) <= {"completed", "rejected"}
        await clients.are_served()
        await _http_is_served(mesh)
        await _all_read(mesh, topic, clients)
        for name, probe in mesh.services.items():
            assert probe.health.unready_causes() == {}, name
            assert probe.health.overdue() == [], name
        if topic in BURIED:
            await _each_refusal_is_counted(mesh, topic)
        if topic == QUERIES:
            _each_question_ended(mesh)


@asynccontextmanager
async def fuzzed_mesh(database: str) -> AsyncIterator[EmbeddedMesh]:
    """Run a mesh with every service there is."""
    params = EmbeddedParams(
        fleet=FLEET,
        admission=True,
        drain_s=0.5,
        time_scale=100.0,
        agent=AgentParams(agent_id="agent", databases={"league": database}, drain_s=0.0),
        gateway=GatewayParams(event_period_s=0.05),
    )
    async with open_embedded(params) as mesh:
        yield mesh


async def _publish_mutations(mesh: EmbeddedMesh, topic: str) -> None:
    count = max(50, MESSAGES // len(KINDS))
    own = [sample for sample in SAMPLES if isinstance(sample, KINDS[topic])]
    samples: Sequence[Message] = [*SAMPLES, *own * (len(SAMPLES) // len(own))]
    name = mesh.topics.name(topic)
    partitions = await mesh.broker.partitions_of(name)
    for index, raw in enumerate(mutations(samples, zlib.crc32(topic.encode()), count)):
        key = f"k{index % 97}".encode()
        await mesh.broker.publish(name, raw, key=key, partition=index % partitions)
        if index % 500 == 0:
            await asyncio.sleep(0)


class _Clients:
    """Clients of the SDK that read results: of calls, of calls after a restart, of questions."""

    def __init__(self, plain: Producer, resuming: Producer, questions: Questions) -> None:
        self.plain = plain
        self.resuming = resuming
        self.questions = questions

    @classmethod
    @asynccontextmanager
    async def open(cls, mesh: EmbeddedMesh) -> AsyncIterator["_Clients"]:
        """Open them on partitions of their own."""
        where = (mesh.broker, mesh.topics, mesh.clock)
        async with (
            open_producer(*where, partition=1) as plain,
            open_producer(*where, partition=2, resume_as="fuzz") as resuming,
            open_questions(*where, partition=1) as questions,
        ):
            yield cls(plain, resuming, questions)

    async def are_served(self) -> None:
        """Check that a call of each, and a question, get their ends."""
        question = QueryRequest(
            query_id="good-question",
            question="How many teams are there?",
            database="league",
            slo_s=1e6,
        )
        async with asyncio.timeout(PATIENCE_S):
            for name, producer in (("plain", self.plain), ("resuming", self.resuming)):
                submitted = await producer.submit(_call(f"good-{name}"))
                assert (await submitted.outcome).kind in ("completed", "rejected")
            result = await (await self.questions.ask(question)).result()
        assert result.kind in ("completed", "unanswered", "rejected", "failed"), result

    def num_read(self, mesh: EmbeddedMesh) -> dict[str, dict[int, int]]:
        """Return per topic and partition the records that its client says it has read."""
        gateway = gateway_of(mesh)
        assert gateway.desk is not None
        assert gateway.query_desk is not None
        return {
            STAGE_RESULTS: {
                0: _num_counted(gateway.desk._producer.counts),
                1: _num_counted(self.plain.counts),
                2: self.resuming.next_offset,
            },
            QUERY_RESULTS: {
                0: _num_counted(gateway.query_desk._questions.counts),
                1: _num_counted(self.questions.counts),
            },
        }


def _num_counted(counts: Counter[str]) -> int:
    return sum(number for name, number in counts.items() if name not in NOT_READ)


def _call(query_id: str) -> StageRequest:
    return StageRequest(
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


async def _calls(mesh: EmbeddedMesh, count: int) -> Counter[str]:
    """Submit good calls and return how they ended."""
    kinds: Counter[str] = Counter()
    async with receiving_client(mesh, "good") as client, asyncio.timeout(PATIENCE_S):
        for number in range(count):
            kinds[(await client.call(_call(f"good-{number}"))).kind] += 1
    return kinds


async def _http_is_served(mesh: EmbeddedMesh) -> None:
    """Check that a call over HTTP gets an answer, and every page of the dashboard is JSON."""
    body = {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=PATIENCE_S) as client:
        answer = await client.post(
            "/v1/chat/completions", json=body, headers={"x-hexflow-slo-s": "100000"}
        )
        assert answer.status_code in (200, 429, 503), answer.text
        for page in PAGES:
            answer = await client.get(page)
            assert answer.status_code == 200, (page, answer.text)
            strictly_json(answer.text)
        for row in strictly_json((await client.get("/api/queries")).text)["data"]:
            answer = await client.get(f"/api/queries/{quote(row['query_id'], safe='')}")
            assert answer.status_code in (200, 404), (row, answer.text)
            strictly_json(answer.text)


def strictly_json(text: str) -> Any:
    """Return what a text says; NaN and Infinity are no JSON, though Python would take them."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in {text[:2_000]}")

    return json.loads(text, parse_constant=refuse)


async def _all_read(mesh: EmbeddedMesh, topic: str, clients: _Clients) -> None:
    """Return when everybody who reads a topic has counted, and committed, all of it."""
    ends = await _ends(mesh, topic)

    def is_counted() -> bool:
        label = "instance" if topic == INSTANCE else topic
        name = f"hexflow_messages_read_total{{topic={label}}}"
        services = [mesh.services[service] for service in READERS[topic]]
        read = clients.num_read(mesh).get(topic, {})
        return all(
            probe.metrics.totals().get(name, 0) >= sum(ends.values()) for probe in services
        ) and all(number >= ends[partition] for partition, number in read.items())

    await _until(is_counted, f"all of {topic} is counted")
    if topic in GROUPS:
        async with asyncio.timeout(PATIENCE_S):
            while not await _is_committed(mesh, topic, ends):
                await asyncio.sleep(0.05)


async def _ends(mesh: EmbeddedMesh, topic: str) -> dict[int, int]:
    name = mesh.topics.name(topic)
    tps = [TopicPartition(name, index) for index in range(await mesh.broker.partitions_of(name))]
    async with mesh.broker.partition_consumer(tps, start="end") as reader:
        return {tp.partition: end for tp, end in (await reader.end_offsets()).items()}


async def _is_committed(mesh: EmbeddedMesh, topic: str, ends: dict[int, int]) -> bool:
    tps = [TopicPartition(mesh.topics.name(topic), partition) for partition in ends]
    group = mesh.topics.group(GROUPS[topic])
    async with mesh.broker.partition_consumer(tps, start="end", group=group) as reader:
        for tp in tps:
            found = await reader.committed(tp)
            if (found.offset if found else 0) < ends[tp.partition]:
                return False
    return True


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {PATIENCE_S:g} s: {what}") from None


async def _each_refusal_is_counted(mesh: EmbeddedMesh, topic: str) -> None:
    """The dead letters on the topic are as many as the services say, each of a place of its own."""
    places: list[tuple[str, int, int]] = []
    tp = TopicPartition(mesh.topics.name(DEAD_LETTERS), 0)
    async with (
        mesh.broker.partition_consumer([tp], start="beginning") as reader,
        asyncio.timeout(PATIENCE_S),
    ):
        while len(places) < _counted(mesh, "hexflow_dead_letters_total"):
            for record in await reader.fetch(timeout_s=0.1):
                letter = decode_any(record.value or b"", DeadLetter)
                assert isinstance(letter, DeadLetter)
                places.append((letter.topic, letter.partition, letter.offset))
        assert await reader.fetch(timeout_s=0.1) == []
    ours = [place for place in places if place[0] == topic]
    assert len(ours) > 0
    assert len(set(ours)) == len(ours)


def _each_question_ended(mesh: EmbeddedMesh) -> None:
    """A question was answered, dropped as known, or buried as unreadable; none is left over."""
    totals = mesh.services["text2sql"].metrics.totals()
    ended = _counted(mesh, "hexflow_queries_ended_total")
    dropped = totals.get(f"hexflow_duplicates_dropped_total{{topic={QUERIES}}}", 0)
    unreadable = sum(
        value
        for name, value in totals.items()
        if name.startswith("hexflow_dead_letters_total") and "unknown_topic" not in name
    )
    read = totals[f"hexflow_messages_read_total{{topic={QUERIES}}}"]
    assert ended > 1
    assert ended + dropped + unreadable == read


def _counted(mesh: EmbeddedMesh, name: str) -> float:
    """Return the sum of a counter over all services and labels."""
    return sum(
        value
        for probe in mesh.services.values()
        for key, value in probe.metrics.totals().items()
        if key.startswith(name)
    )
