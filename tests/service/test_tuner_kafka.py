"""Tuners as processes on real Apache Kafka: one acts, one stands by, and nothing is forgotten."""

import asyncio
import json
import os
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.cli.adaptation import Phase, queries_of, scenario_of_phase
from services.dispatcher.app import build_dispatcher
from services.dispatcher.params import DispatcherParams
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from shared.adapters.local_process import LocalProcess
from shared.contracts.codec import decode, decode_any, encode
from shared.contracts.messages import (
    AlphaUpdate,
    BoundCall,
    InstanceState,
    LatencyEvent,
    SpeedUpdate,
    WorkflowProfile,
)
from shared.contracts.topics import (
    CONTROL,
    INSTANCE_STATES,
    LATENCY_EVENTS,
    STAGE_REQUESTS,
    Topics,
)
from shared.ports import TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.scheduling.shapes import default_shapes
from shared.simulation.fleets import builtin_fleet
from shared.simulation.simulator import simulate
from tests.support.dispatching import make_request
from tests.support.servers import KafkaServer
from tests.support.tuning import events_of_run

pytestmark = pytest.mark.slow

FLEET = builtin_fleet("hetero-1")
NUM_QUERIES, BEFORE_THE_KILL, MIN_QUERIES = 150, 90, 120


@pytest.fixture(scope="module")
def events() -> list[LatencyEvent]:
    """What an overloaded mesh tells at α = 0.7, where a smaller one would be surely better."""
    phase = Phase(name="busy", rate_qps=3.0, num_queries=NUM_QUERIES, output_tokens=300)
    queries = queries_of(phase, FLEET, 1, "q")
    scenario = msgspec.structs.replace(
        scenario_of_phase(phase, queries, FLEET, alpha=0.7), shapes=default_shapes()
    )
    run = simulate(scenario, core="interpreted")
    return events_of_run(run, queries, from_s=time.time() - 5_000.0)


class Place:
    """Topics of one test on the shared broker."""

    def __init__(self, server: KafkaServer, broker: KafkaBroker, folder: Path) -> None:
        self.bootstrap = server.bootstrap
        self.broker = broker
        self.folder = folder
        self.prefix = f"tuner{secrets.token_hex(4)}."
        self.topics = Topics(prefix=self.prefix, state_partitions=1, request_partitions=1)

    def tuner(self, name: str) -> LocalProcess:
        """Start a tuner."""
        environ = {
            **os.environ,
            "HEXFLOW_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap,
            "HEXFLOW_KAFKA__SESSION_TIMEOUT_S": "6",
            "HEXFLOW_TOPICS__PREFIX": self.prefix,
            "HEXFLOW_TOPICS__STATE_PARTITIONS": "1",
            "HEXFLOW_TOPICS__REQUEST_PARTITIONS": "1",
            "TUNER_TUNER_ID": name,
            "TUNER_INITIAL_ALPHA": "0.7",
            "TUNER_MIN_QUERIES": str(MIN_QUERIES),
            "TUNER_QUIET_S": "30",
        }
        log = self.folder / f"{name}.log"
        found = LocalProcess(name, [sys.executable, "-m", "services.tuner"], log, environ)
        found.start()
        return found

    async def announce(self) -> None:
        """Let the instances of the fleet say that they serve."""
        for spec in FLEET:
            state = InstanceState(
                instance_id=spec.instance_id, phase="serving", epoch=0, spec=spec, at_s=time.time()
            )
            await self.publish(INSTANCE_STATES, state, spec.instance_id)

    async def publish(self, topic: str, message: Any, key: str) -> None:
        """Publish a message."""
        await self.broker.publish(self.topics.name(topic), encode(message), key=key.encode())

    async def feed(self, events: Sequence[LatencyEvent]) -> None:
        """Publish latency events, in order."""
        topic = self.topics.name(LATENCY_EVENTS)
        await asyncio.gather(*(self.broker.publish(topic, encode(event)) for event in events))

    async def control(self) -> list[AlphaUpdate | WorkflowProfile | SpeedUpdate]:
        """Return what is on `control`."""
        return [
            decode_any(value, AlphaUpdate, WorkflowProfile, SpeedUpdate)
            for value in await self.values(self.topics.name(CONTROL))
        ]

    async def alphas(self) -> list[AlphaUpdate]:
        """Return the α published, in order."""
        return [update for update in await self.control() if isinstance(update, AlphaUpdate)]

    async def values(self, name: str) -> list[bytes]:
        """Return every value on a topic of one partition."""
        tp = TopicPartition(name, 0)
        found: list[bytes] = []
        async with self.broker.partition_consumer([tp], start="beginning") as consumer:
            end = (await consumer.end_offsets())[tp]
            while await consumer.position(tp) < end:
                found += [r.value or b"" for r in await consumer.fetch(timeout_s=1.0)]
        return found

    def decisions(self, process: LocalProcess) -> list[dict[str, Any]]:
        """Return the decisions in a tuner's log."""
        lines = process.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if '"tuning_decided"' in line]


@pytest.fixture
async def place(kafka_server: KafkaServer, tmp_path: Path) -> AsyncIterator[Place]:
    """Return topics of this test's own, with a fleet on them."""
    async with KafkaBroker.open(KafkaParams(bootstrap_servers=kafka_server.bootstrap)) as broker:
        found = Place(kafka_server, broker, tmp_path)
        await broker.create_topics(found.topics.specs())
        await found.announce()
        yield found


async def until(fact: Callable[[], Any], seconds: float = 400.0) -> Any:
    """Wait until a fact, plain or async, holds; return its value."""
    async with asyncio.timeout(seconds):
        while True:
            value = fact()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.2)


def owns(process: LocalProcess) -> bool:
    """Return whether a tuner says that the events are its own."""
    return bool(re.search(r"tuner_acts", process.log_path.read_text()))


async def test_the_standby_goes_on_with_the_window_of_a_tuner_that_was_killed(
    place: Place, events: list[LatencyEvent]
):
    """SIGKILL after 90 of 120 queries: the other one has all 150, and moves α."""
    by_arrival = sorted({event.query_id: event.arrival_s for event in events}.items(), key=_at)
    early = {query_id for query_id, _ in by_arrival[:BEFORE_THE_KILL]}
    first = place.tuner("first")
    second: LocalProcess | None = None
    try:
        await until(lambda: owns(first))
        second = place.tuner("second")
        await place.feed([event for event in events if event.query_id in early])
        learned = await until(place.control)
        assert {update.tuner_id for update in learned if isinstance(update, WorkflowProfile)} == {
            "first"
        }
        assert not owns(second)
        first.kill()
        await place.feed([event for event in events if event.query_id not in early])
        (update, *_) = await until(place.alphas)
    finally:
        first.stop()
        if second is not None:
            second.stop()
    assert (update.tuner_id, update.previous_alpha, update.revision) == ("second", 0.7, 1)
    assert update.alpha < 0.3
    decided = place.decisions(second)[0]
    assert decided["num_queries"] > MIN_QUERIES
    assert decided["calibration_error"] < 0.1
    assert place.decisions(first) == []


def _at(pair: tuple[str, float]) -> float:
    return pair[1]


@asynccontextmanager
async def dispatching(place: Place, name: str) -> AsyncIterator[None]:
    """Run a dispatcher on α = 0.5 until told otherwise."""
    clock, stop = SystemClock(), asyncio.Event()
    health = Health(clock)
    dispatcher = build_dispatcher(
        broker=place.broker,
        clock=clock,
        topics=place.topics,
        params=DispatcherParams(dispatcher_id=name, alpha=0.5, live_s=60.0, dead_after_s=600.0),
        metrics=Metrics("dispatcher"),
        health=health,
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(dispatcher.serve(stop), name=name)
        await until(lambda: not health.unready_causes())
        yield
        stop.set()


async def alpha_used(place: Place, request_id: str) -> float | None:
    """Send a call through the running dispatcher; return the α it was bound under."""
    await place.announce()
    await place.publish(STAGE_REQUESTS, make_request(request_id, query_id=request_id), request_id)

    async def bound() -> list[BoundCall]:
        found = []
        for spec in FLEET:
            values = await place.values(place.topics.instance(spec.instance_id))
            found += [decode(value, BoundCall) for value in values]
        return [call for call in found if call.request.request_id == request_id]

    (call, *_) = await until(bound)
    assert call.terms is not None
    return call.terms.alpha


async def test_the_last_good_values_outlive_tuner_and_dispatcher(place: Place):
    """Nobody tunes any more: each dispatcher that starts takes α from `control`."""
    await place.broker.create_topics(
        [place.topics.instance_spec(spec.instance_id) for spec in FLEET]
    )
    for revision, alpha in ((2, 0.02), (1, 0.9)):
        update = AlphaUpdate(pool=FLEET[0].model, alpha=alpha, revision=revision, tuner_id="gone")
        await place.publish(CONTROL, update, f"alpha/{update.pool}")
    async with dispatching(place, "one"):
        assert await alpha_used(place, "a") == 0.02
    async with dispatching(place, "two"):
        assert await alpha_used(place, "b") == 0.02


async def tune(place: Place, *arguments: str) -> dict[str, Any]:
    """Run `hexflow tune --json` and return what it prints."""
    environ = {
        **os.environ,
        "HEXFLOW_TOPICS__PREFIX": place.prefix,
        "HEXFLOW_TOPICS__STATE_PARTITIONS": "1",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "tune", *arguments),
        *("--out", str(place.folder), "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=environ,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(output)
    return found


async def test_tune_decides_on_the_window_of_a_live_topic(place: Place, events: list[LatencyEvent]):
    """`hexflow tune --kafka` reads events and fleet from the mesh, and keeps the window."""
    await place.feed(events)
    await place.announce()
    window = place.folder / "window.jsonl"
    live = await tune(place, "--kafka", place.bootstrap, "--save", str(window))
    assert (live["queries"], live["current_alpha"], live["is_change"]) == (NUM_QUERIES, 0.7, True)
    assert live["calibration_error"] < 0.1
    again = await tune(place, str(window), "--fleet", "hetero-1")
    assert (again["alpha"], again["runs"]) == (live["alpha"], live["runs"])
