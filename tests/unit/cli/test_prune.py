"""`hexflow topics --prune`: an instance's topic goes only when nothing on it is open."""

from services.cli.prune import GONE_FOR_S, prune
from shared.contracts.topics import INSTANCE_STATES
from shared.ports import Committed, TopicPartition
from tests.support.dispatching import TOPICS, Instance, Mesh

LATER_S = 2 * GONE_FOR_S


async def look(mesh: Mesh, after_s: float = LATER_S) -> dict[str, str]:
    """Prune after a while; return what is gone and why it was kept."""
    now_s = mesh.clock.wall_unix_s() + after_s
    found = await prune(mesh.broker.inner, TOPICS, now_s)
    return {one.instance_id: one.reason for one in found}


async def has_topic(mesh: Mesh, instance: Instance) -> bool:
    """Return whether an instance's topic exists."""
    return TOPICS.instance(instance.instance_id) in await mesh.broker.describe_topics()


async def commit(mesh: Mesh, instance: Instance, offset: int) -> None:
    """Commit a position of the instance's worker."""
    tp = TopicPartition(TOPICS.instance(instance.instance_id), 0)
    group = TOPICS.worker_group(instance.instance_id)
    async with mesh.broker.inner.partition_consumer([tp], start="end", group=group) as consumer:
        await consumer.commit({tp: Committed(offset=offset)})


async def test_an_instance_that_left_with_nothing_open_is_removed():
    """Its topic is deleted and its state gets a tombstone; others stay."""
    mesh = await Mesh().open()
    left, stays = await mesh.instance("left"), await mesh.instance("stays")
    await left.say("gone")
    assert await look(mesh) == {"left": ""}
    assert not await has_topic(mesh, left)
    assert await has_topic(mesh, stays)
    records = await mesh.records(INSTANCE_STATES)
    assert [r.key for r in records if r.value is None] == [b"left"]
    assert await look(mesh) == {}


async def test_open_calls_keep_a_topic():
    """What is not handed on would be lost: the topic stays until a dispatcher has done that."""
    mesh = await Mesh().open()
    left = await mesh.instance("left")
    for _ in range(3):
        await mesh.broker.inner.publish(TOPICS.instance("left"), b"a call")
    await commit(mesh, left, 1)
    await left.say("gone")
    assert "2 of its calls" in (await look(mesh))["left"]
    assert await has_topic(mesh, left)
    await commit(mesh, left, 3)
    assert await look(mesh) == {"left": ""}


async def test_an_instance_that_has_just_left_is_kept():
    """Dispatchers that have not heard of it may still send it calls."""
    mesh = await Mesh().open()
    left = await mesh.instance("left")
    await left.say("gone")
    assert "only" in (await look(mesh, after_s=1.0))["left"]
    assert await has_topic(mesh, left)


async def test_a_silent_instance_is_not_gone():
    """Only a goodbye or a fence counts, and a new life undoes it."""
    mesh = await Mesh().open()
    silent, reborn = await mesh.instance("silent"), await mesh.instance("reborn")
    await reborn.say("gone")
    await reborn.begin()
    assert await look(mesh, after_s=1e6) == {}
    assert await has_topic(mesh, silent)
    assert await has_topic(mesh, reborn)


async def test_a_topic_nobody_knows_is_kept():
    """Where no state tells whose it is, people decide."""
    mesh = await Mesh().open()
    await mesh.broker.create_topics([TOPICS.instance_spec("stranger")])
    assert await look(mesh) == {"stranger": "nothing is known of it"}
