"""The broker's contract on the in-process broker."""

import uuid

import pytest

from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from tests.contract.broker_contract import PublishContract, TopicsContract
from tests.contract.broker_group_contract import GroupContract
from tests.contract.broker_reading_contract import CommitContract, FetchContract, PositionsContract


class TestMemoryBroker(
    PublishContract,
    TopicsContract,
    FetchContract,
    PositionsContract,
    CommitContract,
    GroupContract,
):
    """The whole suite in one process."""

    @pytest.fixture
    def prefix(self) -> str:
        """Return a prefix of topics and groups that no other test uses."""
        return f"t-{uuid.uuid4().hex[:12]}."

    @pytest.fixture
    def broker(self) -> MemoryBroker:
        """Return an empty broker."""
        return MemoryBroker(SystemClock())
