"""Which queries are cancelled, as the `cancellations` topic says."""

import structlog

from shared.contracts.codec import decode
from shared.contracts.messages import CancelQuery
from shared.errors import ContractError
from shared.ports import Record

MAX_TOMBSTONES = 500_000
log = structlog.get_logger(__name__)


class Tombstones:
    """Cancelled queries until their tombstones expire.

    Args:
        limit: Most of them; beyond it the oldest is forgotten.
    """

    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._cancelled: dict[str, CancelQuery] = {}

    def __len__(self) -> int:
        return len(self._cancelled)

    def put(self, record: Record, now_s: float) -> str | None:
        """Take a record of the topic; returns the query it cancels, if it still matters."""
        if record.value is None:
            return None
        try:
            tombstone = decode(record.value, CancelQuery)
        except ContractError as exc:
            log.warning("cancellation_undecodable", offset=record.offset, detail=exc.detail)
            return None
        known = self._cancelled.get(tombstone.query_id)
        until_s = max(tombstone.until_s, known.until_s if known else 0.0)
        if until_s < now_s:
            return None
        if known is None or until_s > known.until_s:
            self._cancelled[tombstone.query_id] = tombstone
            if len(self._cancelled) > self._limit:
                del self._cancelled[next(iter(self._cancelled))]
        return tombstone.query_id

    def find(self, *ids: str) -> CancelQuery | None:
        """Return the tombstone of one of these queries or calls, or None."""
        found = (self._cancelled.get(one) for one in ids)
        return next((tombstone for tombstone in found if tombstone is not None), None)

    def prune(self, now_s: float) -> None:
        """Forget tombstones that have expired."""
        expired = [key for key, value in self._cancelled.items() if value.until_s < now_s]
        for query_id in expired:
            del self._cancelled[query_id]
