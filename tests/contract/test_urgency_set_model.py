"""Random histories of an urgency set: the server and a plain Python model agree at every step.

Wipes and returns to an earlier state (a lost end of the append-only file) are steps like others.
"""

import asyncio
import contextlib
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
from redis.asyncio import Redis

from shared.adapters.embedded_redis import EmbeddedRedis
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.errors import Fenced
from shared.ports import QueueEntry, Token
from tests.support.servers import RedisServer
from tests.support.urgency import Snapshot, snapshot, turn_back
from tests.support.urgency_model import CLAIMED, PARKED, WAITING, UrgencyModel

IDS = st.sampled_from(["a", "b", "c", "d:1", "é"])
EPOCHS = st.integers(1, 3)
INSTANTS = st.sampled_from([0.0, 1.5, 3.0, 35_800_000_000.123456])
# Few distinct scores and arrivals, so that ties are common.
SCORES = st.sampled_from([-1.0, 0.0, 2.5, 35_800_000_000.123456])
OFFSETS = st.sampled_from([0, 9, 10, 2**53 + 1])
ATTEMPTS = st.sampled_from([0, 1, 10])


def tokens(epochs: st.SearchStrategy[int] = EPOCHS) -> st.SearchStrategy[Token]:
    """Return tokens, of these epochs."""
    return st.builds(Token, epochs, OFFSETS, ATTEMPTS)


def additions() -> st.SearchStrategy[list[QueueEntry]]:
    """Return additions, each of one epoch."""
    return EPOCHS.flatmap(
        lambda epoch: st.lists(
            st.builds(
                QueueEntry,
                request_id=IDS,
                score=SCORES,
                arrival=OFFSETS,
                token=tokens(st.just(epoch)),
            ),
            max_size=4,
        )
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
        params = RedisParams(url=self.url, prefix=self.prefix)
        store = await self.stack.enter_async_context(RedisStore.open(params))
        self.raw = await self.stack.enter_async_context(Redis.from_url(self.url, protocol=2))
        self.line = store.urgency_set("line")

    def do(self, step: Any) -> Any:
        """Run a coroutine to its end."""
        return self.runner.run(step)

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

    @rule(epoch=EPOCHS)
    def begin(self, epoch: int) -> None:
        """A life begins."""
        self.same(self.line.begin(epoch), lambda: self.model.begin(epoch))

    @rule(entries=additions())
    def add(self, entries: list[QueueEntry]) -> None:
        """Calls arrive, or are healed."""
        self.same(self.line.add(entries), lambda: self.model.add(entries))

    @rule(epoch=EPOCHS, limit=st.integers(0, 3), now_s=INSTANTS)
    def claim(self, epoch: int, limit: int, now_s: float) -> None:
        """The owner takes what is next."""
        self.same(
            self.line.claim(epoch, limit=limit, now_s=now_s),
            lambda: self.model.claim(epoch, limit, now_s, float("inf")),
        )

    @rule(epoch=EPOCHS, limit=st.integers(0, 3), now_s=INSTANTS)
    def claim_leased(self, epoch: int, limit: int, now_s: float) -> None:
        """A claimer takes what is next, for a while."""
        self.same(
            self.line.claim_leased(epoch, limit=limit, now_s=now_s, lease_s=1.0),
            lambda: self.model.claim(epoch, limit, now_s, now_s + 1.0),
        )

    @rule(request_id=IDS, token=tokens())
    def ack_any(self, request_id: str, token: Token) -> None:
        """Somebody acks, perhaps in vain."""
        self.same(self.line.ack(request_id, token), lambda: self.model.ack(request_id, token))

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        """The outcome of a claimed entry is published."""
        if claimed := self.model.tokens(CLAIMED):
            request_id = data.draw(st.sampled_from(sorted(claimed)))
            self.ack_any(request_id, claimed[request_id])

    @rule(request_id=IDS, token=tokens(), due_s=INSTANTS)
    def park_any(self, request_id: str, token: Token, due_s: float) -> None:
        """Somebody parks, perhaps in vain."""
        self.same(
            self.line.park(request_id, token, due_s=due_s),
            lambda: self.model.park(request_id, token, due_s),
        )

    @rule(data=st.data(), due_s=INSTANTS)
    def park(self, data: st.DataObject, due_s: float) -> None:
        """A claimed, parked or waiting entry is to be retried later."""
        if members := self.model.tokens(WAITING, PARKED, CLAIMED):
            request_id = data.draw(st.sampled_from(sorted(members)))
            self.park_any(request_id, members[request_id], due_s)

    @rule(request_id=IDS, token=tokens())
    def release_any(self, request_id: str, token: Token) -> None:
        """Somebody releases, perhaps in vain."""
        self.same(
            self.line.release(request_id, token), lambda: self.model.release(request_id, token)
        )

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A claimed, parked or waiting entry is handed back."""
        if members := self.model.tokens(WAITING, PARKED, CLAIMED):
            request_id = data.draw(st.sampled_from(sorted(members)))
            self.release_any(request_id, members[request_id])

    @rule(request_ids=st.lists(IDS, max_size=3))
    def remove(self, request_ids: list[str]) -> None:
        """Queries are cancelled."""
        self.same(self.line.remove(request_ids), lambda: self.model.remove(request_ids))

    @rule(now_s=INSTANTS)
    def renew(self, now_s: float) -> None:
        """A claimer renews all it could hold."""
        held = sorted(self.model.tokens(CLAIMED, WAITING).items())
        self.same(
            self.line.renew(held, now_s=now_s, lease_s=1.0),
            lambda: self.model.renew(held, now_s + 1.0),
        )

    @rule(now_s=INSTANTS)
    def reclaim(self, now_s: float) -> None:
        """A reclaimer gives back what ran out."""
        found = self.do(self.line.reclaim(now_s=now_s))
        expected = self.model.reclaim(now_s)
        assert sorted(found, key=repr) == sorted(expected, key=repr)

    @rule()
    def remember(self) -> None:
        """The server writes its state to disk."""
        self.past = (self.do(snapshot(self.raw, self.prefix)), self.model.snapshot())

    @rule()
    def lose(self) -> None:
        """The server crashes, and comes back with what was on disk."""
        stored, model = self.past
        self.do(turn_back(self.raw, self.prefix, stored))
        self.model = model.snapshot()

    @rule()
    def wipe(self) -> None:
        """Somebody empties the server."""
        self.do(turn_back(self.raw, self.prefix, {}))
        self.model = UrgencyModel()

    @rule()
    def forget_scripts(self) -> None:
        """Somebody makes the server forget the scripts."""
        self.do(self.raw.script_flush())

    @invariant()
    def views_agree(self) -> None:
        """Every view shows what the model holds."""
        line, model = self.line, self.model
        assert self.do(line.sizes()) == model.sizes()
        assert self.do(line.members()) == model.tokens(WAITING, PARKED, CLAIMED)
        assert self.do(line.claimed()) == model.tokens(CLAIMED)
        assert self.do(line.waiting(limit=99)) == model.waiting()


def explore(url: str, num_histories: int, num_steps: int = 50) -> None:
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
    explore(embedded.url, num_histories=40)


@pytest.mark.real
def test_redis_follows_the_model(redis_server: RedisServer) -> None:
    """Redis and the model agree over random histories."""
    explore(redis_server.url, num_histories=40)


@pytest.mark.slow
@pytest.mark.real
def test_redis_follows_the_model_for_long(redis_server: RedisServer) -> None:
    """Redis and the model agree over tens of thousands of steps."""
    explore(redis_server.url, num_histories=400, num_steps=80)
