"""What every state store does about loss and sharing: repair, leases, streamed chunks.

`store`, `raw` and `line` come from the class that binds the suite (`test_urgency_set.py`): the
store, a bare client of the same server (to wipe it and to turn its time back), one empty set.
"""

import asyncio

import pytest
from redis.asyncio import Redis

from shared.errors import Fenced
from shared.ports import SharedUrgencySet, StateStore, Token
from tests.support.urgency import entry, ids, snapshot, turn_back


class RepairContract:
    """What a store that forgot, or went back in time, can and cannot do."""

    async def test_wiped_store_heals(self, line: SharedUrgencySet, raw: Redis, prefix: str) -> None:
        """After a wipe the owner goes on in its epoch: what it adds again comes back in order."""
        await line.begin(3)
        added = [entry(name, float(i), epoch=3, arrival=i) for i, name in enumerate("abcd")]
        await line.add(added)
        running = await line.claim(3, limit=1, now_s=0.0)
        await turn_back(raw, prefix, {})
        assert await line.claim(3, limit=1, now_s=0.0) == []
        assert await line.add(added[1:]) == [True, True, True]
        assert await line.claim(3, limit=9, now_s=0.0) == added[1:]
        assert await line.ack("a", running[0].token) is False
        with pytest.raises(Fenced):
            await line.claim(2, limit=1, now_s=0.0)

    async def test_old_state_of_an_old_epoch(
        self, line: SharedUrgencySet, raw: Redis, prefix: str
    ) -> None:
        """A store that falls back to an older epoch cannot bring back what was acked since."""
        await line.begin(1)
        await line.add([entry("a"), entry("b")])
        past = await snapshot(raw, prefix)
        await line.begin(2)
        await line.add([entry("a", epoch=2)])
        await line.claim(2, limit=1, now_s=0.0)
        await line.ack("a", Token(2, 0, 0))
        await turn_back(raw, prefix, past)
        assert await line.claim(2, limit=9, now_s=0.0) == []
        assert await line.members() == {}
        with pytest.raises(Fenced):
            await line.claim(1, limit=9, now_s=0.0)

    async def test_old_state_of_this_epoch(
        self, line: SharedUrgencySet, raw: Redis, prefix: str
    ) -> None:
        """What comes back within an epoch is among the members, and its owner acks it again."""
        added = [entry("a"), entry("b", arrival=1)]
        await line.add(added)
        await line.claim(1, limit=1, now_s=0.0)
        past = await snapshot(raw, prefix)
        await line.claim(1, limit=1, now_s=0.0)
        for one in added:
            await line.ack(one.request_id, one.token)
        await turn_back(raw, prefix, past)
        assert set(await line.members()) == {"a", "b"}
        for one in added:
            assert await line.ack(one.request_id, one.token) is True
        assert await line.sizes() == (0, 0, 0)

    async def test_lost_claim_is_found(self, line: SharedUrgencySet) -> None:
        """A claim whose reply was lost shows among the claimed, and can be released."""
        added = [entry("a"), entry("b", arrival=1)]
        await line.add(added)
        await line.claim(1, limit=1, now_s=0.0)
        running: set[str] = set()
        for request_id, token in (await line.claimed()).items():
            if request_id not in running:
                assert await line.release(request_id, token) is True
        assert await line.claim(1, limit=9, now_s=0.0) == added

    @pytest.mark.parametrize("part", ["entries", "waiting"])
    async def test_half_lost_set_heals(
        self, line: SharedUrgencySet, raw: Redis, prefix: str, part: str
    ) -> None:
        """A server that evicted one key of a set still heals by adding again."""
        added = [entry("a"), entry("b", arrival=1)]
        await line.add(added)
        await raw.delete(f"{prefix}{{instance-1}}:{part}")
        assert await line.add(added) == [True, True]
        assert await line.claim(1, limit=9, now_s=0.0) == added
        assert await line.sizes() == (0, 0, 2)

    async def test_unknown_script_is_taught(self, line: SharedUrgencySet, raw: Redis) -> None:
        """A server that forgot the scripts learns them again without an error."""
        await line.add([entry("a")])
        await raw.script_flush()
        assert ids(await line.claim(1, limit=1, now_s=0.0)) == ["a"]


class LeaseContract:
    """Several claimers of one set."""

    async def test_expired_lease_is_reclaimed(self, line: SharedUrgencySet) -> None:
        """A lease that ran out gives the entry back, at its old place, under the next attempt."""
        added = [entry("a", 1.0, attempt=9), entry("b", 2.0)]
        await line.add(added)
        await line.claim_leased(1, limit=1, now_s=100.0, lease_s=10.0)
        assert await line.reclaim(now_s=109.9) == []
        again = entry("a", 1.0, attempt=10)
        assert await line.reclaim(now_s=110.0) == [again]
        assert await line.reclaim(now_s=110.0) == []
        assert await line.claim_leased(1, limit=9, now_s=111.0, lease_s=10.0) == [again, added[1]]

    async def test_late_claimer_is_fenced(self, line: SharedUrgencySet) -> None:
        """Whoever let the lease run out can no longer ack, park, release or renew."""
        one = entry("a")
        await line.add([one])
        await line.claim_leased(1, limit=1, now_s=0.0, lease_s=1.0)
        await line.reclaim(now_s=2.0)
        [again] = await line.claim_leased(1, limit=1, now_s=2.0, lease_s=1.0)
        assert await line.ack("a", one.token) is False
        assert await line.park("a", one.token, due_s=0.0) is False
        assert await line.release("a", one.token) is False
        assert await line.renew([("a", one.token)], now_s=2.0, lease_s=99.0) == [False]
        assert await line.ack("a", again.token) is True

    async def test_renewed_lease_lasts(self, line: SharedUrgencySet) -> None:
        """A renewal counts from its own instant; the others are reclaimed in its stead."""
        await line.add([entry("a"), entry("b", arrival=1)])
        held = await line.claim_leased(1, limit=2, now_s=0.0, lease_s=5.0)
        pairs = [("a", held[0].token), ("gone", held[0].token)]
        assert await line.renew(pairs, now_s=4.0, lease_s=5.0) == [True, False]
        assert await line.renew([], now_s=4.0, lease_s=5.0) == []
        assert ids(await line.reclaim(now_s=8.0)) == ["b"]
        assert ids(await line.reclaim(now_s=9.0)) == ["a"]

    async def test_waiting_has_no_lease(self, line: SharedUrgencySet) -> None:
        """Only claimed entries can be renewed."""
        one = entry("a")
        await line.add([one])
        assert await line.renew([("a", one.token)], now_s=0.0, lease_s=5.0) == [False]
        assert await line.sizes() == (1, 0, 0)

    async def test_claim_without_lease_stays(self, line: SharedUrgencySet) -> None:
        """What its single owner claimed is never reclaimed."""
        await line.add([entry("a")])
        await line.claim(1, limit=1, now_s=0.0)
        assert await line.reclaim(now_s=1e15) == []
        assert await line.sizes() == (0, 0, 1)

    async def test_reclaim_in_parts(self, line: SharedUrgencySet) -> None:
        """A reclaimer takes as many as it asks for, those that ran out first."""
        await line.add([entry(name, arrival=i) for i, name in enumerate("abc")])
        for lease_s in (3.0, 1.0, 2.0):
            await line.claim_leased(1, limit=1, now_s=0.0, lease_s=lease_s)
        assert await line.reclaim(now_s=9.0, limit=0) == []
        assert ids(await line.reclaim(now_s=9.0, limit=2)) == ["b", "c"]
        assert await line.sizes() == (2, 0, 1)

    async def test_healing_leaves_reclaimed_alone(self, line: SharedUrgencySet) -> None:
        """To add the first delivery again does not undo a reclaim."""
        one = entry("a")
        await line.add([one])
        await line.claim_leased(1, limit=1, now_s=0.0, lease_s=1.0)
        await line.reclaim(now_s=2.0)
        assert await line.add([one]) == [False]
        assert await line.members() == {"a": Token(1, 0, 1)}


class ChunksContract:
    """Streamed text."""

    async def test_chunks_come_in_order(self, store: StateStore) -> None:
        """A reader gets each chunk once, numbered, whole and in order, then an end."""
        texts = ["", "héllo", "\n\x00", "x" * 10_000]
        for index, text in enumerate(texts):
            await store.append_chunk("call", 2, index, text)
        found = [chunk async for chunk in store.chunks("call", timeout_s=0.05)]
        assert [chunk[1:] for chunk in found] == [(2, i, text) for i, text in enumerate(texts)]

    async def test_reading_goes_on(self, store: StateStore) -> None:
        """A reader that stopped goes on after the last position it saw."""
        for index in range(3):
            await store.append_chunk("call", 0, index, str(index))
        seen: list[str] = []
        async for chunk in store.chunks("call", timeout_s=0.05):
            seen.append(chunk[0])
            if chunk[2] == 1:
                break
        rest = [c[3] async for c in store.chunks("call", after=seen[-1], timeout_s=0.05)]
        assert rest == ["2"]

    async def test_repeated_and_overtaken_chunks(self, store: StateStore) -> None:
        """A chunk sent twice, and one of an attempt that was overtaken, are dropped."""
        for attempt, index in ((0, 0), (0, 1), (0, 1), (1, 0), (0, 2), (1, 1)):
            await store.append_chunk("call", attempt, index, "x")
        found = [chunk[1:3] async for chunk in store.chunks("call", timeout_s=0.05)]
        assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]

    async def test_waiting_reader(self, store: StateStore) -> None:
        """A reader that is there first is woken by the chunk."""

        async def first() -> str:
            async for chunk in store.chunks("call", timeout_s=30.0):
                return chunk[3]
            return ""

        async with asyncio.TaskGroup() as group:
            reader = group.create_task(first(), name="reader")
            await asyncio.sleep(0.05)
            await store.append_chunk("call", 0, 0, "now")
        assert reader.result() == "now"

    async def test_many_calls_are_read_at_once(self, store: StateStore) -> None:
        """One reader gets what is new of each call, waits for the first, and ends when quiet."""
        await store.append_chunk("a", 0, 0, "a0")
        await store.append_chunk("b", 1, 0, "b0")
        await store.append_chunk("b", 1, 1, "b1")
        after = {"a": "0-0", "b": "0-0", "c": "0-0"}
        found = await store.read_chunks(after, wait_s=5.0)
        assert {name: [chunk[3] for chunk in chunks] for name, chunks in found.items()} == {
            "a": ["a0"],
            "b": ["b0", "b1"],
        }
        after |= {name: chunks[-1][0] for name, chunks in found.items()}
        assert await store.read_chunks(after, wait_s=0.01) == {}
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(store.read_chunks(after, wait_s=30.0), name="reader")
            await asyncio.sleep(0.05)
            await store.append_chunk("c", 0, 0, "now")
        assert waiting.result() == {"c": [("1-1", 0, 0, "now")]}

    async def test_stream_is_capped_and_expires(
        self, store: StateStore, raw: Redis, prefix: str
    ) -> None:
        """A stream keeps about as many chunks as set and vanishes by itself."""
        for index in range(600):
            await store.append_chunk("call", 0, index, "x")
        key = f"{prefix}chunks:call"
        assert 200 <= await raw.xlen(key) < 600
        assert 0 < await raw.ttl(key) <= 600

    async def test_no_chunks(self, store: StateStore) -> None:
        """A call that streamed nothing has no chunks, and its reader ends."""
        assert [chunk async for chunk in store.chunks("none", timeout_s=0.01)] == []

    async def test_ping(self, store: StateStore) -> None:
        """A ping takes time."""
        assert await store.ping() > 0
