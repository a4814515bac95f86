"""The urgency set's contract, on the store of meshes that run in virtual time."""

import pytest

from shared.adapters.memory_store import MemoryStore
from shared.ports import SharedUrgencySet
from tests.contract.presence_contract import PresenceContract
from tests.contract.state_repair_contract import LeaseContract
from tests.contract.urgency_set_contract import FencingContract, OrderContract, StatesContract


class TestMemoryStore(
    OrderContract, StatesContract, FencingContract, LeaseContract, PresenceContract
):
    """Everything but the loss of a server's memory, of which it has none."""

    @pytest.fixture
    def store(self) -> MemoryStore:
        """Return an empty store."""
        return MemoryStore()

    @pytest.fixture
    def line(self, store: MemoryStore) -> SharedUrgencySet:
        """Return an empty urgency set."""
        return store.urgency_set("instance-1")


async def test_chunks_come_in_order_and_an_overtaken_attempt_is_dropped():
    """Positions are those of the Redis streams."""
    store = MemoryStore()
    for attempt, index in ((0, 0), (0, 1), (1, 0), (0, 2), (1, 0)):
        await store.append_chunk("r", attempt, index, f"{attempt}{index}")
    found = [chunk async for chunk in store.chunks("r", after="1-1")]
    assert found == [("1-2", 0, 1, "01"), ("2-1", 1, 0, "10")]
    assert await store.read_chunks({"r": "2-1", "none": "0-0"}, wait_s=0.1) == {}
