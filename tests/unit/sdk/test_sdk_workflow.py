"""The producer SDK against a played mesh."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.codec import decode, encode, mint_request_id
from shared.contracts.messages import (
    CallOutcome,
    CancelQuery,
    QueryRequest,
    QueryResult,
    StageRequest,
)
from shared.contracts.query_events import QueryEvent, encode_event, event_stream
from shared.contracts.topics import CANCELLATIONS, QUERIES, STAGE_RESULTS, Topics
from shared.errors import ConfigError, GenerationFailed, StreamBroken
from shared.ports import TopicPartition
from shared.sdk import Call, Producer, Workflow, open_producer, open_questions
from tests.support.played_mesh import FakeChunks, PlayedMesh, completed, playing

TOPICS = Topics(request_partitions=2, result_partitions=4)
PARTITION = 1


def echo(request: StageRequest) -> list[CallOutcome]:
    """Answer a call with its prompt."""
    return [completed(request, request.prompt or "")]


class Surroundings:
    """A broker with a played mesh, and producers that come and go."""

    def __init__(self, broker: MemoryBroker, clock: SystemClock, mesh: PlayedMesh) -> None:
        self.broker = broker
        self.clock = clock
        self.mesh = mesh
        self.store: Any = FakeChunks()

    @asynccontextmanager
    async def producer(self, resume_as: str | None = None) -> AsyncIterator[Producer]:
        """Open a producer."""
        async with open_producer(
            self.broker,
            TOPICS,
            self.clock,
            partition=PARTITION,
            store=self.store,
            resume_as=resume_as,
        ) as producer:
            yield producer

    async def records(self, topic: str, cls: type) -> list[Any]:
        """Return every message on a topic."""
        name = TOPICS.name(topic)
        tps = [TopicPartition(name, n) for n in range(await self.broker.partitions_of(name))]
        async with self.broker.partition_consumer(tps, start="beginning") as consumer:
            return [decode(record.value or b"", cls) for record in await consumer.fetch()]


@pytest.fixture
async def around() -> AsyncIterator[Surroundings]:
    """Return a played mesh that echoes prompts."""
    clock = SystemClock()
    broker = MemoryBroker(clock)
    await broker.create_topics(TOPICS.specs())
    async with playing(broker, clock, TOPICS, echo) as mesh:
        yield Surroundings(broker, clock, mesh)


def flow_on(producer: Producer, **named: Any) -> Workflow:
    """Return a workflow with a fixed query id."""
    return Workflow(producer, "test", **{"query_id": "q", "slo_s": 60.0, **named})


async def test_siblings_run_in_parallel_and_come_back_in_order(around: Surroundings):
    """No sibling is answered before all have been sent, and outcomes keep the calls' order."""
    held: list[StageRequest] = []

    def answer(request: StageRequest) -> list[CallOutcome]:
        held.append(request)
        if len(held) < 3:
            return []
        return [completed(one, one.prompt or "") for one in reversed(held)]

    around.mesh.answer = answer
    async with around.producer() as producer, flow_on(producer) as flow:
        outcomes = await flow.stage("draft", [Call(prompt=text) for text in "abc"])
    assert [outcome.text for outcome in outcomes] == ["a", "b", "c"]
    assert {(one.sibling, one.siblings) for one in held} == {(0, 3), (1, 3), (2, 3)}


async def test_calls_carry_what_the_mesh_schedules_by(around: Surroundings):
    """Ids, parents and iterations are filled in; later calls repeat the first's arrival."""
    async with around.producer() as producer, flow_on(producer, tenant="t", model="m") as flow:
        first = await flow.stage("one", [Call(prompt="a"), Call(prompt="b")])
        await flow.call("two", Call(prompt="c", model="other"))
        await flow.call("one", Call(prompt="d"))
        deadline_s = flow.deadline_s
    requests = {request.request_id: request for request in around.mesh.requests}
    two = requests[mint_request_id("q", "two", 0, 0)]
    again = requests[mint_request_id("q", "one", 1, 0)]
    assert two.parents == tuple(outcome.request_id for outcome in first)
    assert again.parents == (two.request_id,)
    assert (two.model, again.model, again.tenant, again.slo_s) == ("other", "m", "t", 60.0)
    assert two.arrival_s == again.arrival_s == flow.arrival_s
    assert deadline_s == pytest.approx((flow.arrival_s or 0.0) + 60.0)
    assert around.mesh.requests[0].arrival_s is None


async def test_the_first_outcome_of_a_call_counts(around: Surroundings):
    """A second outcome of the same call changes nothing and is counted."""

    def answer(request: StageRequest) -> Sequence[CallOutcome]:
        return [completed(request, "first"), completed(request, "second")]

    around.mesh.answer = answer
    async with around.producer() as producer, flow_on(producer) as flow:
        assert (await flow.call("one", Call(prompt="x"))).text == "first"
        assert (await flow.call("two", Call(prompt="x"))).text == "first"
        assert producer.counts["duplicates"] >= 1


async def test_a_restarted_producer_repeats_no_finished_call(around: Surroundings):
    """Finished calls are read from the reply partition; the one in flight is sent again."""
    silent = {"three"}

    def answer(request: StageRequest) -> list[CallOutcome]:
        return [] if request.stage in silent else echo(request)

    async def steps(producer: Producer) -> list[str | None]:
        async with flow_on(producer, arrival_s=around.clock.now_s(), leaves_calls=True) as flow:
            names = ("one", "two", "three", "four")
            return [(await flow.call(name, Call(prompt=name))).text for name in names]

    around.mesh.answer = answer
    async with around.producer("agent") as producer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await steps(producer)
    silent.clear()
    async with around.producer("agent") as producer:
        assert await steps(producer) == ["one", "two", "three", "four"]
        assert producer.counts["resumed"] == 2
    sent = [request.stage for request in around.mesh.requests]
    assert sent == ["one", "two", "three", "three", "four"]


async def test_a_name_without_a_former_life_reads_nothing_old(around: Surroundings):
    """It begins at the end, and its next life there: a day of other producers' text is no news."""
    foreign = CallOutcome(request_id="old", query_id="old", kind="completed", text="old")
    name = TOPICS.name(STAGE_RESULTS)
    for _ in range(3):
        await around.broker.publish(name, encode(foreign), key=b"old", partition=PARTITION)
    async with around.producer("agent") as producer:
        assert producer.first_offset == 3
    await around.broker.publish(name, encode(foreign), key=b"old", partition=PARTITION)
    async with around.producer("agent") as producer:
        assert producer.first_offset == 3
        assert producer.next_offset == 4


async def test_a_kept_position_bounds_what_is_read_again(around: Surroundings):
    """Outcomes below the committed position are not read by the next life."""
    async with around.producer("agent") as producer, flow_on(producer) as flow:
        await flow.call("one", Call(prompt="a"))
        await producer.keep_from(producer.next_offset)
    async with around.producer("agent") as producer, flow_on(producer) as flow:
        await flow.call("one", Call(prompt="a"))
        assert producer.counts["resumed"] == 0


async def test_leaving_with_an_error_cancels_what_is_open(around: Surroundings):
    """The mesh gets a tombstone that outlasts the deadline, and only where a call is open."""

    async def give_up(flow: Workflow, *, waits: bool) -> None:
        async with flow:
            emitted = await flow.emit("one", Call(prompt="x"))
            if waits:
                await emitted.outcome()
            raise RuntimeError

    async with around.producer() as producer:
        with pytest.raises(RuntimeError):
            await give_up(flow_on(producer, query_id="done"), waits=True)
        around.mesh.answer = lambda _: []
        with pytest.raises(RuntimeError):
            await give_up(flow_on(producer, query_id="open"), waits=False)
        left = flow_on(producer, query_id="left", leaves_calls=True)
        with pytest.raises(RuntimeError):
            await give_up(left, waits=False)
    (tombstone,) = await around.records(CANCELLATIONS, CancelQuery)
    assert tombstone.query_id == "open"
    assert tombstone.until_s > around.clock.now_s() + 60.0


async def test_a_call_too_large_is_an_outcome_like_any_other():
    """Nothing is sent, siblings go on."""
    clock = SystemClock()
    broker = MemoryBroker(clock)
    topics = Topics(max_message_bytes=4_096)
    await broker.create_topics(topics.specs())
    async with (
        playing(broker, clock, topics, echo) as mesh,
        open_producer(broker, topics, clock, partition=0) as producer,
        flow_on(producer) as flow,
    ):
        big, small = await flow.stage("one", [Call(prompt="x" * 9_000), Call(prompt="y")])
    assert (big.kind, big.reason, small.kind) == ("rejected", "too_large", "completed")
    assert len(mesh.requests) == 1


async def test_streamed_text_is_the_outcomes_text(around: Surroundings):
    """Chunks come first, the rest with the outcome; nothing twice."""

    async def stream(request_id: str) -> None:
        await around.store.append_chunk(request_id, 0, 0, "SELECT")
        await around.store.append_chunk(request_id, 0, 1, " 1")

    around.mesh.answer = lambda _: []
    pieces = []
    async with around.producer() as producer, flow_on(producer) as flow:
        emitted = await flow.emit("one", Call(prompt="x", stream=True))
        await stream(emitted.request.request_id)
        async for piece in emitted.text():
            pieces.append(piece)
            if len(pieces) == 2:
                await around.mesh.publish(
                    emitted.request, completed(emitted.request, "SELECT 1 AS x")
                )
    assert pieces == ["SELECT", " 1", " AS x"]


async def test_two_attempts_are_never_spliced(around: Surroundings):
    """Text of a second attempt after a forwarded first ends the stream with an error."""
    around.mesh.answer = lambda _: []
    async with around.producer() as producer, flow_on(producer) as flow:
        emitted = await flow.emit("one", Call(prompt="x", stream=True))
        await around.store.append_chunk(emitted.request.request_id, 0, 0, "SEL")
        await around.store.append_chunk(emitted.request.request_id, 1, 0, "WITH")
        with pytest.raises(StreamBroken):
            assert [piece async for piece in emitted.text()]
        other = await flow.emit("two", Call(prompt="x", stream=True))
        await around.store.append_chunk(other.request.request_id, 0, 0, "SEL")
        await around.mesh.publish(other.request, completed(other.request, "WITH x"))
        with pytest.raises(StreamBroken):
            assert [piece async for piece in other.text()]


async def test_a_gap_in_the_stream_is_filled_by_the_outcome(around: Surroundings):
    """A capped stream that lost its middle yields no text out of place."""
    around.mesh.answer = lambda _: []
    async with around.producer() as producer, flow_on(producer) as flow:
        emitted = await flow.emit("one", Call(prompt="x", stream=True))
        await around.store.append_chunk(emitted.request.request_id, 0, 0, "a")
        await around.store.append_chunk(emitted.request.request_id, 0, 5, "f")
        await around.mesh.publish(emitted.request, completed(emitted.request, "abcdef"))
        assert "".join([piece async for piece in emitted.text()]) == "abcdef"


async def test_a_stream_says_how_a_call_ended_that_did_not_complete(around: Surroundings):
    """The reader of text learns of a rejection, and of a call that cannot be streamed."""

    def refuse(request: StageRequest) -> list[CallOutcome]:
        return [
            CallOutcome(
                request_id=request.request_id, query_id="q", kind="rejected", reason="queue_full"
            )
        ]

    around.mesh.answer = refuse
    async with around.producer() as producer, flow_on(producer) as flow:
        emitted = await flow.emit("one", Call(prompt="x", stream=True))
        with pytest.raises(GenerationFailed, match="queue_full"):
            assert [piece async for piece in emitted.text()]
        silent = await flow.emit("two", Call(prompt="x"))
        with pytest.raises(ConfigError, match="stream"):
            assert [piece async for piece in silent.text()]


async def test_a_question_is_answered_once_with_its_events(around: Surroundings):
    """The first result counts; events written before it are all seen."""
    async with open_questions(
        around.broker, TOPICS, around.clock, partition=2, store=around.store
    ) as questions:
        asked = await questions.ask(QueryRequest(query_id="q9", question="how many?", events=True))
        (seen,) = await around.records(QUERIES, QueryRequest)
        assert (seen.reply_to.topic, seen.reply_to.partition) == ("query-results", 2)
        for index, kind in enumerate(("began", "note")):
            event = QueryEvent(kind=kind, at_s=1.0)  # type: ignore[arg-type]
            await around.store.append_chunk(event_stream("q9"), 0, index, encode_event(event))
        for sql in ("SELECT 1", "SELECT 2"):
            result = QueryResult(query_id="q9", kind="completed", sql=sql)
            await around.broker.publish(
                TOPICS.name("query-results"), encode(result), key=b"q9", partition=2
            )
        assert [event.kind async for event in asked.events()] == ["began", "note"]
        assert (await asked.result()).sql == "SELECT 1"
        await questions.cancel("q9", until_s=5.0, reason="enough")
    assert [one.query_id for one in await around.records(CANCELLATIONS, CancelQuery)] == ["q9"]


async def test_foreign_outcomes_are_passed_over(around: Surroundings):
    """Producers may share a reply partition."""
    async with around.producer() as producer, flow_on(producer) as flow:
        foreign = CallOutcome(request_id="else", query_id="else", kind="completed", text="no")
        await around.broker.publish(
            TOPICS.name(STAGE_RESULTS), encode(foreign), key=b"else", partition=PARTITION
        )
        await around.broker.publish(
            TOPICS.name(STAGE_RESULTS), b"\xc1", key=b"else", partition=PARTITION
        )
        assert (await flow.call("one", Call(prompt="mine"))).text == "mine"
        assert producer.counts["foreign"] == producer.counts["undecodable"] == 1
