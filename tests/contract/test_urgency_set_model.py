"""Random histories of an urgency set: the server and a plain Python model agree at every step.

Wipes and returns to an earlier state (a lost end of the append-only file) are steps like others.
"""

import asyncio
import contextlib
import math
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace
from redis.asyncio import Redis

from shared.adapters.embedded_redis import EmbeddedRedis
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.errors import Fenced
from shared.ports import QueueEntry, Token
from tests.support.servers import RedisServer
from tests.support.urgency import Snapshot, snapshot, turn_back
from tests.support.urgency_model import CLAIMED, PARKED, WAITING, UrgencyModel

Held = tuple[str, Token]
Draw = Callable[[st.SearchStrategy[Any]], Any]

IDS = st.sampled_from(["a", "b", "c", "d:1", "é"])
INSTANTS = st.sampled_from([0.0, 1.5, 3.0, 35_800_000_000.123456])
# Few distinct scores and arrivals, so that ties are common.
SCORES = st.sampled_from([-1.0, 0.0, 2.5, 35_800_000_000.123456])
OFFSETS = st.sampled_from([0, 9, 10, 2**53 + 1])
# Most steps are the current life's; one of the life before or after is rare.
LIVES = st.sampled_from([0] * 18 + [-1, 1])
LIMITS = st.sampled_from([1, 2, 9, 0])
LEASES = st.sampled_from([1.0, math.inf])
STATES = st.sampled_from([(CLAIMED,), (CLAIMED,), (CLAIMED,), (WAITING, PARKED)])
TOKENS = st.builds(Token, st.integers(1, 3), OFFSETS, st.sampled_from([0, 1, 10]))
ENTRIES = st.builds(QueueEntry, request_id=IDS, score=SCORES, arrival=OFFSETS, token=TOKENS)
# One rule with weights: as rules of their own, most histories would lack the one or the other.
STEPS = st.sampled_from(
    ["add"] * 4
    + ["claim"] * 4
    + ["park"] * 2
    + ["ack", "release", "stale", "remove", "renew", "reclaim", "reclaim", "save", "disturb"]
)


class UrgencyMachine(RuleBasedStateMachine):
    """Does the same to the server and to the model, and compares."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = f"model-{uuid.uuid4().hex}:"
        self.model = UrgencyModel()
        self.past: tuple[Snapshot, UrgencyModel] = ({}, UrgencyModel())
        self.runner = asyncio.Runner()
        self.stack = contextlib.AsyncExitStack()
        self.do(self._connect())

    async def _connect(self) -> None:
        params = RedisParams(url=self.url, prefix=self.prefix, timeout_s=60.0)
        store = await self.stack.enter_async_context(RedisStore.open(params))
        self.raw = await self.stack.enter_async_context(Redis.from_url(self.url, protocol=2))
        self.line = store.urgency_set("line")

    def do(self, step: Any) -> Any:
        """Run a coroutine to its end."""
        return self.runner.run(step)

    def epoch_of(self, life: int) -> int:
        """Return the epoch that many lives after the current one."""
        return max(self.model.epoch + life, 0)

    def pick(self, draw: Draw) -> Held | None:
        """Choose an entry that is there, mostly a claimed one."""
        there = sorted(self.model.tokens(*draw(STATES)).items())
        return draw(st.sampled_from(there)) if there else None

    def same(self, step: Awaitable[object], expect: Callable[[], object]) -> None:
        """Run a step on both, and expect one result or one refusal."""
        try:
            expected = expect()
        except Fenced:
            with pytest.raises(Fenced):
                self.do(step)
        else:
            assert self.do(step) == expected

    def teardown(self) -> None:
        """Leave nothing behind."""
        self.do(self._leave())
        self.runner.close()

    async def _leave(self) -> None:
        await turn_back(self.raw, self.prefix, {})
        await self.stack.aclose()

    @rule(name=STEPS, data=st.data())
    def step(self, name: str, data: st.DataObject) -> None:
        """One of the steps below."""
        getattr(self, name)(data.draw)

    def add(self, draw: Draw) -> None:
        """Calls arrive, or are healed."""
        epoch = self.epoch_of(draw(LIVES))
        drawn = draw(st.lists(ENTRIES, max_size=4))
        entries = [replace(one, token=replace(one.token, epoch=epoch)) for one in drawn]
        self.same(self.line.add(entries), lambda: self.model.add(entries))

    def claim(self, draw: Draw) -> None:
        """The owner takes what is next, or a claimer does for a while."""
        epoch, limit, now_s = self.epoch_of(draw(LIVES)), draw(LIMITS), draw(INSTANTS)
        lease_s = draw(LEASES)
        if lease_s < math.inf:
            step = self.line.claim_leased(epoch, limit=limit, now_s=now_s, lease_s=lease_s)
        else:
            step = self.line.claim(epoch, limit=limit, now_s=now_s)
        self.same(step, lambda: self.model.claim(epoch, limit, now_s, now_s + lease_s))

    def ack(self, draw: Draw, at: Held | None = None) -> None:
        """The outcome of a call is published."""
        if at := at or self.pick(draw):
            self.same(self.line.ack(*at), lambda: self.model.ack(*at))

    def park(self, draw: Draw, at: Held | None = None) -> None:
        """A call is to be retried later."""
        due_s = draw(INSTANTS)
        if at := at or self.pick(draw):
            self.same(
                self.line.park(*at, due_s=due_s),
                lambda: self.model.park(*at, due_s),
            )

    def release(self, draw: Draw, at: Held | None = None) -> None:
        """A call is handed back."""
        if at := at or self.pick(draw):
            self.same(self.line.release(*at), lambda: self.model.release(*at))

    def stale(self, draw: Draw) -> None:
        """Somebody acks, parks or releases with a token of some other delivery."""
        settle = draw(st.sampled_from([self.ack, self.park, self.release]))
        request_id, token = draw(IDS), draw(TOKENS)
        settle(draw, (request_id, replace(token, epoch=self.epoch_of(draw(LIVES)))))

    def remove(self, draw: Draw) -> None:
        """Queries are cancelled."""
        request_ids = draw(st.lists(IDS, max_size=3))
        self.same(self.line.remove(request_ids), lambda: self.model.remove(request_ids))

    def renew(self, draw: Draw) -> None:
        """A claimer renews all it could hold."""
        now_s = draw(INSTANTS)
        held = sorted(self.model.tokens(CLAIMED, WAITING).items())
        self.same(
            self.line.renew(held, now_s=now_s, lease_s=1.0),
            lambda: self.model.renew(held, now_s + 1.0),
        )

    def reclaim(self, draw: Draw) -> None:
        """A reclaimer gives back what ran out."""
        now_s = draw(INSTANTS)
        found = self.do(self.line.reclaim(now_s=now_s))
        expected = self.model.reclaim(now_s)
        assert sorted(found, key=repr) == sorted(expected, key=repr)

    def save(self, _: Draw) -> None:
        """The server's state reaches the disk."""
        self.past = (self.do(snapshot(self.raw, self.prefix)), self.model.snapshot())

    def disturb(self, draw: Draw) -> None:
        """A life begins; or the server crashes back to what was saved, is emptied, or forgets."""
        kind = draw(st.sampled_from(["begin", "crash", "crash", "wipe", "forget scripts"]))
        if kind == "begin":
            epoch = self.epoch_of(draw(st.sampled_from([-1, 0, 1])))
            self.same(self.line.begin(epoch), lambda: self.model.begin(epoch))
        elif kind == "crash":
            stored, model = self.past
            self.do(turn_back(self.raw, self.prefix, stored))
            self.model = model.snapshot()
        elif kind == "wipe":
            self.do(turn_back(self.raw, self.prefix, {}))
            self.model = UrgencyModel()
        else:
            self.do(self.raw.script_flush())

    @invariant()
    def views_agree(self) -> None:
        """Every view shows what the model holds."""
        line, model = self.line, self.model
        assert self.do(line.sizes()) == model.sizes()
        assert self.do(line.members()) == model.tokens(WAITING, PARKED, CLAIMED)
        assert self.do(line.claimed()) == model.tokens(CLAIMED)
        assert self.do(line.waiting(limit=99)) == model.waiting()


def explore(url: str, num_histories: int = 40, num_steps: int = 60) -> None:
    """Run random histories against a server."""
    machine = type("Machine", (UrgencyMachine,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedRedis]:
    """Return an embedded server that the tests of this module share."""
    with EmbeddedRedis() as server:
        yield server


def test_embedded_follows_the_model(embedded: EmbeddedRedis) -> None:
    """Valkey and the model agree over random histories."""
    explore(embedded.url)


@pytest.mark.real
def test_redis_follows_the_model(redis_server: RedisServer) -> None:
    """Redis and the model agree over random histories."""
    explore(redis_server.url)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.real
def test_redis_follows_the_model_for_long(redis_server: RedisServer) -> None:
    """Redis and the model agree over tens of thousands of steps."""
    explore(redis_server.url, num_histories=400, num_steps=80)
