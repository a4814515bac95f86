"""Sick instances: their waiting calls move, they get no more, and they are tried again."""

from typing import Any

import pytest

from tests.support.dispatching import Instance, Mesh, make_request
from tests.support.worker_bench import Bench, altered, bound_call, until


@pytest.fixture
async def mesh() -> Mesh:
    """Return a mesh without instances."""
    return await Mesh().open()


async def test_waiting_calls_leave_an_engine_that_fails_call_after_call(bench: Bench) -> None:
    """Three failures in a row, and what waits goes back but for one; none counts as failed."""
    bench.engine.fail_next(3)
    params = altered(capacity=1, failure_threshold=3, failure_pause_s=30.0, max_attempts=1)
    async with bench.worker(params):
        await bench.send(*(bound_call(f"c{index}", score=index) for index in range(8)))
        found = await until(bench.handed_back, lambda found: len(found) == 4)
        states = await until(bench.states, lambda found: found[-1].failures_in_a_row == 3)
        outcomes = await bench.outcomes_once(3)
    assert sorted(call.request_id for call in found) == ["c4", "c5", "c6", "c7"]
    assert {(call.failures, call.failed_on) for call in found} == {(0, ())}
    assert {outcome.reason for outcome in outcomes} == {"generation_failed"}
    assert states[-1].num_waiting <= 1  # the next one to be tried


async def test_waiting_calls_leave_an_engine_that_hangs(bench: Bench) -> None:
    """Without progress for long what waits goes back; what runs may still end here."""
    bench.engine.hang()
    async with bench.worker(altered(capacity=1, suspect_s=0.05)):
        await bench.send(bound_call("running", t_comp_s=0.01), bound_call("waiting", t_comp_s=0.01))
        (moved,) = await until(bench.handed_back, lambda found: len(found) == 1)
        await until(bench.states, lambda found: found[-1].stalled_s > 0.0)
        bench.engine.recover()
        (outcome,) = await bench.outcomes_once(1)
    assert (moved.request_id, moved.failures) == ("waiting", 0)
    assert (outcome.request_id, outcome.kind) == ("running", "completed")


async def test_a_failing_instance_gets_one_probe_and_then_all(mesh: Mesh) -> None:
    """While it fails others get the calls; after a pause it gets one, and its success is seen."""
    well, sick = await mesh.instance("well"), await mesh.instance("sick")
    async with mesh.running(policy="least-outstanding"):
        await _says(mesh, sick, failures_in_a_row=3)
        await mesh.submit(*(make_request(f"early-{index}") for index in range(6)))
        await mesh.until(lambda: _bound(mesh, 6))
        assert await sick.received() == []
        await mesh.pass_time(2.0, beating=[well])
        await _says(mesh, sick, failures_in_a_row=3)
        await mesh.submit(*(make_request(f"later-{index}") for index in range(6)))
        await mesh.until(lambda: _bound(mesh, 12))
        assert len(await sick.received()) == 1
        await _says(mesh, sick, accounted_offset=0)
        await mesh.submit(*(make_request(f"last-{index}") for index in range(6)))
        await mesh.until(lambda: _bound(mesh, 18))
    assert len(await sick.received()) > 2


async def test_a_stalled_instance_gets_nothing_until_it_moves(mesh: Mesh) -> None:
    """Calls run there without a token: others get the work; a token brings it back."""
    well, stuck = await mesh.instance("well"), await mesh.instance("stuck")
    async with mesh.running(policy="least-outstanding"):
        await _says(mesh, well, num_running=3)
        await _says(mesh, stuck, num_running=1, backlog_s=1.0, stalled_s=60.0)
        await mesh.submit(*(make_request(f"a{index}") for index in range(4)))
        await mesh.until(lambda: _bound(mesh, 4))
        assert await stuck.received() == []
        await _says(mesh, stuck, num_running=1, backlog_s=1.0, stalled_s=0.1)
        await mesh.submit(*(make_request(f"b{index}") for index in range(4)))
        await mesh.until(lambda: _bound(mesh, 8))
    assert await stuck.received() != []


async def test_where_most_seem_sick_nobody_is_held_back(mesh: Mesh) -> None:
    """If nearly all fail it is the calls: they are still given out."""
    (one,) = [await mesh.instance("only")]
    async with mesh.running():
        await _says(mesh, one, failures_in_a_row=50)
        await mesh.submit(*(make_request(f"a{index}") for index in range(4)))
        await mesh.until(lambda: _bound(mesh, 4))


async def _bound(mesh: Mesh, count: int) -> bool:
    return len(await mesh.bound()) >= count


async def _says(mesh: Mesh, instance: Instance, **fields: Any) -> None:
    """Publish a state; return when the dispatcher has read it."""
    await instance.say(**fields)
    count = len(await mesh.records("instance-states"))
    name = "hexflow_messages_read_total{topic=instance-states}"
    await mesh.until(lambda: mesh.metrics.totals().get(name, 0) >= count)
