"""The replay driver against a mesh that is played by the test."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from services.cli.driver import ReplayDriver, mesh_query_id
from services.cli.tally import Tally
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.codec import decode
from shared.contracts.messages import CallOutcome, CallTimes, CancelQuery, StageRequest, Usage
from shared.contracts.topics import CANCELLATIONS, STAGE_REQUESTS, Topics
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.ports import TopicPartition
from shared.runtime.client import open_client
from shared.runtime.publishing import Publisher

TOPICS = Topics(request_partitions=1, result_partitions=2, max_message_bytes=4_096)
TIME_SCALE = 100.0


def stage(name: str, calls: int = 1, iteration: int = 0, **more: object) -> TraceStage:
    """Return a stage of equal calls."""
    call = TraceCall(input_tokens=100, output_tokens=10)
    fields = {"stage": name, "iteration": iteration, "calls": (call,) * calls, **more}
    return msgspec.convert(fields, TraceStage)


def query(*stages: TraceStage, query_id: str = "q0", arrival_s: float = 0.0) -> TraceQuery:
    """Return a query with an SLO of 1,000 s."""
    return TraceQuery(query_id=query_id, stages=stages, arrival_s=arrival_s, slo_s=1_000.0)


class PlayedMesh:
    """Answers every request as `answer` says; keeps what it saw, in order."""

    def __init__(self, broker: MemoryBroker, clock: SystemClock) -> None:
        self.broker = broker
        self.clock = clock
        self.publisher = Publisher(broker, TOPICS, clock)
        self.requests: list[StageRequest] = []
        self.answered: list[str] = []
        self.answer: Callable[[StageRequest], list[str]] = lambda _: ["completed"]

    async def serve(self) -> None:
        """Read requests and publish outcomes until cancelled."""
        tp = TopicPartition(TOPICS.name(STAGE_REQUESTS), 0)
        async with self.broker.partition_consumer([tp], start="beginning") as consumer:
            while True:
                for record in await consumer.fetch():
                    await self._reply(decode(record.value or b"", StageRequest))

    async def cancelled_queries(self) -> set[str]:
        """Wait for the first cancellation and return the queries cancelled."""
        tp = TopicPartition(TOPICS.name(CANCELLATIONS), 0)
        async with self.broker.partition_consumer([tp], start="beginning") as consumer:
            records = await consumer.fetch(timeout_s=10.0)
            return {decode(record.value or b"", CancelQuery).query_id for record in records}

    async def _reply(self, request: StageRequest) -> None:
        self.requests.append(request)
        for kind in self.answer(request):
            outcome = CallOutcome(
                request_id=request.request_id,
                query_id=request.query_id,
                kind=kind,  # type: ignore[arg-type]
                reason="" if kind == "completed" else "played",
                instance_id="a",
                usage=Usage(input_tokens=100, output_tokens=10),
                times=CallTimes(ready_at_s=0.0, started_at_s=1.0, finished_at_s=3.0),
                deadline_s=(request.arrival_s or 0.0) + 50.0,
            )
            reply = request.reply_to
            await self.publisher.once(reply.topic, outcome, partition=reply.partition)
            self.answered.append(request.request_id)


class Played:
    """A driver in front of a played mesh."""

    def __init__(self, mesh: PlayedMesh, driver: ReplayDriver, tally: Tally) -> None:
        self.mesh = mesh
        self.driver = driver
        self.tally = tally
        self.stop = asyncio.Event()

    async def run(self, *queries: TraceQuery) -> None:
        """Drive queries to their end."""
        await self.driver.run(queries, self.stop)


@pytest.fixture
async def played() -> AsyncIterator[Played]:
    """Return a driver in front of a played mesh."""
    async with open_played() as one:
        yield one


@asynccontextmanager
async def open_played(ahead_s: float = 0.0) -> AsyncIterator[Played]:
    """Open a driver, on a host whose clock may be ahead, in front of a played mesh."""
    broker_clock = SystemClock(time_scale=TIME_SCALE)
    clock = SystemClock(time_scale=TIME_SCALE, wall=lambda: time.time() + ahead_s)
    broker = MemoryBroker(broker_clock)
    await broker.create_topics(TOPICS.specs())
    mesh = PlayedMesh(broker, broker_clock)
    tally = Tally()
    stop = asyncio.Event()
    async with (
        open_client(broker, TOPICS, clock, partition=1) as client,
        asyncio.TaskGroup() as group,
    ):
        served = group.create_task(mesh.serve(), name="mesh")
        group.create_task(client.receive(stop), name="receive")
        yield Played(mesh, ReplayDriver(client, clock, tally, "run"), tally)
        served.cancel()
        stop.set()


async def test_a_stage_starts_after_every_call_of_the_one_before_has_an_outcome(
    played: Played,
) -> None:
    """Calls of a stage name the requests of the stage before as parents, all answered by then."""
    seen: dict[str, tuple[str, ...]] = {}

    def answer(request: StageRequest) -> list[str]:
        assert set(request.parents) <= set(played.mesh.answered)
        seen[f"{request.stage}/{request.iteration}/{request.sibling}"] = request.parents
        return ["completed"]

    played.mesh.answer = answer
    await played.run(query(stage("one"), stage("two", calls=3), stage("one", iteration=1)))
    ids = [request.request_id for request in played.mesh.requests]
    assert seen["one/0/0"] == ()
    assert seen["two/0/2"] == (ids[0],)
    assert set(seen["one/1/0"]) == set(ids[1:4])
    assert played.tally.queries == {"submitted": 1, "completed": 1}
    assert played.tally.calls["submitted"] == played.tally.calls["completed"] == 5


@pytest.mark.parametrize("ahead_s", [-3_600.0, 3_600.0])
async def test_a_wrong_clock_of_the_host_moves_neither_arrivals_nor_results(ahead_s: float) -> None:
    """Arrivals go by the monotonic clock, latencies by the broker's time from the start."""
    async with open_played(ahead_s) as played:
        began_s = time.monotonic()
        await played.run(
            query(stage("one")), query(stage("one"), query_id="q1", arrival_s=0.3 * TIME_SCALE)
        )
        assert 0.29 < time.monotonic() - began_s < 60
    assert all(0 <= end.latency_s < 60 * TIME_SCALE for end in played.tally.ends)
    assert len(played.tally.ends) == 2


async def test_stages_with_named_parents_form_a_graph(played: Played) -> None:
    """Two stages without parents start together, and a join waits for both."""
    await played.run(
        query(stage("left", parents=()), stage("right", parents=()), stage("join", parents=(0, 1)))
    )
    by_stage = {request.stage: request for request in played.mesh.requests}
    assert by_stage["right"].parents == ()
    assert len(by_stage["join"].parents) == 2


async def test_only_the_first_call_leaves_the_arrival_to_the_broker(played: Played) -> None:
    """Every later call of a query carries one and the same arrival."""
    await played.run(query(stage("one", calls=2), stage("two")))
    first, *later = played.mesh.requests
    assert first.arrival_s is None
    assert len({request.arrival_s for request in later}) == 1
    assert later[0].arrival_s is not None


async def test_a_call_that_does_not_complete_ends_its_query_with_the_same_kind(
    played: Played,
) -> None:
    """Siblings already under way are waited for; later stages are never submitted."""
    played.mesh.answer = lambda request: ["evicted" if request.sibling == 1 else "completed"]
    await played.run(query(stage("one", calls=3), stage("two")))
    assert {request.stage for request in played.mesh.requests} == {"one"}
    assert played.tally.queries == {"submitted": 1, "evicted": 1}
    assert played.tally.calls["completed"] == 2
    assert played.tally.calls["evicted"] == 1
    assert played.tally.reasons == {"played": 1}
    assert played.tally.summary().attainment == 0.0


async def test_a_second_outcome_of_a_call_is_a_duplicate(played: Played) -> None:
    """The first outcome counts; the later one is counted as dropped and changes nothing."""
    played.mesh.answer = lambda _: ["completed", "failed"]
    await played.run(query(stage("one"), stage("two")))
    assert played.tally.queries["completed"] == 1
    assert played.tally.calls["failed"] == 0
    assert played.tally.calls["duplicates"] >= 1


async def test_stopping_cancels_open_queries_on_the_mesh(played: Played) -> None:
    """Open queries get a tombstone, later ones are not injected, and each ends once."""
    arrived = asyncio.Event()

    def answer(_: StageRequest) -> list[str]:
        arrived.set()
        return []

    async def stop_soon() -> None:
        await arrived.wait()
        played.stop.set()

    played.mesh.answer = answer
    async with asyncio.TaskGroup() as group:
        group.create_task(stop_soon(), name="stop")
        group.create_task(
            played.run(query(stage("one")), query(stage("one"), query_id="q1", arrival_s=1e6)),
            name="run",
        )
        await arrived.wait()
        cancelled = await played.mesh.cancelled_queries()
        await cancel_outcome(played, played.mesh.requests[0])
    assert cancelled == {"run-q0"}
    assert played.tally.queries == {"submitted": 1, "cancelled": 1}
    assert played.tally.num_active == 0


async def cancel_outcome(played: Played, request: StageRequest) -> None:
    """Publish a call's cancelled outcome, as its holder on a real mesh does."""
    outcome = CallOutcome(
        request_id=request.request_id, query_id=request.query_id, kind="cancelled"
    )
    reply = request.reply_to
    await played.mesh.publisher.once(reply.topic, outcome, partition=reply.partition)


async def test_a_call_too_large_for_the_mesh_rejects_its_query(played: Played) -> None:
    """The broker refuses the first call; the query ends as rejected and never arrived."""
    huge = msgspec.structs.replace(query(stage("one")), workflow="w", tenant="t" * 5_000)
    await played.run(huge)
    assert played.tally.queries == {"submitted": 1, "rejected": 1}
    assert played.tally.ends == []


async def test_numbers_come_from_outcomes(played: Played) -> None:
    """Per-instance counts and times are those of the outcomes, and so is an SLO the mesh chose."""
    unset = msgspec.structs.replace(query(stage("one"), stage("two")), slo_s=None)
    await played.run(unset)
    report = played.tally.to_json()
    assert report["per_instance"]["a"]["calls"] == 2
    assert report["per_instance"]["a"]["mean_queue_s"] == 1.0
    assert report["per_instance"]["a"]["mean_service_s"] == 2.0
    assert played.tally.ends[0].slo_s != float("inf")


def test_ids_stay_unique_and_short():
    """Ids of a recorded trace may be long; on the mesh they fit a message and differ by run."""
    long = "x" * 200
    assert len(mesh_query_id("run0-abc", long)) <= 128
    assert mesh_query_id("run0-abc", long) != mesh_query_id("run0-abc", long + "y")
    assert mesh_query_id("run0-abc", "q1") != mesh_query_id("run0-abd", "q1")
