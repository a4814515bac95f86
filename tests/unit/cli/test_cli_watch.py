"""What the command line learns from a mesh's own topics."""

import asyncio
import time

import msgspec
import pytest

from services.cli.remote import live_instances, scale_of
from services.cli.session import MeshAccess
from services.cli.watch import watch_line, watch_table, watching
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.messages import (
    AlphaUpdate,
    CallTimes,
    InstanceState,
    LatencyEvent,
    RecoveryProbe,
    SpeedUpdate,
)
from shared.contracts.topics import CONTROL, INSTANCE_STATES, LATENCY_EVENTS, Topics
from shared.errors import ConfigError
from shared.runtime.publishing import Publisher
from shared.simulation.fleets import builtin_fleet

TOPICS = Topics()
SPECS = builtin_fleet("hetero-1")


@pytest.fixture
async def access() -> MeshAccess:
    """Return an empty mesh at time scale 10."""
    clock = SystemClock(time_scale=10.0)
    broker = MemoryBroker(clock)
    await broker.create_topics(TOPICS.specs())
    return MeshAccess(broker=broker, clock=clock, topics=TOPICS)


async def announce(access: MeshAccess, index: int, **fields: object) -> None:
    """Publish an instance's state."""
    state = InstanceState(
        instance_id=SPECS[index].instance_id,
        phase="serving",
        spec=SPECS[index],
        at_s=access.clock.now_s(),
    )
    state = msgspec.structs.replace(state, **fields)
    publisher = Publisher(access.broker, access.topics, access.clock)
    await publisher.once(INSTANCE_STATES, state, key=state.instance_id)


async def test_only_instances_that_serve_count_as_live(access: MeshAccess):
    """A draining instance and a recovery owner's probe are no instances to send calls to."""
    await announce(access, 0)
    await announce(access, 1)
    await announce(access, 1, phase="draining")
    publisher = Publisher(access.broker, access.topics, access.clock)
    probe = RecoveryProbe(owner_id="d0", seq=1)
    await publisher.once(INSTANCE_STATES, probe, key="probe/d0")
    live = await live_instances(access.broker, TOPICS, time.time())
    assert [instance.spec for instance in live] == [SPECS[0]]


async def test_a_long_silent_instance_is_not_live(access: MeshAccess):
    """What announced itself an hour ago and never again does not serve now."""
    await announce(access, 0)
    assert await live_instances(access.broker, TOPICS, time.time() + 3_600) == []


async def test_the_time_scale_is_what_the_workers_say(access: MeshAccess):
    """The producer takes over the mesh's scale, and refuses another one."""
    await announce(access, 0)
    live = await live_instances(access.broker, TOPICS, time.time())
    assert scale_of(live, None) == pytest.approx(10.0)
    assert scale_of(live, 10.0) == 10.0
    with pytest.raises(ConfigError, match="time scale 10"):
        scale_of(live, 1.0)


async def test_workers_at_different_scales_are_refused(access: MeshAccess):
    """Times of such a mesh mean nothing."""
    await announce(access, 0)
    await announce(access, 1, at_s=access.clock.wall_unix_s())
    live = await live_instances(access.broker, TOPICS, time.time())
    with pytest.raises(ConfigError, match="different time scales"):
        scale_of(live, None)


async def test_watching_follows_states_events_and_alpha(access: MeshAccess):
    """The live view shows backlog, outcomes, P95 and α as the topics tell them."""
    publisher = Publisher(access.broker, access.topics, access.clock)
    event = LatencyEvent(
        request_id="r",
        query_id="q",
        workflow="w",
        stage="s",
        model="m",
        kind="completed",
        arrival_s=1.0,
        slo_s=1.0,
        times=CallTimes(ready_at_s=10.0, finished_at_s=17.5),
    )
    async with watching(access) as watch:
        await announce(access, 0, num_waiting=3, num_running=2)
        await publisher.once(LATENCY_EVENTS, event, key="q")
        update = AlphaUpdate(pool="default", alpha=0.04, revision=1)
        await publisher.once(CONTROL, update, key="alpha/default")
        for _ in range(200):
            if watch.alphas and watch.outcomes and watch.states:
                break
            await access.clock.sleep_wall(0.01)
    line = watch_line(watch)
    assert "waiting 3, running 2" in line
    assert "completed 1" in line
    assert "call P95 7.5 s" in line
    assert "α of default 0.04" in line


async def test_an_instance_that_left_disappears(access: MeshAccess):
    """`gone` removes the row."""
    async with watching(access) as watch:
        await announce(access, 0)
        await announce(access, 1)
        await announce(access, 0, phase="gone")
        for _ in range(200):
            if set(watch.states) == {SPECS[1].instance_id}:
                break
            await access.clock.sleep_wall(0.01)
    assert set(watch.states) == {SPECS[1].instance_id}


async def test_drift_from_the_profile_is_told(access: MeshAccess):
    """An instance that takes far longer than its profile says is named; a small factor is not."""
    publisher = Publisher(access.broker, access.topics, access.clock)
    for index, factor in enumerate((1.8, 1.1)):
        await announce(access, index)
        name = SPECS[index].instance_id
        update = SpeedUpdate(instance_id=name, factor=factor, revision=1)
        await publisher.once(CONTROL, update, key=f"speed/{name}")
    async with watching(access) as watch, asyncio.timeout(30):
        while len(watch.speeds) < 2 or len(watch.states) < 2:
            await asyncio.sleep(0.01)
    assert watch.drifted() == {SPECS[0].instance_id: 1.8}
    assert f"{SPECS[0].instance_id} takes 1.8 × its profile" in watch_line(watch)
    assert watch_table(watch).row_count == 2


@pytest.mark.parametrize(("failures", "shown"), [(2, "serving"), (3, "failing (3 in a row)")])
async def test_an_engine_that_fails_call_after_call_is_shown(
    access: MeshAccess, failures: int, shown: str
):
    """Who looks at the fleet sees why an instance gets no work."""
    await announce(access, 0, failures_in_a_row=failures)
    async with watching(access) as watch, asyncio.timeout(30):
        while not watch.states:
            await asyncio.sleep(0.01)
    assert list(watch_table(watch).columns[2].cells) == [shown]
