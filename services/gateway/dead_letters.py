"""Dead letters: a bounded list of the recent ones, and sending one again.

Only what may be shown is kept; the original bytes stay on the topic and are read when they are
needed. Sending again publishes exactly the original key, bytes and headers to the original topic,
with one header that says so.
"""

from collections import OrderedDict
from typing import Any

import msgpack
import msgspec
import structlog

from services.gateway.problems import Problem
from shared.contracts.codec import decode, return_address
from shared.contracts.messages import DeadLetter
from shared.contracts.topics import DEAD_LETTERS, Topics
from shared.errors import ContractError, MeshError, UnknownTopic
from shared.ports import Broker, Clock, Record, TopicPartition

MAX_LETTERS = 1_000
MAX_SHOWN_CHARS = 100_000
FETCH_S = 2.0
REPLAYED = "hexflow-replayed-offset"
log = structlog.get_logger(__name__)


class Letter(msgspec.Struct, kw_only=True):
    """What is kept of a dead letter.

    Attributes:
        offset: Where it is on `dead-letters`.
        topic: Topic the message was on, without prefix.
        source_offset: Where it was there.
        error: Constant reason.
        detail: What was wrong, for people.
        service: Who gave up on it.
        at_s: When, mesh clock.
        size_bytes: Size of the original value; 0 when it was left out.
        request_id: The call, where it can be read.
        query_id: Its query, where it can be read.
        replayed_at_s: When it was last sent again from here, mesh clock; None: never.
    """

    offset: int
    topic: str
    source_offset: int
    error: str
    detail: str
    service: str
    at_s: float
    size_bytes: int
    request_id: str
    query_id: str
    replayed_at_s: float | None = None


class DeadLetterDesk:
    """Lists dead letters and sends them again.

    Args:
        broker: Where they are.
        topics: Names.
        clock: For the time of a replay.
    """

    def __init__(self, broker: Broker, topics: Topics, clock: Clock) -> None:
        self._broker = broker
        self._topics = topics
        self._clock = clock
        self._letters: OrderedDict[int, Letter] = OrderedDict()
        self.num_seen = 0

    def take(self, record: Record) -> None:
        """Take a record of `dead-letters`."""
        try:
            letter = decode(record.value or b"", DeadLetter)
        except ContractError:
            return
        self.num_seen += 1
        address = return_address(letter.value)
        self._letters[record.offset] = Letter(
            offset=record.offset,
            topic=letter.topic,
            source_offset=letter.offset,
            error=letter.error,
            detail=letter.detail,
            service=letter.service,
            at_s=letter.at_s,
            size_bytes=len(letter.value),
            request_id=address.request_id if address is not None else "",
            query_id=address.query_id if address is not None else "",
        )
        if len(self._letters) > MAX_LETTERS:
            self._letters.popitem(last=False)

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Return the recent ones, newest first."""
        newest = list(reversed(self._letters.values()))[:limit]
        return [msgspec.to_builtins(letter) for letter in newest]

    async def replay(self, offset: int, *, again: bool) -> dict[str, Any]:
        """Publish the original message again.

        Args:
            offset: Where the letter is on `dead-letters`.
            again: Whether to do it although it was done before.

        Raises:
            Problem: There is no such letter (404), it has no bytes, was sent again already, or
                its topic is gone (409).
            BrokerUnavailable: The broker does not answer.
        """
        known = self._known(offset)
        if known.replayed_at_s is not None and not again:
            raise Problem(409, "it was sent again already", code="already_replayed")
        letter = await self._read(offset)
        if not letter.value:
            raise Problem(409, "its bytes were too large to keep", code="no_bytes")
        before = known.replayed_at_s
        known.replayed_at_s = self._clock.now_s()  # a second click must not send a second copy
        headers = [one for one in letter.headers if one[0] != REPLAYED]
        try:
            ack = await self._broker.publish(
                self._topics.name(letter.topic),
                letter.value,
                key=letter.key,
                headers=[*headers, (REPLAYED, str(offset).encode())],
            )
        except UnknownTopic as exc:
            known.replayed_at_s = before
            raise Problem(409, f"{letter.topic} exists no more", code=exc.reason) from exc
        except MeshError:
            known.replayed_at_s = before
            raise
        log.info("dead_letter_replayed", offset=offset, topic=letter.topic, as_offset=ack.offset)
        return {"topic": letter.topic, "partition": ack.tp.partition, "offset": ack.offset}

    async def text(self, offset: int) -> dict[str, Any]:
        """Return the original message, readable; raises what `replay` raises."""
        self._known(offset)
        letter = await self._read(offset)
        return {"offset": offset, "text": _readable(letter.value)}

    def _known(self, offset: int) -> Letter:
        known = self._letters.get(offset)
        if known is None:
            raise Problem(404, f"no dead letter at offset {offset}", code="not_found")
        return known

    async def _read(self, offset: int) -> DeadLetter:
        tp = TopicPartition(self._topics.name(DEAD_LETTERS), 0)
        async with self._broker.partition_consumer([tp], start="end") as consumer:
            consumer.seek(tp, offset)
            records = await consumer.fetch(max_records=1, timeout_s=FETCH_S)
        if not records or records[0].offset != offset:
            raise Problem(404, "it is no longer on the topic", code="not_found")
        return decode(records[0].value or b"", DeadLetter)


def _readable(value: bytes) -> str:
    try:
        found = msgpack.unpackb(value, strict_map_key=False)
        return msgspec.json.format(msgspec.json.encode(found, enc_hook=repr)).decode()[
            :MAX_SHOWN_CHARS
        ]
    except Exception:  # noqa: BLE001 - msgpack raises many unrelated classes on hostile bytes
        return repr(value)[:MAX_SHOWN_CHARS]
