"""What every urgency set does, whatever server holds it: order, states, fencing.

`line` is one empty set and `store` the store it is in; both come from the class that binds the
suite (`test_urgency_set.py`).
"""

import asyncio
import math

import pytest

from shared.errors import Fenced
from shared.ports import QueueEntry, SharedUrgencySet, StateStore, Token
from tests.support.urgency import entry, ids


class OrderContract:
    """Which entry comes next."""

    async def test_smallest_score_first(self, line: SharedUrgencySet) -> None:
        """Entries are claimed by score, smallest first, whatever the order of adding."""
        await line.add([entry("b", 2.0), entry("d", 1e12), entry("a", -3.5), entry("c", 2.5)])
        assert ids(await line.claim(1, limit=10, now_s=0.0)) == ["a", "b", "c", "d"]

    async def test_ties_by_arrival_then_id(self, line: SharedUrgencySet) -> None:
        """Equal scores come by arrival as a number, then by id."""
        await line.add(
            [
                entry("a", 5.0, arrival=10),
                entry("z", 5.0, arrival=9),
                entry("y", 5.0, arrival=9, offset=8),
                entry("c", 5.0, arrival=2**62),
                entry("b", 5.0, arrival=100),
            ]
        )
        claimed = [ids(await line.claim(1, limit=1, now_s=0.0)) for _ in range(5)]
        assert claimed == [["y"], ["z"], ["a"], ["b"], ["c"]]

    async def test_fields_come_back_exactly(self, line: SharedUrgencySet) -> None:
        """Scores, arrivals and tokens lose nothing, although Redis counts in doubles."""
        instant_s = 1.79e9 * 20 + 0.123456
        added = [
            entry("next", math.nextafter(instant_s, math.inf), arrival=2**53),
            entry("instant", instant_s, arrival=2**53 + 1, attempt=10**9),
            entry("third", 1 / 3, arrival=2**63 - 1),
            entry("tiny", 5e-324),
            entry("minus", -1.5e300),
            entry("never", float("inf")),
        ]
        await line.add(added)
        waiting = await line.waiting(limit=10)
        assert waiting == sorted(added, key=lambda one: one.score)
        assert await line.claim(1, limit=10, now_s=0.0) == waiting

    async def test_limit_bounds_a_claim(self, line: SharedUrgencySet) -> None:
        """A claim takes at most its limit, and nothing when that is zero or less."""
        await line.add([entry(name, arrival=i) for i, name in enumerate("abc")])
        assert await line.claim(1, limit=0, now_s=0.0) == []
        assert await line.claim(1, limit=-1, now_s=0.0) == []
        assert ids(await line.claim(1, limit=2, now_s=0.0)) == ["a", "b"]
        assert ids(await line.claim(1, limit=2, now_s=0.0)) == ["c"]
        assert await line.claim(1, limit=2, now_s=0.0) == []

    async def test_concurrent_claims_share_out(self, line: SharedUrgencySet) -> None:
        """Claims that run at the same time never return the same entry."""
        await line.add([entry(f"r{i}", float(i % 7), arrival=i) for i in range(100)])
        claims = await asyncio.gather(*(line.claim(1, limit=3, now_s=0.0) for _ in range(40)))
        taken = [name for claim in claims for name in ids(claim)]
        assert sorted(taken) == sorted(f"r{i}" for i in range(100))

    async def test_thousands_in_one_addition(self, line: SharedUrgencySet) -> None:
        """An addition may hold thousands of entries, and keeps their order."""
        many = [entry(f"r{i}", float(-i), arrival=i) for i in range(2_345)]
        assert await line.add(many) == [True] * len(many)
        assert await line.add(many) == [False] * len(many)
        assert await line.waiting(limit=5_000) == many[::-1]

    async def test_waiting_claims_nothing(self, line: SharedUrgencySet) -> None:
        """To look at the line leaves it as it is."""
        await line.add([entry(name, arrival=i) for i, name in enumerate("abc")])
        assert ids(await line.waiting(limit=2)) == ["a", "b"]
        assert await line.waiting(limit=0) == []
        assert await line.sizes() == (3, 0, 0)

    async def test_sets_are_apart(self, store: StateStore, line: SharedUrgencySet) -> None:
        """Sets of different names know nothing of each other."""
        other = store.urgency_set("instance-2")
        await other.begin(7)
        await other.add([entry("a", epoch=7)])
        await line.add([entry("b")])
        assert ids(await line.claim(1, limit=9, now_s=0.0)) == ["b"]
        assert await other.sizes() == (1, 0, 0)


class StatesContract:
    """What becomes of an entry."""

    async def test_views_agree(self, line: SharedUrgencySet) -> None:
        """Each entry is in one state, and every view says the same of it."""
        added = [entry(name, arrival=i) for i, name in enumerate("abcd")]
        await line.add(added)
        await line.claim(1, limit=2, now_s=0.0)
        await line.park("a", added[0].token, due_s=9.0)
        assert await line.sizes() == (2, 1, 1)
        assert await line.members() == {one.request_id: one.token for one in added}
        assert await line.claimed() == {"b": added[1].token}
        assert ids(await line.waiting(limit=9)) == ["c", "d"]

    async def test_empty_set(self, line: SharedUrgencySet) -> None:
        """A set that never was is an empty one."""
        assert await line.sizes() == (0, 0, 0)
        assert await line.members() == {}
        assert await line.claimed() == {}
        assert await line.waiting(limit=5) == []
        assert await line.claim(1, limit=5, now_s=0.0) == []
        assert await line.remove(["a"]) == []
        assert await line.remove([]) == []
        assert await line.add([]) == []

    async def test_add_is_idempotent(self, line: SharedUrgencySet) -> None:
        """To add again what is there, in whatever state, changes nothing."""
        added = [entry(name, arrival=i) for i, name in enumerate("abc")]
        assert await line.add(added) == [True, True, True]
        await line.claim(1, limit=2, now_s=0.0)
        await line.park("a", added[0].token, due_s=9.0)
        assert await line.add(added) == [False, False, False]
        assert await line.sizes() == (1, 1, 1)

    @pytest.mark.parametrize("state", ["waiting", "parked", "claimed"])
    async def test_higher_token_replaces(self, line: SharedUrgencySet, state: str) -> None:
        """A newer delivery takes an older one's place, in whatever state that is."""
        old = entry("a", 5.0, arrival=1)
        new = entry("a", 3.0, arrival=2)
        await line.add([old])
        if state != "waiting":
            await line.claim(1, limit=1, now_s=0.0)
        if state == "parked":
            await line.park("a", old.token, due_s=9.0)
        assert await line.add([new]) == [True]
        assert await line.sizes() == (1, 0, 0)
        assert await line.add([old]) == [False]
        assert await line.waiting(limit=5) == [new]

    @pytest.mark.parametrize(
        ("low", "high"),
        [
            (Token(1, 9, 9), Token(1, 10, 0)),
            (Token(1, 5, 9), Token(1, 5, 10)),
            (Token(1, 2**53, 0), Token(1, 2**53 + 1, 0)),
        ],
    )
    async def test_tokens_compare_as_numbers(
        self, line: SharedUrgencySet, low: Token, high: Token
    ) -> None:
        """Of two tokens of an epoch the higher offset wins, then the higher attempt."""
        at_low = QueueEntry(request_id="a", score=0.0, arrival=0, token=low)
        at_high = QueueEntry(request_id="a", score=0.0, arrival=0, token=high)
        assert await line.add([at_low]) == [True]
        assert await line.add([at_high]) == [True]
        assert await line.add([at_low]) == [False]
        assert await line.members() == {"a": high}

    async def test_ack_forgets(self, line: SharedUrgencySet) -> None:
        """An acked entry is gone, and cannot be acked again."""
        one = entry("a")
        await line.add([one])
        await line.claim(1, limit=1, now_s=0.0)
        assert await line.ack("a", one.token) is True
        assert await line.ack("a", one.token) is False
        assert await line.members() == {}
        assert await line.sizes() == (0, 0, 0)

    async def test_stale_token_does_nothing(self, line: SharedUrgencySet) -> None:
        """Whoever holds a lower token can neither ack, park nor release the newer delivery."""
        old, new = entry("a", attempt=0), entry("a", attempt=1)
        await line.add([old])
        await line.claim(1, limit=1, now_s=0.0)
        await line.add([new])
        await line.claim(1, limit=1, now_s=0.0)
        assert await line.ack("a", old.token) is False
        assert await line.park("a", old.token, due_s=1.0) is False
        assert await line.release("a", old.token) is False
        assert await line.claimed() == {"a": new.token}

    @pytest.mark.parametrize("state", ["waiting", "parked"])
    async def test_ack_forgets_in_any_state(self, line: SharedUrgencySet, state: str) -> None:
        """A published outcome ends the entry and its lower tokens, whatever state it is in."""
        one = entry("a")
        await line.add([one])
        if state == "parked":
            await line.claim(1, limit=1, now_s=0.0)
            await line.park("a", one.token, due_s=9.0)
        assert await line.ack("a", Token(1, 0, 3)) is True
        assert await line.sizes() == (0, 0, 0)

    async def test_park_waits_for_its_time(self, line: SharedUrgencySet) -> None:
        """A parked entry is claimable from its due time on, not before."""
        one = entry("a")
        await line.add([one])
        await line.claim(1, limit=1, now_s=0.0)
        assert await line.park("a", one.token, due_s=35_800_000_000.000008) is True
        assert await line.claim(1, limit=1, now_s=35_800_000_000.0) == []
        assert await line.claim(1, limit=1, now_s=35_800_000_000.000008) == [one]

    async def test_park_keeps_score(self, line: SharedUrgencySet) -> None:
        """A retry stands where its urgency puts it, not where its due time would."""
        added = [entry("a", 3.0), entry("b", 1.0), entry("c", 2.0)]
        await line.add(added)
        await line.claim(1, limit=2, now_s=0.0)
        await line.park("b", added[1].token, due_s=50.0)
        await line.park("c", added[2].token, due_s=40.0)
        assert ids(await line.claim(1, limit=9, now_s=50.0)) == ["b", "c", "a"]

    async def test_hundreds_fall_due_at_once(self, line: SharedUrgencySet) -> None:
        """However many retries fall due, the most urgent of all is claimed first."""
        many = [entry(f"r{i}", float(-i), arrival=i) for i in range(1_201)]
        await line.add(many)
        await line.claim(1, limit=2_000, now_s=0.0)
        for one in many:
            await line.park(one.request_id, one.token, due_s=float(one.arrival))
        assert ids(await line.claim(1, limit=1, now_s=1_199.0)) == ["r1199"]
        assert await line.sizes() == (1_199, 1, 1)

    async def test_park_needs_a_claim(self, line: SharedUrgencySet) -> None:
        """Only a claimed entry can be parked; a parked one may be parked anew."""
        one = entry("a")
        await line.add([one])
        assert await line.park("a", one.token, due_s=1.0) is False
        await line.claim(1, limit=1, now_s=0.0)
        assert await line.park("a", Token(1, 0, 1), due_s=1.0) is False
        assert await line.park("a", one.token, due_s=1.0) is True
        assert await line.park("a", one.token, due_s=7.0) is True
        assert await line.park("b", one.token, due_s=1.0) is False
        assert await line.claim(1, limit=1, now_s=6.0) == []
        assert await line.sizes() == (0, 1, 0)

    async def test_release_goes_to_the_old_place(self, line: SharedUrgencySet) -> None:
        """A released entry stands where it stood, before those that came after it."""
        added = [entry(name, 4.0, arrival=i) for i, name in enumerate("abc")]
        await line.add(added)
        await line.claim(1, limit=2, now_s=0.0)
        assert await line.release("a", added[0].token) is True
        assert await line.release("b", added[1].token) is True
        assert await line.waiting(limit=9) == added

    async def test_release_may_be_repeated(self, line: SharedUrgencySet) -> None:
        """To release again, after a lost reply, succeeds; to release a parked entry does not."""
        one = entry("a")
        await line.add([one])
        await line.claim(1, limit=1, now_s=0.0)
        assert await line.release("a", Token(1, 0, 9)) is False
        assert await line.release("a", one.token) is True
        assert await line.release("a", one.token) is True
        await line.claim(1, limit=1, now_s=0.0)
        await line.park("a", one.token, due_s=5.0)
        assert await line.release("a", one.token) is False
        assert await line.release("b", one.token) is False
        assert await line.sizes() == (0, 1, 0)

    async def test_remove_spares_the_claimed(self, line: SharedUrgencySet) -> None:
        """Waiting and parked entries can be removed, claimed ones cannot."""
        added = [entry(name, arrival=i) for i, name in enumerate("abc")]
        await line.add(added)
        await line.claim(1, limit=2, now_s=0.0)
        await line.park("a", added[0].token, due_s=9.0)
        assert sorted(await line.remove(["a", "b", "c", "unknown"])) == ["a", "c"]
        assert await line.members() == {"b": added[1].token}
        assert await line.sizes() == (0, 0, 1)

    async def test_ids_of_any_text(self, line: SharedUrgencySet) -> None:
        """An id may hold any text, colons, braces and other alphabets included."""
        names = ["a:b", "{x}", "日本", " ", "0" * 128]
        await line.add([entry(name, arrival=i) for i, name in enumerate(names)])
        assert ids(await line.claim(1, limit=9, now_s=0.0)) == names
        assert set(await line.claimed()) == set(names)

    @pytest.mark.parametrize(
        "bad",
        [
            entry("a", float("nan")),
            entry("a", arrival=-1, offset=0),
            entry("a", offset=-1),
            entry("a", offset=2**63),
            entry("a", epoch=-1),
            entry("a", attempt=10**10),
        ],
        ids=["nan", "arrival", "offset", "large", "epoch", "attempt"],
    )
    async def test_impossible_entries(self, line: SharedUrgencySet, bad: QueueEntry) -> None:
        """What cannot be kept exactly is refused before anything is stored."""
        with pytest.raises(ValueError, match="is not"):
            await line.add([entry("good"), bad] if bad.token.epoch == 1 else [bad])
        assert await line.members() == {}


class FencingContract:
    """Which life of the owner rules."""

    async def test_new_epoch_drops_the_old(self, line: SharedUrgencySet) -> None:
        """A new life begins empty, whatever states the old entries were in."""
        added = [entry(name, arrival=i) for i, name in enumerate("abc")]
        await line.add(added)
        await line.claim(1, limit=2, now_s=0.0)
        await line.park("a", added[0].token, due_s=0.0)
        await line.begin(2)
        assert await line.members() == {}
        assert await line.sizes() == (0, 0, 0)
        assert await line.claim(2, limit=9, now_s=99.0) == []

    async def test_same_epoch_may_begin_again(self, line: SharedUrgencySet) -> None:
        """To begin the current epoch again, after a lost reply, keeps its entries."""
        await line.begin(4)
        await line.add([entry("a", epoch=4)])
        await line.begin(4)
        assert await line.sizes() == (1, 0, 0)

    async def test_lower_epoch_is_fenced(self, line: SharedUrgencySet) -> None:
        """A life that is over can neither begin, add nor claim."""
        await line.begin(10)
        await line.add([entry("new", epoch=10)])
        for attempt in (
            line.begin(9),
            line.add([entry("old", epoch=9)]),
            line.claim(9, limit=1, now_s=0.0),
            line.claim_leased(9, limit=1, now_s=0.0, lease_s=1.0),
        ):
            with pytest.raises(Fenced, match="epoch 10 has begun"):
                await attempt
        assert await line.members() == {"new": Token(10, 0, 0)}
        assert await line.sizes() == (1, 0, 0)

    async def test_paused_owner_changes_nothing(self, line: SharedUrgencySet) -> None:
        """What an old life still holds is stale: the new one's entries stay as they are."""
        old, new = entry("a", epoch=1, offset=900), entry("a", epoch=2, offset=3)
        await line.add([old])
        await line.claim(1, limit=1, now_s=0.0)
        await line.begin(2)
        await line.add([new])
        await line.claim(2, limit=1, now_s=0.0)
        assert await line.ack("a", old.token) is False
        assert await line.park("a", old.token, due_s=0.0) is False
        assert await line.release("a", old.token) is False
        assert await line.claimed() == {"a": new.token}

    async def test_one_addition_has_one_epoch(self, line: SharedUrgencySet) -> None:
        """Entries of two lives in one addition are a mistake of the caller."""
        with pytest.raises(ValueError, match="one epoch"):
            await line.add([entry("a", epoch=1), entry("b", epoch=2)])
