"""A replay of the tuner's own window reproduces its P95, whatever changed in it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from services.cli.adaptation import Phase, queries_of, scenario_of_phase
from services.tuner.app import build_tuner
from services.tuner.params import TunerParams
from services.tuner.replay import ProcessReplay
from services.tuner.tables import Tables
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.codec import encode
from shared.contracts.messages import InstanceState
from shared.contracts.topics import INSTANCE_STATES, LATENCY_EVENTS
from shared.ports import Record, TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.tuning_journal import Decided
from shared.scheduling.shapes import default_shapes
from shared.scheduling.tuning import TuningRules
from shared.simulation.fleets import builtin_fleet
from shared.simulation.scenario import Change
from shared.simulation.simulator import simulate
from tests.support.tuner_bench import TOPICS
from tests.support.tuning import events_of_run

FLEET = builtin_fleet("hetero-1")
NUM_QUERIES = 260
CHANGED_AT_S = 200.0
PARAMS = TunerParams(
    initial_alpha=0.3,
    min_queries=80,
    quiet_s=30.0,
    period_s=1e6,
    rules=TuningRules(min_queries=80),
)


async def decided_on(change: Change | None, **fields: Any) -> tuple[list[Decided], Tables]:
    """Run a workload with what is unknown to dispatchers; return what a tuner makes of it.

    The tuner has read everything before it looks for the first time.
    """
    phase = Phase(name="p", rate_qps=0.6, num_queries=NUM_QUERIES, output_tokens=80)
    queries = queries_of(phase, FLEET, 3, "c")
    scenario = msgspec.structs.replace(
        scenario_of_phase(phase, queries, FLEET, alpha=0.3),
        shapes=default_shapes(),
        believed_factors={},
        changes=() if change is None else (change,),
        **fields,
    )
    run = simulate(scenario, core="interpreted")
    clock, decided = SystemClock(), []
    broker = MemoryBroker(clock)
    await broker.create_topics(TOPICS.specs())
    with ThreadPoolExecutor(1) as executor:
        tuner = build_tuner(
            broker=broker,
            replay=ProcessReplay(executor),
            clock=clock,
            topics=TOPICS,
            params=PARAMS,
            metrics=Metrics("tuner"),
            health=Health(clock),
            journal=decided.append,
        )
        for offset, spec in enumerate(FLEET):
            state = InstanceState(instance_id=spec.instance_id, phase="serving", epoch=0, spec=spec)
            tuner.tables.on_state(record(INSTANCE_STATES, offset, encode(state)))
        for offset, event in enumerate(events_of_run(run, queries, from_s=1_000.0)):
            await tuner.take(record(LATENCY_EVENTS, offset, encode(event)))
        await tuner.step()
    return decided, tuner.tables


def record(topic: str, offset: int, value: bytes) -> Record:
    """Return a record as a broker delivers it."""
    return Record(
        tp=TopicPartition(TOPICS.name(topic), 0),
        offset=offset,
        key=None,
        value=value,
        append_unix_s=0.0,
    )


def within_five_percent(one: Decided) -> bool:
    """Whether the replay is as near as it has to be on simulated engines."""
    return one.calibration_error is not None and one.calibration_error < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (None, {}),
        (Change(at_s=CHANGED_AT_S, speed_factors={"a100-0": 3.0}), {}),
        (Change(at_s=CHANGED_AT_S, cold=tuple(spec.instance_id for spec in FLEET)), {}),
        (Change(at_s=CHANGED_AT_S, speed_factors={}), {"speed_factors": {"a100-1": 2.5}}),
        (Change(at_s=CHANGED_AT_S, alpha=0.3), {"cold": ("a100-0", "a100-1")}),
    ],
    ids=["steady", "an instance slows down", "caches are lost", "it is repaired", "cold ones"],
)
async def test_the_replay_is_within_five_percent(change: Change | None, fields: dict[str, Any]):
    """Calls were dispatched under a wrong belief of speeds and caches; the replay repeats that."""
    (decided,), _ = await decided_on(change, **fields)
    assert within_five_percent(decided), decided


@pytest.mark.slow
async def test_what_slowed_down_is_known_when_the_replay_is_made():
    """One decision, on the queries since the change, and the speed that goes with it."""
    change = Change(at_s=CHANGED_AT_S, speed_factors={"a100-0": 3.0})
    (decided,), tables = await decided_on(change)
    assert tables.speeds["a100-0"].factor == pytest.approx(3.0, rel=0.1)
    assert decided.num_queries < NUM_QUERIES - 60
