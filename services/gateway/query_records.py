"""What all replicas know of the questions, in the state store: whose each is, and its result.

A record has two places, each written once: whoever comes later changes nothing. It vanishes some
minutes after the last of them.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from services.gateway.chunk_reader import FIRST
from shared.ports import StateStore

LOOK_S = 0.005
ASKED, ENDED = 0, 1  # the places
Chunks = list[tuple[str, int, int, str]]


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What every replica can know of a question.

    Attributes:
        tenant: Whose it is.
        result: Its result, as JSON for the client; None: not yet.
        partition: Where on `query-results` its result comes; None: not said.
    """

    tenant: str
    result: dict[str, Any] | None = None
    partition: int | None = None


class QueryRecords:
    """Reads and writes the records.

    Args:
        store: Where they are.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    async def put(self, query_id: str, place: int, known: Known) -> None:
        """Write one place of a record, unless it or a later one is there.

        Raises:
            StateUnavailable: The state store does not answer; safe to repeat.
        """
        text = msgspec.json.encode(known).decode()
        await self._store.append_chunk(_name(query_id), 0, place, text)

    async def look(self, query_id: str) -> Known | None:
        """Return what is known of a question; None: nothing.

        Raises:
            StateUnavailable: The state store does not answer.
        """
        found = await self._read([query_id])
        return _known(found[query_id]) if query_id in found else None

    async def running(self, query_ids: Iterable[str]) -> dict[str, Known]:
        """Return what is known of those that were asked and have no result, with one command.

        Args:
            query_ids: Questions; at least one.

        Raises:
            StateUnavailable: The state store does not answer.
        """
        found = await self._read(query_ids)
        return {name: _known(chunks) for name, chunks in found.items() if chunks[-1][2] == ASKED}

    async def _read(self, query_ids: Iterable[str]) -> dict[str, Chunks]:
        named = {_name(query_id): query_id for query_id in query_ids}
        found = await self._store.read_chunks(dict.fromkeys(named, FIRST), wait_s=LOOK_S)
        return {named[name]: chunks for name, chunks in found.items()}


def _known(chunks: Chunks) -> Known:
    return msgspec.json.decode(chunks[-1][3], type=Known)


def _name(query_id: str) -> str:
    return f"query-state/{query_id}"
