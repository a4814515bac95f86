"""Results of questions whose gateway is gone: another one records them for everybody.

A gateway hears the results of its own questions on its reply partition, and records them in the
state store. One that was killed, or had to end before, cannot. So all gateways together read all
results once more, as one group, and whoever has a partition records what is not recorded yet. For
most results that is a part of one look, because their gateway was there. A position is committed
when everything before it is recorded, so neither a restart nor an outage of the state store loses
one; what is read twice is recorded once.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress

import structlog

from services.gateway.query_desk import result_view
from services.gateway.query_records import ENDED, Known, QueryRecords
from shared.contracts.codec import decode
from shared.contracts.messages import QueryResult
from shared.contracts.topics import QUERY_RESULTS, Topics
from shared.errors import (
    BrokerUnavailable,
    ConfigError,
    ContractError,
    StaleAssignment,
    StateUnavailable,
)
from shared.ports import Broker, Committed, Consumer, Record
from shared.runtime.health import Health

GROUP = "gateway-results"
PULSE = "results"
MAX_RECORDS = 50
MAX_ID_CHARS = 128
FETCH_S = 0.5
RETRY_S = 0.5
log = structlog.get_logger(__name__)


class ResultRecorder:
    """Records results that nobody has recorded.

    Args:
        broker: Where results come.
        topics: Names.
        records: Where they are recorded.
        health: Not ready before it is known that this gateway may read them.
        gateway_id: Under which its connection is known; an earlier life of it gives up its place.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        records: QueryRecords,
        health: Health,
        gateway_id: str,
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._records = records
        self._health = health
        self._gateway_id = gateway_id
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Record until cancelled.

        Raises:
            UnknownTopic: The mesh's topics do not exist.
            ConfigError: The broker refuses this client, or its group.
        """
        topic, group = self._topics.name(QUERY_RESULTS), self._topics.group(GROUP)
        self._health.block(PULSE, "joining those who read the results")
        with suppress(BrokerUnavailable, ConfigError):  # else its session has to run out first
            await self._broker.dismiss(group, self._gateway_id)
        while True:
            try:
                async with self._broker.group_consumer([topic], group) as consumer:
                    self._health.clear(PULSE)
                    while True:
                        self._health.beat(PULSE)
                        await self._turn(consumer)
            except BrokerUnavailable as exc:  # requests need no group
                self._health.clear(PULSE)
                log.warning("results_not_read", error=str(exc))
                await asyncio.sleep(RETRY_S)

    async def _turn(self, consumer: Consumer) -> None:
        try:
            records = await consumer.fetch(max_records=MAX_RECORDS, timeout_s=FETCH_S)
        except BrokerUnavailable:  # the consumer goes on by itself when the broker is back
            await asyncio.sleep(RETRY_S)
            return
        try:
            await self._take(records)
        except StateUnavailable as exc:
            log.warning("results_not_recorded", error=str(exc))
            _read_again(consumer, records)
            await asyncio.sleep(RETRY_S)
            return
        # What is not committed is read again and found recorded, here or by another gateway.
        with suppress(BrokerUnavailable, StaleAssignment):
            await consumer.commit({one.tp: Committed(offset=one.offset + 1) for one in records})

    async def _take(self, records: Sequence[Record]) -> None:
        by_query: defaultdict[str, list[Record]] = defaultdict(list)
        for record in records:
            query_id = _query_id(record)
            if query_id:
                by_query[query_id].append(record)
        if not by_query:
            return
        for query_id, known in (await self._records.running(by_query)).items():
            await self._end(query_id, known, by_query[query_id])

    async def _end(self, query_id: str, known: Known, records: Sequence[Record]) -> None:
        """Record a question's first result among some records."""
        for record in records:
            if known.partition not in (None, record.tp.partition):
                continue  # the answer to another one who asked under this id
            try:
                result = decode(record.value or b"", QueryResult)
            except ContractError as exc:
                self.counts["undecodable"] += 1
                log.warning("result_undecodable", detail=exc.detail)
                continue
            if result.query_id == query_id:
                ended = Known(tenant=known.tenant, result=result_view(result))
                await self._records.put(query_id, ENDED, ended)
                self.counts["recorded"] += 1
                return


def _query_id(record: Record) -> str:
    """Return whose result a record is by its key, which costs no decoding; empty: nobody's."""
    try:
        query_id = (record.key or b"").decode()
    except UnicodeDecodeError:
        return ""
    return query_id if len(query_id) <= MAX_ID_CHARS else ""


def _read_again(consumer: Consumer, records: Sequence[Record]) -> None:
    """Make the first of some records of each partition the next one read."""
    first = {one.tp: one.offset for one in reversed(records)}
    for tp, offset in first.items():
        with suppress(StaleAssignment, BrokerUnavailable):  # then its next reader begins there
            consumer.seek(tp, offset)
