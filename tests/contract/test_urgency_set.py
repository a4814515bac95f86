"""The state store's contract, on the embedded Valkey and on a real Redis."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from shared.adapters.embedded_redis import EmbeddedRedis
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.ports import SharedUrgencySet, StateStore
from tests.contract.presence_contract import PresenceContract, gone
from tests.contract.state_repair_contract import ChunksContract, LeaseContract, RepairContract
from tests.contract.urgency_set_contract import FencingContract, OrderContract, StatesContract
from tests.support.servers import RedisServer


class StateStoreContract(
    OrderContract,
    StatesContract,
    FencingContract,
    RepairContract,
    LeaseContract,
    ChunksContract,
    PresenceContract,
):
    """The whole suite."""

    async def test_nothing_is_left_of_those_who_are_gone(
        self, store: StateStore, raw: Redis, prefix: str
    ) -> None:
        """With the last lease the keys vanish: an agent a day leaves nothing behind."""
        await store.announce("agents", "a", "x", lease_s=0.05)
        await store.announce("agents", "b", "x", lease_s=0.1)
        assert await gone(store, "agents", "b")
        assert await raw.keys(f"{prefix}*") == []


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedRedis]:
    """Return an embedded server that the tests of this module share."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def prefix() -> str:
    """Return a key prefix that no other test uses."""
    return f"test-{uuid.uuid4().hex}:"


@pytest.fixture
async def store(url: str, prefix: str) -> AsyncIterator[StateStore]:
    """Return a store under that prefix, which keeps few chunks."""
    async with RedisStore.open(
        RedisParams(url=url, prefix=prefix, chunk_entries=200, timeout_s=30.0)
    ) as opened:
        yield opened


@pytest.fixture
async def raw(url: str) -> AsyncIterator[Redis]:
    """Return a bare client of the same server."""
    async with Redis.from_url(url, protocol=2) as client:
        yield client


@pytest.fixture
def line(store: StateStore) -> SharedUrgencySet:
    """Return an empty urgency set."""
    return store.urgency_set("instance-1")


class TestEmbedded(StateStoreContract):
    """On Valkey from a wheel, through a Unix socket."""

    @pytest.fixture
    def url(self, embedded: EmbeddedRedis) -> str:
        """Return its address."""
        return embedded.url


@pytest.mark.real
class TestRealRedis(StateStoreContract):
    """On the Redis of the tests' environment."""

    @pytest.fixture
    def url(self, redis_server: RedisServer) -> str:
        """Return its address."""
        return redis_server.url
