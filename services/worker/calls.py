"""What a worker holds in memory: calls by request id, their place, and the sums it reports.

Invariants: a request id is held once, however often it is delivered; `num_waiting`, `num_running`,
`backlog_s`, `backlog_tokens` and `accounted_offset` change together in one step without an await,
so a state report never counts a call twice or not at all. Nothing here waits or does I/O.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from shared.contracts.messages import BoundCall, StageRequest
from shared.ports import QueueEntry, Record, Token
from shared.runtime.tracing import traceparent_of
from shared.scheduling.admission import demoted, is_hopeless


class Place(Enum):
    """Where a held call is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"


class Cut(Enum):
    """Why a running generation was cut off."""

    CANCELLED = "cancelled"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True, kw_only=True)
class HeldCall:
    """One call and everything delivered under its id.

    Attributes:
        call: The first delivery.
        record: The record it came in.
        token: Its token in the urgency set.
        queued_at_s: When it was taken in, mesh clock.
        offsets: Offsets of all its deliveries; they are finished together.
        attempt: Highest attempt delivered; a hand-back adds one to it.
        request: Latest delivery's request: where the outcome goes.
        place: Where it is.
        started_at_s: Handed to the engine, mesh clock.
        first_token_at_s: First token, mesh clock.
        finished_at_s: End of the generation, mesh clock.
        num_forwarded: Chunks sent towards the producer; above 0 it is never tried again.
        has_lost_chunk: Whether a chunk could not be sent; no later one is then.
        abort: Cuts its generation off, while it runs.
        cut: Why it was cut off.
        is_demoted: Whether it went behind the others while it waited.
        passes: How often others were started before it because the engine lacked room for it.
        handed_on: Whether it is answered, or back on `stage-requests`; empty before.
    """

    call: BoundCall
    record: Record
    token: Token
    queued_at_s: float
    offsets: list[int]
    attempt: int
    request: StageRequest
    place: Place = Place.WAITING
    started_at_s: float | None = None
    first_token_at_s: float | None = None
    finished_at_s: float | None = None
    num_forwarded: int = 0
    has_lost_chunk: bool = False
    abort: Callable[[], object] | None = None
    cut: Cut | None = None
    handed_on: Literal["", "answered", "back"] = ""
    is_demoted: bool = False
    passes: int = 0

    @property
    def score(self) -> float:
        """Its place in the queue, smallest first."""
        score = self.call.queue_score
        return demoted(score) if self.is_demoted else score

    @property
    def request_id(self) -> str:
        """The call's id."""
        return self.call.request.request_id

    @property
    def query_id(self) -> str:
        """Its query."""
        return self.call.request.effective_query_id

    @property
    def size_bytes(self) -> int:
        """Size of the record held for it, bytes."""
        return len(self.record.value or b"")

    @property
    def traceparent(self) -> str | None:
        """W3C trace context of the delivery, if it carries one."""
        return traceparent_of(self.record)

    def is_too_late(self, now_s: float) -> bool:
        """Return whether its query can no longer be in time, and it stands before others."""
        call = self.call
        if call.remaining_s is None or call.is_hopeless or self.is_demoted:
            return False
        return is_hopeless(now_s, call.deadline_s, call.t_comp_s + call.remaining_s)

    def entry(self) -> QueueEntry:
        """Return its entry for the urgency set."""
        return QueueEntry(
            request_id=self.request_id,
            score=self.score,
            arrival=self.token.offset,
            token=self.token,
        )


@dataclass(frozen=True, slots=True)
class _Ended:
    attempt: int
    ready_at_s: float | None
    is_answered: bool


class EndedCalls:
    """Remembers calls that ended here lately, to recognise later deliveries of them.

    A delivery is known when it is the same submission (equal `ready_at_s`) and either the call
    was answered, or it was handed back at this attempt or a later one. A producer that submits the
    same id again after a restart has a new `ready_at_s`: that call runs again, because nobody may
    be left who read the first answer.

    Args:
        limit: Most calls remembered.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ended: OrderedDict[str, _Ended] = OrderedDict()

    def remember(self, held: HeldCall) -> None:
        """Note the end of a call."""
        is_answered = held.handed_on == "answered"
        ended = _Ended(held.attempt, held.request.ready_at_s, is_answered)
        self._ended[held.request_id] = ended
        self._ended.move_to_end(held.request_id)
        if len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def knows(self, request: StageRequest) -> bool:
        """Return whether a delivery is of a call that ended here already."""
        ended = self._ended.get(request.request_id)
        if ended is None or ended.ready_at_s != request.ready_at_s:
            return False
        return ended.is_answered or request.attempt <= ended.attempt


@dataclass(slots=True)
class CallBook:
    """All calls of one life of a worker."""

    accounted_offset: int = -1
    num_waiting: int = 0
    num_running: int = 0
    backlog_s: float = 0.0
    backlog_tokens: int = 0
    held_bytes: int = 0
    num_taken: int = 0
    _held: dict[str, HeldCall] = field(default_factory=dict)
    _by_query: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, request_id: str) -> HeldCall | None:
        """Return a held call."""
        return self._held.get(request_id)

    def at(self, place: Place) -> Iterator[HeldCall]:
        """Return the calls in one place, oldest first; stable while calls come and go."""
        return (held for held in list(self._held.values()) if held.place is place)

    def head_score(self) -> float | None:
        """Return the smallest queue score among the waiting calls, or None."""
        return min((held.score for held in self.at(Place.WAITING)), default=None)

    def of_query(self, query_id: str) -> list[HeldCall]:
        """Return the held calls of a query."""
        return [self._held[request_id] for request_id in sorted(self._by_query.get(query_id, ()))]

    def cancelled_by(self, one_id: str) -> list[HeldCall]:
        """Return the held calls that a tombstone ends: all of a query, or the call of that id."""
        held = self._held.get(one_id)
        return self.of_query(one_id) or ([held] if held is not None else [])

    def account(self, offset: int) -> None:
        """Note that a record is contained in the sums (or needs not be)."""
        self.accounted_offset = max(self.accounted_offset, offset)

    def attach(self, call: BoundCall, record: Record) -> bool:
        """Add a further delivery to a call that is held; False when it is not held."""
        held = self._held.get(call.request.request_id)
        if held is None:
            return False
        held.offsets.append(record.offset)
        if call.request.attempt >= held.attempt:
            held.attempt = call.request.attempt
            held.request = call.request
        return True

    def hold(self, call: BoundCall, record: Record, *, epoch: int, now_s: float) -> HeldCall:
        """Take in a call; it waits."""
        held = HeldCall(
            call=call,
            record=record,
            token=Token(epoch, record.offset, call.request.attempt),
            queued_at_s=now_s,
            offsets=[record.offset],
            attempt=call.request.attempt,
            request=call.request,
        )
        self._held[held.request_id] = held
        self._by_query[held.query_id].add(held.request_id)
        self.held_bytes += held.size_bytes
        self.num_taken += 1
        self.num_waiting += 1
        self.backlog_s += call.t_comp_s
        self.backlog_tokens += _tokens(call)
        return held

    def start(self, held: HeldCall, now_s: float) -> None:
        """Move a waiting call into the engine."""
        self._leave_queue(held)
        held.place = Place.RUNNING
        held.started_at_s = now_s
        self.num_running += 1

    def end(self, held: HeldCall, now_s: float) -> None:
        """Stop counting a call as work: it is only to be answered or handed back now."""
        if held.place is Place.WAITING:
            self._leave_queue(held)
        elif held.place is Place.RUNNING:
            self.num_running -= 1
        else:
            return
        held.place = Place.ENDING
        held.finished_at_s = now_s
        self.backlog_s -= held.call.t_comp_s
        if self.num_waiting == 0 and self.num_running == 0:
            self.backlog_s = 0.0  # sums of floats drift

    def forget(self, held: HeldCall) -> None:
        """Drop a call that is handed on."""
        del self._held[held.request_id]
        ids = self._by_query[held.query_id]
        ids.discard(held.request_id)
        if not ids:
            del self._by_query[held.query_id]
        self.held_bytes -= held.size_bytes

    def _leave_queue(self, held: HeldCall) -> None:
        self.num_waiting -= 1
        self.backlog_tokens -= _tokens(held.call)


def _tokens(call: BoundCall) -> int:
    return call.predicted_input_tokens + round(call.predicted_output_tokens)
