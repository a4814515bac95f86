"""The repair that `UrgencySet` describes restores a set after a crash, a lost second or a wipe.

The owner below holds what a worker holds: its calls and which of them run or are finished. It
never reads the set except through the port.
"""

import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pytest
from redis.asyncio import Redis

from shared.adapters.embedded_redis import EmbeddedRedis, EmbeddedRedisParams
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.ports import QueueEntry, UrgencySet
from tests.support.servers import RedisServer
from tests.support.urgency import entry, ids

LOST_BYTES = 3_000


class Server(Protocol):
    """A server that a test may kill."""

    @property
    def url(self) -> str:
        """Its address."""

    def start(self) -> None:
        """Start it again."""

    def kill(self) -> None:
        """End it with SIGKILL."""


@dataclass
class Victim:
    """A server and its data."""

    server: Server
    data_dir: Path

    def crash(self) -> None:
        """Kill it and start it again."""
        self.server.kill()
        self.server.start()

    def lose_the_end(self) -> None:
        """Kill it, cut its append-only file as a machine's crash would, start it again."""
        self.server.kill()
        [log] = (self.data_dir / "appendonlydir").glob("*.incr.aof")
        content = log.read_bytes()
        assert len(content) > 2 * LOST_BYTES
        log.write_bytes(content[:-LOST_BYTES])
        self.server.start()


@dataclass
class Owner:
    """A worker's view of its calls."""

    line: UrgencySet
    rng: random.Random
    held: dict[str, QueueEntry] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    num_made: int = 0

    async def work(self, num_steps: int) -> None:
        """Accept, run, finish, park and hand back calls at random."""
        steps = [self.accept, self.accept, self.take, self.finish, self.hand_back, self.retry]
        for _ in range(num_steps):
            await self.rng.choice(steps)()

    async def accept(self) -> None:
        """A few calls arrive."""
        added = []
        for _ in range(self.rng.randint(1, 4)):
            score = float(self.rng.randint(0, 9))
            added.append(entry(f"r{self.num_made}", score, arrival=self.num_made))
            self.num_made += 1
        self.held |= {one.request_id: one for one in added}
        await self.line.add(added)

    async def take(self) -> None:
        """Run the next calls; one that runs or is finished already is none of them."""
        for one in await self.line.claim(1, limit=2, now_s=0.0):
            if one.request_id not in self.finished:
                self.running.add(one.request_id)

    def any_running(self) -> list[QueueEntry]:
        """Return a running call, if there is one."""
        names = sorted(self.running)
        return [self.held[self.rng.choice(names)]] if names else []

    async def finish(self) -> None:
        """A call's outcome is published, then acked."""
        for one in self.any_running():
            self.running.remove(one.request_id)
            self.finished.add(one.request_id)
            await self.line.ack(one.request_id, one.token)

    async def hand_back(self) -> None:
        """A call waits again."""
        for one in self.any_running():
            self.running.remove(one.request_id)
            await self.line.release(one.request_id, one.token)

    async def retry(self) -> None:
        """A call waits for its next try."""
        for one in self.any_running():
            self.running.remove(one.request_id)
            await self.line.park(one.request_id, one.token, due_s=50.0)

    async def repair(self) -> None:
        """Do what `UrgencySet` says under "Repair"."""
        members = await self.line.members()
        open_ids = self.held.keys() - self.finished
        missing = [
            self.held[name]
            for name in sorted(open_ids - self.running)
            if members.get(name) != self.held[name].token
        ]
        await self.line.add(missing)
        for name, token in (await self.line.claimed()).items():
            if name not in self.running | self.finished:
                await self.line.release(name, token)
        for name in members.keys() & self.finished:
            await self.line.ack(name, members[name])

    async def expect_all_to_be_there(self) -> None:
        """Claim everything: it is what is open and does not run, in order, each once."""
        expected = [self.held[name] for name in self.held.keys() - self.finished - self.running]
        expected.sort(key=lambda one: (one.score, one.arrival))
        found = await self.line.claim(1, limit=10_000, now_s=50.0)
        assert ids([one for one in found if one.request_id not in self.running]) == ids(expected)
        assert not {one.request_id for one in found} & self.finished


@pytest.fixture
def embedded_victim(tmp_path: Path) -> Iterator[Victim]:
    """Return an embedded server of this test's own."""
    with EmbeddedRedis(EmbeddedRedisParams(data_dir=tmp_path)) as server:
        yield Victim(server, tmp_path)


@pytest.fixture
def redis_victim(own_redis: RedisServer) -> Victim:
    """Return a real Redis of this test's own, with `appendfsync everysec`."""
    assert own_redis.data_dir is not None
    return Victim(own_redis, own_redis.data_dir)


class CrashContract:
    """What survives, and what repair brings back; `victim` comes from the class that binds it."""

    @pytest.fixture
    async def owner(self, victim: Victim) -> AsyncIterator[Owner]:
        """Return the owner of a set with a history."""
        params = RedisParams(url=victim.server.url, prefix=f"{uuid.uuid4().hex}:", timeout_s=10.0)
        async with RedisStore.open(params) as store:
            owner = Owner(store.urgency_set("line"), random.Random(5))
            await owner.line.begin(1)
            await owner.work(150)
            yield owner

    async def test_killed_server_keeps_what_it_acknowledged(
        self, owner: Owner, victim: Victim
    ) -> None:
        """SIGKILL of the server loses nothing that it had answered: it was written before."""
        before = (await owner.line.members(), await owner.line.claimed())
        assert before[0]
        victim.crash()
        assert (await owner.line.members(), await owner.line.claimed()) == before
        await owner.expect_all_to_be_there()

    @pytest.mark.parametrize("disaster", [Victim.crash, Victim.lose_the_end], ids=["kill", "tail"])
    async def test_repair_after_a_crash(
        self, owner: Owner, victim: Victim, disaster: Callable[[Victim], None]
    ) -> None:
        """Whatever the end of the file held, one repair brings every open call back, once."""
        before = await owner.line.members()
        disaster(victim)
        if disaster is Victim.lose_the_end:
            assert await owner.line.members() != before
        await owner.repair()
        await owner.work(30)
        await owner.repair()
        await owner.expect_all_to_be_there()

    async def test_repair_after_a_wipe(self, owner: Owner, victim: Victim) -> None:
        """After FLUSHALL one repair brings every open call back, once."""
        async with Redis.from_url(victim.server.url) as raw:
            await raw.flushall()
            await raw.script_flush()
        assert await owner.line.members() == {}
        await owner.repair()
        await owner.expect_all_to_be_there()

    async def test_repair_of_a_sound_set(self, owner: Owner) -> None:
        """Where nothing was lost, repair changes nothing."""
        before = (await owner.line.waiting(limit=999), await owner.line.sizes())
        await owner.repair()
        assert (await owner.line.waiting(limit=999), await owner.line.sizes()) == before


class TestEmbedded(CrashContract):
    """On Valkey from a wheel."""

    @pytest.fixture
    def victim(self, embedded_victim: Victim) -> Victim:
        """Return the server."""
        return embedded_victim


@pytest.mark.real
class TestRealRedis(CrashContract):
    """On a real Redis."""

    @pytest.fixture
    def victim(self, redis_victim: Victim) -> Victim:
        """Return the server."""
        return redis_victim
