"""The broker's contract on real Apache Kafka."""

import uuid
from collections.abc import AsyncIterator

import pytest

from shared.adapters.kafka import KafkaBroker
from shared.adapters.kafka_params import KafkaParams
from tests.contract.broker_contract import PublishContract, TopicsContract
from tests.contract.broker_group_contract import GroupContract
from tests.contract.broker_reading_contract import CommitContract, FetchContract, PositionsContract
from tests.support.servers import KafkaServer


@pytest.mark.real
class TestKafkaBroker(
    PublishContract,
    TopicsContract,
    FetchContract,
    PositionsContract,
    CommitContract,
    GroupContract,
):
    """The whole suite on a cluster of one."""

    @pytest.fixture
    def prefix(self) -> str:
        """Return a prefix of topics and groups that no other test uses."""
        return f"t-{uuid.uuid4().hex[:12]}."

    @pytest.fixture
    async def broker(self, kafka_server: KafkaServer) -> AsyncIterator[KafkaBroker]:
        """Return a broker that looks soon after silent readers."""
        params = KafkaParams(bootstrap_servers=kafka_server.bootstrap, stall_s=0.5)
        async with KafkaBroker.open(params) as opened:
            yield opened
