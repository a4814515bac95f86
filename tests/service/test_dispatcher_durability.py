"""The dispatcher when things break: crashes, a broker that is cut off, partitions that move."""

import asyncio
from collections import Counter

import pytest

from shared.contracts.codec import decode
from shared.contracts.messages import BoundCall
from shared.contracts.topics import STAGE_REQUESTS
from shared.ports import TopicPartition
from tests.support.dispatching import TOPICS, Mesh, make_request


@pytest.fixture
async def mesh() -> Mesh:
    """Return a mesh without instances."""
    return await Mesh().open()


async def _received(mesh: Mesh, count: int) -> list[BoundCall] | None:
    found = await mesh.bound()
    return found if len(found) >= count else None


async def test_a_crash_between_publish_and_commit_repeats_the_same_delivery(mesh: Mesh):
    """The next dispatcher publishes it again under the same (request_id, attempt)."""
    await mesh.instance()
    async with mesh.running(commit_interval_s=1e6) as first:
        await mesh.submit(*(make_request(f"r{i}", query_id="q") for i in range(5)))
        await mesh.until(lambda: _received(mesh, 5))
        await first.kill()
    assert mesh.committed(STAGE_REQUESTS) == 0
    async with mesh.running(id="d2"):
        calls = await mesh.until(lambda: _received(mesh, 10))
    keys = Counter((c.request.request_id, c.request.attempt) for c in calls)
    assert keys == {(f"r{i}", 0): 2 for i in range(5)}
    assert len({(c.request.request_id, c.request.ready_at_s) for c in calls}) == 5


async def test_a_broker_outage_makes_unready_and_restarts_nobody(mesh: Mesh):
    """Readiness tells of it at once; liveness does not, for a new process would not help."""
    async with mesh.running():
        mesh.broker.is_down = True
        await mesh.until(lambda: mesh.health.unready_causes() == {"broker": "cut off"})
        for _ in range(4):
            await mesh.pass_time(50)
            await mesh.until(lambda: not mesh.health.overdue())
        mesh.broker.is_down = False
        await mesh.until(lambda: not mesh.health.unready_causes())


async def test_calls_not_assigned_stay_for_the_next_dispatcher(mesh: Mesh):
    """A clean stop commits what was handed on, above an earlier call that was not."""
    await mesh.instance()
    async with mesh.running() as first:
        await mesh.submit(
            make_request("stuck", query_id="q", model="rare"),
            *(make_request(f"r{i}", query_id="q") for i in range(3)),
        )
        # Known but not live, so that its calls wait.
        rare = await mesh.instance("rare", model="rare", topic=False)
        await rare.say("draining")
        await mesh.until(lambda: _received(mesh, 3))
        await first.stop()
    assert await mesh.outcomes() == []
    await mesh.broker.create_topics([TOPICS.instance_spec("rare")])
    await rare.say("serving")
    async with mesh.running(id="d2"):
        calls = await mesh.until(lambda: _received(mesh, 4))
        await mesh.clock.settle()
    assert Counter(c.request.request_id for c in calls) == Counter(["stuck", "r0", "r1", "r2"])


async def test_a_broker_outage_delays_calls_and_repeats_none(mesh: Mesh):
    """What is being published when the broker goes away is published when it is back."""
    await mesh.instance()
    async with mesh.running():
        await mesh.submit(*(make_request(f"r{i}") for i in range(3)))
        await mesh.until(lambda: _received(mesh, 3))
        mesh.broker.refuse_publish = lambda topic: topic == TOPICS.instance("a")
        await mesh.submit(*(make_request(f"s{i}") for i in range(3)))
        await asyncio.sleep(0.15)
        assert len(await mesh.bound()) == 3
        mesh.broker.refuse_publish = lambda _: False
        calls = await mesh.until(lambda: _received(mesh, 6))
    assert len({c.request.request_id for c in calls}) == 6


async def test_a_stop_while_the_broker_is_down_ends_and_commits_nothing_unfinished(mesh: Mesh):
    """Shutting down never hangs on a publish that cannot succeed."""
    await mesh.instance()
    async with mesh.running() as running:
        mesh.broker.refuse_publish = lambda topic: topic.startswith(TOPICS.instance(""))
        await mesh.submit(make_request("r", query_id="q"))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            await running.stop()
    ends = sum(mesh.committed(STAGE_REQUESTS, partition=p) for p in range(3))
    assert ends == 0
    mesh.broker.refuse_publish = lambda _: False
    async with mesh.running(id="d2"):
        await mesh.until(lambda: _received(mesh, 1))


async def test_a_call_leaves_an_instance_that_dies_before_its_record_is_taken(mesh: Mesh):
    """A publish that the broker does not take is not tied to its first choice."""
    fast = await mesh.instance("fast")
    async with mesh.running(alpha=1.0):
        mesh.broker.refuse_publish = lambda topic: topic == TOPICS.instance("fast")
        await mesh.submit(make_request("r"))
        await asyncio.sleep(0.05)
        slow = await mesh.instance("slow", decode_s=0.5)
        await fast.say("gone")
        await mesh.until(slow.received)
    assert await fast.received() == []


async def test_before_a_partition_moves_its_waiting_calls_are_dropped_and_the_rest_committed(
    mesh: Mesh,
):
    """The new owner repeats only what was not handed on, and the old one gives none of it out."""
    instance = await mesh.instance()
    rare = await mesh.instance("rare", model="rare")
    await rare.say("draining")
    async with mesh.running(commit_interval_s=1e6):
        await mesh.submit(
            make_request("done", query_id="q"), make_request("waits", query_id="q", model="rare")
        )
        await mesh.until(instance.received)
        (record, _) = await mesh.records(STAGE_REQUESTS)
        await mesh.broker.hooks["t.dispatcher"]([record.tp])
        assert mesh.committed(STAGE_REQUESTS, partition=record.tp.partition) == record.offset + 1
        await rare.say("serving")
        await mesh.pass_time(1, beating=[instance, rare])
        assert await rare.received() == []
        # The partition comes back: the call that was dropped is read and assigned, once.
        mesh.broker.consumers["t.dispatcher"].seek(record.tp, record.offset)
        await mesh.until(rare.received)
        await mesh.pass_time(1, beating=[instance, rare])
    assert len(await rare.received()) == 1


async def test_a_publish_under_way_is_waited_for_before_its_partition_moves(mesh: Mesh):
    """The hook returns when the record is acknowledged, and its place is committed by then."""
    instance = await mesh.instance()
    async with mesh.running(commit_interval_s=1e6, revoke_wait_s=5.0):
        mesh.broker.refuse_publish = lambda topic: topic == TOPICS.instance("a")
        await mesh.submit(make_request("r", query_id="q"))
        await asyncio.sleep(0.05)
        (record,) = await mesh.records(STAGE_REQUESTS)
        moving = asyncio.ensure_future(mesh.broker.hooks["t.dispatcher"]([record.tp]))
        await asyncio.sleep(0.05)
        assert not moving.done()
        mesh.broker.refuse_publish = lambda _: False
        await moving
        assert len(await instance.received()) == 1
        assert mesh.committed(STAGE_REQUESTS, partition=record.tp.partition) == 1


async def test_nothing_is_assigned_from_a_partition_that_is_moving(mesh: Mesh):
    """Waiting calls are dropped before the hook waits for publishes under way."""
    await mesh.instance()
    rare = await mesh.instance("rare", model="rare")
    await rare.say("draining")
    async with mesh.running(revoke_wait_s=5.0):
        mesh.broker.refuse_publish = lambda topic: topic == TOPICS.instance("a")
        await mesh.submit(
            make_request("r", query_id="q"), make_request("waits", query_id="q", model="rare")
        )
        await asyncio.sleep(0.05)
        (record, _) = await mesh.records(STAGE_REQUESTS)
        moving = asyncio.ensure_future(mesh.broker.hooks["t.dispatcher"]([record.tp]))
        await asyncio.sleep(0.02)
        await rare.say("serving")
        await mesh.clock.settle()
        await asyncio.sleep(0.05)
        assert not moving.done()
        mesh.broker.refuse_publish = lambda _: False
        await moving
    assert await rare.received() == []


async def test_positions_travel_as_ranges_when_an_early_call_is_stuck(mesh: Mesh):
    """A restart repeats the stuck call only, though thousands of later ones are finished."""
    await mesh.instance()
    rare = await mesh.instance("rare", model="rare")
    await rare.say("draining")
    async with mesh.running():
        await mesh.submit(make_request("stuck", query_id="q", model="rare"))
        for start in range(0, 2_000, 500):
            await mesh.submit(
                *(make_request(f"r{i}", query_id="q") for i in range(start, start + 500))
            )
        await mesh.until(lambda: _received(mesh, 2_000), seconds=30)
    await mesh.instances["a"].say()
    await rare.say()
    async with mesh.running(id="d2"):
        await mesh.until(rare.received)
        await mesh.clock.settle()
    assert len(await mesh.bound()) == 2_001


async def test_what_came_while_positions_could_not_be_read_is_not_skipped(mesh: Mesh):
    """Records are fetched, then the broker goes away before the committed position is known."""
    instance = await mesh.instance()
    async with mesh.running():
        consumer = mesh.broker.consumers["t.dispatcher"]
        answers = asyncio.Event()
        real = consumer.committed

        async def committed(tp: TopicPartition):
            await answers.wait()
            return await real(tp)

        consumer.committed = committed  # type: ignore[method-assign]
        await mesh.submit(*(make_request(f"r{i}") for i in range(9)))
        await asyncio.sleep(0.05)
        assert await instance.received() == []
        answers.set()
        await mesh.until(lambda: _received(mesh, 9))


async def test_probes_report_ready_only_while_serving(mesh: Mesh):
    """Unready while starting and draining; every loop beats while it serves."""
    async with mesh.running() as running:
        assert mesh.health.unready_causes() == {}
        await mesh.submit(make_request("r", prompt=None))
        await mesh.until(mesh.outcomes)
        await mesh.pass_time(5)
        assert mesh.health.overdue() == []
        await mesh.clock.advance(0)
        await running.stop()
        assert mesh.health.unready_causes() == {"stop": "draining"}
        await mesh.clock.advance(100)
        assert mesh.health.overdue() == []


async def test_an_instance_record_carries_everything_a_worker_needs(mesh: Mesh):
    """Prediction, order, deadline and the reasons are all in the record."""
    instance = await mesh.instance()
    async with mesh.running():
        await mesh.submit(make_request("r", input_tokens_estimate=7, max_tokens=50))
        (record,) = await mesh.until(lambda: mesh.records("instance.a"))
    call = decode(record.value or b"", BoundCall)
    assert record.key == b"r"
    assert call.predicted_output_tokens == 50
    assert call.predicted_input_tokens == 7
    assert call.t_comp_s > 0
    assert call.terms.t_comp_s == call.t_comp_s
    assert call.queue_score == pytest.approx(
        call.request.ready_at_s + call.request.t_slo_s - call.t_comp_s
    )
    assert instance.spec.latency.weights_s * 49 == pytest.approx(call.t_comp_s - 0.035, abs=0.01)
