"""What every group of consumers does. Subclasses bind the fixture `broker`."""

import asyncio
from collections.abc import Collection

import pytest

from shared.errors import StaleAssignment, UnknownTopic
from shared.ports import Broker, Committed, Record, TopicPartition
from tests.support.broker import make_topic, numbers, publish_all, take, tps, until


class HookFailedError(Exception):
    """What a hook raises in these tests."""


class GroupContract:
    """Members of groups; `broker` is the fixture that subclasses bind."""

    async def test_single_member_reads_every_partition_from_the_beginning(
        self, broker: Broker, prefix: str
    ) -> None:
        """The only member owns all partitions of all its topics and starts at the beginning."""
        one = await make_topic(broker, prefix + "one", 3)
        two = await make_topic(broker, prefix + "two", 1)
        for partition in range(3):
            await publish_all(broker, one, range(partition, partition + 1), partition)
        await publish_all(broker, two, range(3, 4))
        async with broker.group_consumer([one, two], prefix + "g") as member:
            assert member.assignment() == {*tps(one, 3), *tps(two)}
            assert sorted(numbers(await take(member, 4))) == [0, 1, 2, 3]

    async def test_groups_read_independently(self, broker: Broker, prefix: str) -> None:
        """Every group gets every record."""
        topic = await make_topic(broker, prefix + "both")
        await publish_all(broker, topic, range(3))
        async with (
            broker.group_consumer([topic], prefix + "a") as first,
            broker.group_consumer([topic], prefix + "b") as second,
        ):
            assert numbers(await take(first, 3)) == [0, 1, 2]
            assert numbers(await take(second, 3)) == [0, 1, 2]

    async def test_unknown_topic_cannot_be_joined(self, broker: Broker, prefix: str) -> None:
        """Joining with a topic that does not exist raises UnknownTopic and creates nothing."""
        with pytest.raises(UnknownTopic):
            async with broker.group_consumer([prefix + "nowhere"], prefix + "g"):
                pass
        assert prefix + "nowhere" not in await broker.describe_topics()

    async def test_assigned_hook_comes_before_the_records(
        self, broker: Broker, prefix: str
    ) -> None:
        """No record of a partition is returned before `on_assigned` is done."""
        topic = await make_topic(broker, prefix + "hook", 2)
        await publish_all(broker, topic, range(5), partition=0)
        await publish_all(broker, topic, range(5), partition=1)
        events: list[str] = []

        async def on_assigned(arrived: Collection[TopicPartition]) -> None:
            events.append(f"assigned {sorted(tp.partition for tp in arrived)}")
            await asyncio.sleep(0.05)
            events.append("ready")

        async with broker.group_consumer([topic], prefix + "g", on_assigned=on_assigned) as member:
            await take(member, 10)
            events.append("records")
        assert events == ["assigned [0, 1]", "ready", "records"]

    async def test_failing_hook_is_raised(self, broker: Broker, prefix: str) -> None:
        """What `on_assigned` raises reaches whoever opens or fetches; nothing is left behind."""
        topic = await make_topic(broker, prefix + "fails")

        async def on_assigned(_arrived: Collection[TopicPartition]) -> None:
            raise HookFailedError

        with pytest.raises(HookFailedError):
            async with broker.group_consumer(
                [topic], prefix + "g", on_assigned=on_assigned
            ) as member:
                await take(member, 1)
        async with broker.group_consumer([topic], prefix + "g") as member:
            await until(lambda: member.assignment() == set(tps(topic)), member.fetch)

    async def test_leaving_calls_no_hook(self, broker: Broker, prefix: str) -> None:
        """A member that leaves by itself knows it: its `on_revoked` is not called."""
        topic = await make_topic(broker, prefix + "leave")
        revoked: list[TopicPartition] = []

        async def on_revoked(gone: Collection[TopicPartition]) -> None:
            revoked.extend(gone)

        async with broker.group_consumer([topic], prefix + "g", on_revoked=on_revoked) as member:
            assert member.assignment() == set(tps(topic))
        assert revoked == []
        assert member.assignment() == frozenset()

    async def test_members_never_share_a_partition(self, broker: Broker, prefix: str) -> None:
        """With several members, together they own every partition, and no two own the same."""
        topic = await make_topic(broker, prefix + "split", 4)
        group = prefix + "g"
        async with (
            broker.group_consumer([topic], group) as first,
            broker.group_consumer([topic], group) as second,
        ):

            async def both() -> None:
                await asyncio.gather(first.fetch(timeout_s=0.1), second.fetch(timeout_s=0.1))

            await until(
                lambda: first.assignment() | second.assignment() == set(tps(topic, 4)), both
            )
            assert not first.assignment() & second.assignment()

    async def test_only_the_owner_commits(self, broker: Broker, prefix: str) -> None:
        """Of two members, the one that does not own the partition gets StaleAssignment."""
        topic = await make_topic(broker, prefix + "owner")
        (tp,) = tps(topic)
        group = prefix + "g"
        async with (
            broker.group_consumer([topic], group) as first,
            broker.group_consumer([topic], group) as second,
        ):

            async def both() -> None:
                await asyncio.gather(first.fetch(timeout_s=0.1), second.fetch(timeout_s=0.1))

            await until(lambda: tp in first.assignment() | second.assignment(), both)
            owner, other = (first, second) if tp in first.assignment() else (second, first)
            with pytest.raises(StaleAssignment):
                await other.commit({tp: Committed(offset=9)})
            await owner.commit({tp: Committed(offset=1)})
            assert await other.committed(tp) == Committed(offset=1)

    async def test_next_member_takes_over(self, broker: Broker, prefix: str) -> None:
        """When a member leaves, another gets its partitions, with the hook, where it committed."""
        topic = await make_topic(broker, prefix + "heir", 2)
        await publish_all(broker, topic, range(4), partition=0)
        await publish_all(broker, topic, range(10, 14), partition=1)
        group = prefix + "g"
        arrived: list[TopicPartition] = []

        async def on_assigned(came: Collection[TopicPartition]) -> None:
            arrived[:] = came

        async with broker.group_consumer([topic], group) as first:
            await take(first, 8)
            await first.commit({tp: Committed(offset=3) for tp in tps(topic, 2)})
            heir_context = broker.group_consumer([topic], group, on_assigned=on_assigned)
            heir_opening = asyncio.ensure_future(heir_context.__aenter__())
            await until(heir_opening.done, lambda: first.fetch(timeout_s=0.05))
            heir = heir_opening.result()
        found: list[Record] = []

        async def step() -> None:
            found.extend(await heir.fetch(timeout_s=0.1))

        await until(lambda: heir.assignment() == set(tps(topic, 2)) and len(found) >= 2, step)
        assert sorted(arrived) == tps(topic, 2)
        assert {3, 13} <= set(numbers(found)) <= {3, 13}
        await heir_context.__aexit__(None, None, None)

    async def test_member_can_pause_and_seek(self, broker: Broker, prefix: str) -> None:
        """Pausing and seeking work in a group as on fixed partitions; membership stays."""
        topic = await make_topic(broker, prefix + "control", 2)
        first, second = tps(topic, 2)
        await publish_all(broker, topic, range(3), partition=0)
        await publish_all(broker, topic, range(10, 13), partition=1)
        async with broker.group_consumer([topic], prefix + "g") as member:
            member.pause(first)
            assert numbers(await take(member, 3)) == [10, 11, 12]
            assert member.assignment() == {first, second}
            member.seek(second, 2)
            member.seek(first, 1)
            member.resume(first)
            assert sorted(numbers(await take(member, 3))) == [1, 2, 12]
            assert await member.position(first) == 3
