"""The tuner on the in-process broker: what it publishes, and when it keeps still."""

import asyncio

import msgspec
import pytest

from services.tuner.app import replay_processes
from services.tuner.replay import ProcessReplay
from shared.contracts.codec import encode
from shared.contracts.messages import AlphaUpdate, SpeedUpdate, WorkflowProfile
from shared.contracts.topics import CONTROL, LATENCY_EVENTS
from shared.simulation.speed_fit import SpeedFit
from tests.support.tuner_bench import TOPICS, running
from tests.support.tuning import ChosenReplay, query_events


async def test_a_better_alpha_is_published_with_its_reason():
    """A clear, trusted gain is published on `control` with a revision and a reason."""
    replay = ChosenReplay({0.7: 40.0, 0.01: 20.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        updates = await bench.alphas()
        while not updates:
            await asyncio.sleep(0.01)
            updates = await bench.alphas()
    (update,) = updates
    assert (update.pool, update.alpha, update.previous_alpha) == ("default", 0.01, 0.7)
    assert update.revision == 1
    assert update.predicted_p95_s == 20.0
    assert "20" in update.reason


async def test_a_replay_that_does_not_reproduce_reality_moves_nothing():
    """The simulator is off by far more than the bound: no α is published."""
    replay = ChosenReplay({0.7: 400.0, 0.01: 20.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        await asyncio.sleep(0.1)
        assert await bench.alphas() == []


async def test_a_gain_within_the_margin_moves_nothing():
    """One percent is not worth a change."""
    replay = ChosenReplay({0.7: 40.0, 0.01: 39.6}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        await asyncio.sleep(0.1)
        assert await bench.alphas() == []


async def test_too_few_queries_move_nothing():
    """A handful of queries is no evidence."""
    replay = ChosenReplay({0.7: 40.0, 0.01: 20.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0, count=5)
        await asyncio.sleep(1.2)
        assert replay.requests == []


async def test_shapes_learned_from_the_window_are_published():
    """An undeclared workflow is learned: stages, lengths, what follows what."""
    replay = ChosenReplay({0.7: 40.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        profiles = [u for u in await bench.control() if isinstance(u, WorkflowProfile)]
    shape = profiles[0].shape
    assert shape.workflow == "demo"
    assert shape.stages["judge"].siblings == pytest.approx(2.0, rel=0.2)
    assert shape.remaining["draft/0"]["judge"] == pytest.approx(1.0, rel=0.2)


async def test_garbage_is_buried_and_does_not_stop_the_tuner():
    """A poison event goes to dead-letters once."""
    replay = ChosenReplay({0.7: 40.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.broker.publish(TOPICS.name(LATENCY_EVENTS), b"\xc1")
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
    assert bench.metrics.totals()["hexflow_dead_letters_total{reason=undecodable}"] == 1.0


async def test_the_real_simulator_answers_in_a_process_of_its_own():
    """The whole chain, with the compiled simulator behind the port."""
    with replay_processes() as executor:
        async with running(ProcessReplay(executor)) as bench:
            await bench.feed(latency_s=40.0)
            async with asyncio.timeout(100):
                while not await bench.control():
                    await asyncio.sleep(0.05)


async def test_the_speed_of_an_instance_is_published_once_it_is_known():
    """Three times slower than profiled: a factor near three, drawn a little to what was known.

    The replay that follows has the true speed, what is believed from now on, and what was believed.
    """
    fit = SpeedFit(factor=3.0, num_calls=100)
    replay = ChosenReplay({0.7: 40.0}, {"a100-0": 1.0}, {"a100-0": fit})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        speeds = [u for u in await bench.control() if isinstance(u, SpeedUpdate)]
    assert speeds[0].instance_id == "a100-0"
    assert 2.5 < speeds[0].factor <= 3.0
    (request,) = replay.requests
    assert request.speed_factors == {"a100-0": 3.0}
    assert request.believed_factors == {"a100-0": speeds[0].factor}
    assert request.past is not None
    assert request.past.believed_factors == {"a100-0": 1.0}


async def test_a_tuner_that_comes_next_reads_the_window_again_and_goes_on():
    """The first one stops before it has seen enough; the next has all events, none twice."""
    replay = ChosenReplay({0.7: 40.0, 0.01: 20.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0, count=12)
        await asyncio.sleep(1.0)
        assert replay.requests == []
        broker = bench.broker
    async with running(replay, broker=broker) as bench:
        await bench.feed(latency_s=40.0, count=12, start_s=100.0)
        await bench.until(lambda: len(replay.requests) >= 1)
    assert len(replay.requests[0].queries) == 24


async def test_revisions_go_on_where_the_last_tuner_stopped():
    """A standby that takes over replaces α with the next revision, not the first."""
    replay = ChosenReplay({0.01: 40.0, 0.1: 20.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        known = AlphaUpdate(pool="default", alpha=0.01, revision=7, previous_alpha=0.7)
        await bench.broker.publish(TOPICS.name(CONTROL), encode(known), key=b"alpha/default")
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        updates = await bench.alphas()
        while len(updates) < 2:
            await asyncio.sleep(0.01)
            updates = await bench.alphas()
    assert replay.requests[0].current == 0.01
    assert (updates[-1].revision, updates[-1].previous_alpha) == (8, 0.01)


async def test_a_change_that_broke_its_promise_is_rolled_back():
    """20 s were promised, 40 s are measured, and the simulator still says 20 s: undo."""
    replay = ChosenReplay({0.7: 40.0, 0.01: 20.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        known = AlphaUpdate(
            pool="default",
            alpha=0.01,
            revision=1,
            previous_alpha=0.7,
            predicted_p95_s=20.0,
            predicted_high_s=22.0,
        )
        await bench.broker.publish(TOPICS.name(CONTROL), encode(known), key=b"alpha/default")
        await asyncio.sleep(0.3)
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        updates = await bench.alphas()
        while len(updates) < 2:
            await asyncio.sleep(0.01)
            updates = await bench.alphas()
    assert (updates[-1].alpha, updates[-1].revision) == (0.7, 2)
    assert "rolled back" in updates[-1].reason


async def test_a_slower_mesh_that_the_simulator_explains_is_not_rolled_back():
    """The workload changed, not the promise: the simulator reproduces what is measured."""
    replay = ChosenReplay({0.7: 80.0, 0.01: 40.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        known = AlphaUpdate(
            pool="default", alpha=0.01, revision=1, previous_alpha=0.7, predicted_p95_s=20.0
        )
        await bench.broker.publish(TOPICS.name(CONTROL), encode(known), key=b"alpha/default")
        await asyncio.sleep(0.3)
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        await asyncio.sleep(0.2)
        assert len(await bench.alphas()) == 1


async def test_poisoned_events_are_counted_and_move_nothing():
    """Jumped clocks, duplicates, unknown instances: the window holds only what can be true."""
    replay = ChosenReplay({0.7: 40.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        topic = TOPICS.name(LATENCY_EVENTS)
        good = query_events("good", arrival_s=1.0, latency_s=40.0)
        for event in [
            *query_events("ghost", arrival_s=1.0, latency_s=40.0, instance_id="nobody"),
            *query_events("later", arrival_s=1e12, latency_s=40.0),
            *query_events("back", arrival_s=1_000.0, latency_s=-900.0),
            *good,
            *good,
        ]:
            await bench.broker.publish(topic, encode(event))
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
    totals = bench.metrics.totals()
    assert totals["hexflow_events_ignored_total{cause=unknown_instance}"] == 3.0
    assert totals["hexflow_events_ignored_total{cause=future}"] == 3.0
    assert totals["hexflow_events_ignored_total{cause=time_runs_backwards}"] >= 1.0
    assert totals["hexflow_duplicates_dropped_total{topic=latency-events}"] == 3.0
    assert {query.query_id for query in replay.requests[0].queries} >= {"good"}
    assert len(replay.requests[0].queries) == 26


async def test_a_tenant_that_lies_about_tokens_is_clipped_and_counted():
    """Its calls are a thousand times longer than others': the shared profile moves little."""
    replay = ChosenReplay({0.7: 40.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        topic = TOPICS.name(LATENCY_EVENTS)
        for index in range(10):
            for event in query_events(f"lie{index}", arrival_s=float(index), latency_s=40.0):
                usage = msgspec.structs.replace(event.usage, output_tokens=50_000)
                lie = msgspec.structs.replace(event, tenant="liar", usage=usage)
                await bench.broker.publish(topic, encode(lie))
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
        profiles = [u for u in await bench.control() if isinstance(u, WorkflowProfile)]
    assert profiles[-1].shape.stages["draft"].output_tokens < 2 * 4 * 50
    assert bench.metrics.totals()["hexflow_events_ignored_total{cause=clipped_length}"] == 10.0


async def test_the_window_is_shown_per_tenant_and_workflow():
    """P50, P95, P99 and attainment are gauges with bounded labels."""
    replay = ChosenReplay({0.7: 40.0}, {"a100-0": 1.0})
    async with running(replay) as bench:
        await bench.feed(latency_s=40.0)
        await bench.until(lambda: len(replay.requests) >= 1)
    text = bench.metrics.render().decode()
    assert 'quantile="0.95",service="tuner",tenant="default",workflow="demo"} 40.0' in text
    assert 'hexflow_window_attainment{instance="",service="tuner",tenant="default"' in text
