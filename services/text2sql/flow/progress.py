"""What is told while a question is worked on: events in the state store, for whoever wants them."""

from collections.abc import AsyncIterator
from typing import Protocol

import structlog

from shared.contracts.query_events import EventKind, QueryEvent, encode_event, event_stream
from shared.errors import StateUnavailable
from shared.ports import Clock

MAX_ATTEMPT = 1_000
log = structlog.get_logger(__name__)


class EventStore(Protocol):
    """What progress needs of a state store; see `StateStore`."""

    async def append_chunk(self, request_id: str, attempt: int, index: int, text: str) -> None:
        """Append one chunk."""
        ...

    def chunks(
        self, request_id: str, *, after: str = "0-0", timeout_s: float = 1.0
    ) -> AsyncIterator[tuple[str, int, int, str]]:
        """Yield the chunks that are there."""
        ...


class Progress:
    """Tells what happens to one question; never fails it.

    Args:
        store: Where events go; None: nowhere.
        clock: Mesh clock.
        query_id: The question.
    """

    def __init__(self, store: EventStore | None, clock: Clock, query_id: str) -> None:
        self._store = store
        self._clock = clock
        self._stream = event_stream(query_id)
        self._attempt = 0
        self._index = 0

    async def begin(self, detail: str, *, is_again: bool) -> None:
        """Tell that an agent took the question.

        Args:
            detail: For people.
            is_again: Whether another one may have begun before: its events stay.
        """
        if self._store is not None and is_again:
            try:
                async for _, attempt, _, _ in self._store.chunks(self._stream, timeout_s=0.01):
                    self._attempt = min(attempt + 1, MAX_ATTEMPT)
            except StateUnavailable as exc:
                self._give_up(exc)
        await self.tell("began", detail=detail)

    async def tell(
        self,
        kind: EventKind,
        *,
        stage: str = "",
        iteration: int = 0,
        siblings: int = 0,
        took_s: float = 0.0,
        output_tokens: int = 0,
        sql: str = "",
        verdict: str = "",
        detail: str = "",
    ) -> None:
        """Tell one event."""
        if self._store is None:
            return
        event = QueryEvent(
            kind=kind,
            at_s=self._clock.now_s(),
            stage=stage,
            iteration=iteration,
            siblings=siblings,
            took_s=took_s,
            output_tokens=output_tokens,
            sql=sql,
            verdict=verdict,
            detail=detail,
        )
        index, self._index = self._index, self._index + 1
        try:
            await self._store.append_chunk(self._stream, self._attempt, index, encode_event(event))
        except StateUnavailable as exc:
            self._give_up(exc)

    def _give_up(self, exc: StateUnavailable) -> None:
        log.warning("events_lost", error=str(exc))
        self._store = None
