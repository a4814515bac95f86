"""Recovery: what a dead or departed instance held goes back, once and completely."""

import asyncio
from collections import Counter

import msgpack
import pytest

from shared.contracts.codec import decode_any, encode
from shared.contracts.messages import InstanceState, RecoveryProbe
from shared.contracts.topics import INSTANCE_STATES, STAGE_REQUESTS
from shared.ports import Committed, TopicPartition
from shared.runtime.offsets import OffsetTracker
from tests.support.dispatching import TOPICS, Instance, Mesh, make_request

DEAD_AFTER_S = 6.0


@pytest.fixture
async def mesh() -> Mesh:
    """Return a mesh without instances."""
    return await Mesh().open()


async def _bound(instance: Instance, count: int):
    calls = await instance.received()
    return calls if len(calls) >= count else None


async def _handed_back(mesh: Mesh) -> list[tuple[str, int]]:
    return sorted((r.request_id, r.attempt) for r in await mesh.requests() if r.attempt > 0)


async def _fences(mesh: Mesh) -> list[InstanceState]:
    states = [
        decode_any(r.value, InstanceState, RecoveryProbe)
        for r in await mesh.records(INSTANCE_STATES)
        if r.value is not None
    ]
    return [
        s for s in states if isinstance(s, InstanceState) and s.phase == "gone" and s.epoch == -1
    ]


async def _finish(mesh: Mesh, instance: Instance, *offsets: int) -> None:
    """Commit as the instance's worker: these offsets are handed on."""
    tp = TopicPartition(TOPICS.instance(instance.instance_id), 0)
    tracker = OffsetTracker(0)
    for offset in offsets:
        tracker.finish(offset)
    async with mesh.broker.inner.partition_consumer(
        [tp], start="committed", group=TOPICS.worker_group(instance.instance_id)
    ) as consumer:
        await consumer.commit({tp: tracker.committable()})


def _worker_committed(mesh: Mesh, instance: Instance) -> Committed | None:
    tp = TopicPartition(TOPICS.instance(instance.instance_id), 0)
    return mesh.broker.inner.committed(TOPICS.worker_group(instance.instance_id), tp)


async def test_all_and_only_the_unfinished_calls_of_a_dead_instance_go_back(mesh: Mesh):
    """They get attempt + 1, the same ready time and budget; finished ranges are skipped."""
    dead = await mesh.instance("dead")
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await mesh.submit(*(make_request(f"r{i}", query_id="q") for i in range(6)))
        before = await mesh.until(lambda: _bound(dead, 6))
        await _finish(mesh, dead, 0, 2, 3)
        await mesh.pass_time_until(lambda: _handed_back(mesh))
        other = await mesh.instance("other")
        again = await mesh.until(lambda: _bound(other, 3))
        await mesh.pass_time(1, beating=[other])
        committed = _worker_committed(mesh, dead)
    assert await _handed_back(mesh) == [("r1", 1), ("r4", 1), ("r5", 1)]
    assert committed == Committed(offset=6)
    first = {call.request.request_id: call.request for call in before}
    for call in again:
        old = first[call.request.request_id]
        assert call.request.attempt == 1
        assert call.request.ready_at_s == old.ready_at_s
        assert call.request.t_slo_s == old.t_slo_s
        assert call.request.arrival_s == old.arrival_s


async def test_a_fence_begins_an_epoch_at_its_own_offset(mesh: Mesh):
    """One fence per death; its worker, should it still live, finds a higher epoch than its own."""
    dead = await mesh.instance("dead")
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await mesh.pass_time_until(lambda: _fences(mesh))
        await mesh.pass_time(DEAD_AFTER_S + 3)
        (fence,) = await _fences(mesh)
    assert (fence.instance_id, fence.phase, fence.epoch) == ("dead", "gone", -1)
    assert fence.spec == dead.spec
    states = await mesh.records(INSTANCE_STATES)
    offsets = [r.offset for r in states if r.key == b"dead"]
    assert offsets[-1] > dead.epoch


async def test_a_fenced_instance_gets_no_calls_though_its_old_life_still_speaks(mesh: Mesh):
    """States of a lower epoch than the fence are ignored."""
    dead = await mesh.instance("dead")
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await mesh.pass_time_until(lambda: _fences(mesh))
        await dead.say()
        await mesh.submit(make_request("r"))
        await mesh.pass_time(2, beating=[dead])
        assert await dead.received() == []
        await dead.begin()
        await dead.say()
        await mesh.until(dead.received)
        assert len(await _fences(mesh)) == 1


async def test_late_arrivals_are_forwarded_until_the_instance_begins_a_new_epoch(mesh: Mesh):
    """A dispatcher with older knowledge loses nothing; a new life keeps its own calls."""
    dead = await mesh.instance("dead")
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await mesh.submit(make_request("r0"))
        (bound,) = await mesh.until(lambda: _bound(dead, 1))
        await mesh.pass_time_until(lambda: _handed_back(mesh))
        late = make_request("late", ready_at_s=1.0, t_slo_s=2.0)
        message = type(bound)(
            **{f: getattr(bound, f) for f in bound.__struct_fields__} | {"request": late}
        )
        await mesh.publish("instance.dead", message)
        await mesh.until(lambda: _is_back(mesh, "late"))
        await dead.begin()
        await mesh.pass_time(2)
        new = type(bound)(
            **{f: getattr(bound, f) for f in bound.__struct_fields__}
            | {"request": make_request("new", ready_at_s=1.0, t_slo_s=2.0)}
        )
        await mesh.publish("instance.dead", new)
        await dead.say()
        await mesh.pass_time(3, beating=[dead])
        assert not await _is_back(mesh, "new")


async def _is_back(mesh: Mesh, request_id: str) -> bool:
    return request_id in dict(await _handed_back(mesh))


async def test_a_broker_outage_is_not_mass_death(mesh: Mesh):
    """While the owner's own probes do not come back, silence does not count."""
    fleet = [await mesh.instance(name) for name in "abc"]
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await mesh.pass_time(5, beating=fleet)
        mesh.broker.is_down = True
        await mesh.pass_time(30, beating=fleet)
        mesh.broker.is_down = False
        await mesh.pass_time(4)  # heartbeats take a while to return: timers began anew
        assert await _fences(mesh) == []
        await mesh.pass_time(10, beating=fleet)
        assert await _fences(mesh) == []


async def test_an_instance_that_died_in_an_outage_is_found_after_it(mesh: Mesh):
    """Timers that start anew do run out."""
    alive, dead = await mesh.instance("alive"), await mesh.instance("dead")
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await mesh.pass_time(3, beating=[alive, dead])
        mesh.broker.is_down = True
        await mesh.pass_time(20)
        mesh.broker.is_down = False
        (fence,) = await mesh.pass_time_until(lambda: _fences(mesh), beating=[alive])
    assert fence.instance_id == "dead"


async def test_leftovers_of_an_instance_that_left_go_back_without_a_fence(mesh: Mesh):
    """A drained worker that missed late arrivals is no crash."""
    instance = await mesh.instance("a")
    async with mesh.running(dead_after_s=DEAD_AFTER_S, max_attempts=1):
        await mesh.submit(make_request("r0", query_id="q"), make_request("r1", query_id="q"))
        await mesh.until(lambda: _bound(instance, 2))
        await _finish(mesh, instance, 0)
        await instance.say("gone")
        await mesh.pass_time_until(lambda: _handed_back(mesh))
    assert await _handed_back(mesh) == [("r1", 1)]
    assert (await mesh.requests())[-1].failures == 0
    assert await _fences(mesh) == []


async def test_a_call_under_which_too_many_instances_died_ends_failed(mesh: Mesh):
    """A call that kills its instance does not kill the fleet one by one."""
    instance = await mesh.instance("a")
    killer = make_request(
        "killer", attempt=7, failures=1, ready_at_s=1.0, t_slo_s=5.0, arrival_s=1.0
    )
    async with mesh.running(dead_after_s=DEAD_AFTER_S, max_attempts=2):
        await mesh.submit(killer)
        await mesh.until(lambda: _bound(instance, 1))
        (outcome,) = await mesh.pass_time_until(mesh.outcomes)
    assert (outcome.kind, outcome.reason, outcome.attempt) == ("failed", "instance_lost", 7)
    assert outcome.instance_id == "a"


async def test_silence_recorded_in_history_kills_nobody(mesh: Mesh):
    """A new owner reads old probes and old silences, and waits for its own probe."""
    instance = await mesh.instance("a")
    async with mesh.running(dead_after_s=DEAD_AFTER_S) as first:
        await mesh.pass_time(5)
        await first.kill()
    await mesh.pass_time(60)
    await instance.say()
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await mesh.pass_time(15, beating=[instance])
    assert await _fences(mesh) == []


async def test_a_death_in_history_is_not_repeated_when_a_partition_comes_back(mesh: Mesh):
    """An owner that reads its partition anew does not act on its own probes of earlier."""
    instance = await mesh.instance("a")
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await mesh.pass_time_until(lambda: _fences(mesh))
        await instance.begin()
        await mesh.pass_time(3, beating=[instance])
        consumer = mesh.broker.consumers["t.recovery"]
        await mesh.broker.hooks["t.recovery"](consumer.assignment())
        for tp in consumer.assignment():
            consumer.seek(tp, 0)
        await mesh.pass_time(10, beating=[instance])
        assert len(await _fences(mesh)) == 1


async def test_a_rescue_is_taken_up_by_the_next_owner_without_repeating_it(mesh: Mesh):
    """Hand-backs are committed under the worker's group as they are acknowledged."""
    dead = await mesh.instance("dead")
    async with mesh.running(dead_after_s=DEAD_AFTER_S) as first:
        await mesh.submit(*(make_request(f"r{i}", query_id="q") for i in range(4)))
        await mesh.until(lambda: _bound(dead, 4))
        await mesh.pass_time_until(lambda: _fences(mesh))
        await mesh.until(lambda: _worker_committed(mesh, dead) == Committed(offset=4))
        await first.kill()
    async with mesh.running(id="d2", dead_after_s=DEAD_AFTER_S):
        await mesh.pass_time(4)
    assert await _handed_back(mesh) == [(f"r{i}", 1) for i in range(4)]
    assert len(await _fences(mesh)) == 1


async def test_poison_on_an_instance_topic_is_buried_and_answered(mesh: Mesh):
    """An unreadable record there goes to dead-letters once and blocks no hand-back."""
    dead = await mesh.instance("dead")
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await mesh.submit(make_request("r0", query_id="q"))
        await mesh.until(lambda: _bound(dead, 1))
        nested = {"type": "bound_call", "request": msgpack.unpackb(encode(make_request("bad")))}
        await mesh.broker.inner.publish(TOPICS.instance("dead"), msgpack.packb(nested))
        (outcome,) = await mesh.pass_time_until(mesh.outcomes)
        await mesh.until(lambda: _worker_committed(mesh, dead) == Committed(offset=2))
    assert (outcome.request_id, outcome.kind) == ("bad", "rejected")
    assert len(await mesh.dead_letters()) == 1
    assert await _handed_back(mesh) == [("r0", 1)]


async def test_probes_of_owners_that_are_no_more_are_removed(mesh: Mesh):
    """A compacted topic does not collect one probe per dispatcher that ever lived."""
    await mesh.publish(INSTANCE_STATES, RecoveryProbe(owner_id="old", seq=9), key="probe/old")
    async with mesh.running(probe_interval_s=100.0, tick_s=100.0, commit_interval_s=100.0):
        await mesh.clock.advance(500)
        await asyncio.sleep(0.05)
        assert not await _has_tombstone(mesh, b"probe/old")
        await mesh.clock.advance(200)
        await mesh.until(lambda: _has_tombstone(mesh, b"probe/old"))
    kept = {r.key: r.value for r in await mesh.records(INSTANCE_STATES)}
    assert not [key for key, value in kept.items() if value is not None]  # its own, on leaving


async def _has_tombstone(mesh: Mesh, key: bytes) -> bool:
    return any(r.key == key and r.value is None for r in await mesh.records(INSTANCE_STATES))


async def test_an_instance_whose_topic_was_deleted_is_forgotten(mesh: Mesh):
    """Scale-in ends with the topic: the state gets a tombstone and nothing watches it any more."""
    instance = await mesh.instance("a")
    async with mesh.running(dead_after_s=DEAD_AFTER_S):
        await instance.say("gone")
        await mesh.broker.delete_topics([TOPICS.instance("a")])
        await mesh.pass_time_until(lambda: _has_tombstone(mesh, b"a"))


async def test_a_stop_during_a_rescue_ends_it_and_leaves_the_rest_for_the_next_owner(mesh: Mesh):
    """Stopping does not wait for a broker that takes nothing."""
    dead = await mesh.instance("dead")
    async with mesh.running(dead_after_s=DEAD_AFTER_S) as running:
        await mesh.submit(make_request("r0"))
        await mesh.until(lambda: _bound(dead, 1))
        mesh.broker.refuse_publish = lambda topic: topic == TOPICS.name(STAGE_REQUESTS)
        await mesh.pass_time_until(lambda: _fences(mesh))
        async with asyncio.timeout(30):
            await running.stop()
    assert await _handed_back(mesh) == []
    mesh.broker.refuse_publish = lambda _: False
    async with mesh.running(id="d2", dead_after_s=DEAD_AFTER_S):
        await mesh.pass_time_until(lambda: _handed_back(mesh))


async def test_who_owns_no_partition_says_that_it_is_alive(mesh: Mesh):
    """A spare dispatcher, or one that joins again after an outage, probes on one partition.

    What it wrote is withdrawn when it stops, wherever that was.
    """

    async def probed() -> Counter[int]:
        records = await mesh.records(INSTANCE_STATES)
        own = [
            r for r in records if r.value is not None and (r.key or b"").startswith(b"probe/d1.")
        ]
        return Counter(record.tp.partition for record in own)

    async with mesh.running(probe_interval_s=0.5):
        await mesh.pass_time(2)
        owned = await probed()
        assert len(owned) == TOPICS.state_partitions
        mesh.broker.consumers["t.recovery"].assignment = frozenset
        await mesh.pass_time(1)
        before = await probed()
        await mesh.pass_time(3)
        assert (await probed()) - before == {0: (await probed())[0] - before[0]}
        assert (await probed())[0] > before[0]
    withdrawn = [
        record.tp.partition
        for record in await mesh.records(INSTANCE_STATES)
        if record.value is None and (record.key or b"").startswith(b"probe/d1.")
    ]
    assert sorted(withdrawn) == sorted(owned)
