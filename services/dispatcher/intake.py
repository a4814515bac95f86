"""From a record of `stage-requests` to a call, or to the reason why it is none.

Nothing a producer claims about time is believed beyond bounds: a call becomes ready when the
broker takes it, and an arrival in the future or absurdly long ago is replaced by that instant, or
by the arrival its query had before (an invented arrival would jump the queue).

Who learns of a refusal: an undecodable record goes to `dead-letters`, and a `rejected` outcome is
published wherever its request_id is readable, on partition 0 of `stage-results` when `reply_to` is
not. A readable call that asks for something impossible gets the outcome alone, unless its
`reply_to` leads nowhere: then it is a dead letter.
"""

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from services.dispatcher.params import DispatcherParams
from shared.contracts.codec import ReturnAddress, decode, return_address
from shared.contracts.messages import StageRequest
from shared.errors import ContractError, InvalidCall, MeshError
from shared.ports import Clock, Record
from shared.runtime.metrics import Metrics

MAX_PREFIX_PARTS = 64


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a record is no call.

    Attributes:
        error: What is wrong.
        address: Whom to tell; None: nobody can be told.
        bury: Whether the record goes to `dead-letters`.
        retry_topics: Whether a look at the topics as they are now may change the verdict.
    """

    error: MeshError
    address: ReturnAddress | None
    bury: bool
    retry_topics: bool = False


class QueryMemory:
    """Arrival and SLO of recent queries, so that all calls of a query agree.

    Args:
        limit: Most queries remembered; the least recently used is forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[str, tuple[float, float | None]] = OrderedDict()

    def arrival_s(self, query_id: str) -> float | None:
        """Return when the query arrived, mesh clock, when known."""
        found = self._known.get(query_id)
        return found[0] if found else None

    def slo_s(self, query_id: str) -> float | None:
        """Return the SLO that the mesh chose for the query, seconds, when it did."""
        found = self._known.get(query_id)
        return found[1] if found else None

    def remember(self, query_id: str, arrival_s: float, slo_s: float | None = None) -> None:
        """Keep a query's arrival, and the SLO where the mesh chose it."""
        if not query_id:
            return
        known = self._known.pop(query_id, None)
        self._known[query_id] = (arrival_s, slo_s if slo_s is not None else known and known[1])
        if len(self._known) > self._limit:
            self._known.popitem(last=False)


class Intake:
    """Reads and checks calls.

    Args:
        clock: Turns append times into mesh time.
        params: Bounds.
        metrics: Counts what is not believed.
        memory: Arrivals of recent queries.
    """

    def __init__(
        self, clock: Clock, params: DispatcherParams, metrics: Metrics, memory: QueryMemory
    ) -> None:
        self._clock = clock
        self._params = params
        self._metrics = metrics
        self._memory = memory
        self.reply_partitions: Mapping[str, int] = {}

    def read(self, record: Record) -> StageRequest | Refusal:
        """Return the call in a record with `ready_at_s` and `arrival_s` filled in, or a refusal."""
        try:
            request = decode(record.value or b"", StageRequest)
        except ContractError as exc:
            return Refusal(error=exc, address=return_address(record.value or b""), bury=True)
        address = ReturnAddress(
            request_id=request.request_id,
            query_id=request.effective_query_id,
            reply_to=request.reply_to,
            attempt=request.attempt,
        )
        nowhere = self._nowhere(request)
        if nowhere:
            return Refusal(
                error=InvalidCall(nowhere),
                address=None,
                bury=True,
                retry_topics=request.reply_to.topic in self._params.reply_topics,
            )
        wrong = what_is_wrong(request)
        if wrong:
            return Refusal(error=InvalidCall(wrong), address=address, bury=False)
        return self._timed(request, self._clock.mesh_s(record.append_unix_s))

    def _nowhere(self, request: StageRequest) -> str:
        reply_to = request.reply_to
        if reply_to.topic not in self._params.reply_topics:
            return f"reply_to.topic {reply_to.topic!r} takes no outcomes"
        count = self.reply_partitions.get(reply_to.topic, 0)
        if reply_to.partition >= count:
            return f"reply_to.partition {reply_to.partition} where {reply_to.topic} has {count}"
        return ""

    def _timed(self, request: StageRequest, appended_s: float) -> StageRequest:
        if request.attempt > 0 and request.ready_at_s is not None:
            return self._handed_back(request, request.ready_at_s, appended_s)
        arrival_s = self._arrival_s(request, appended_s)
        self._memory.remember(request.query_id, arrival_s)
        return msgspec.structs.replace(
            request, ready_at_s=appended_s, arrival_s=arrival_s, t_slo_s=None, slo_defaulted=False
        )

    def _handed_back(
        self, request: StageRequest, ready_at_s: float, appended_s: float
    ) -> StageRequest:
        """Keep the times of a call that travels again, within what a first attempt could claim.

        The mesh writes them, but so can a producer that says it is not the first attempt.
        """
        longest_s = self._params.max_query_age_s
        ready_s = min(max(ready_at_s, appended_s - longest_s), appended_s)
        arrival_s = ready_s if request.arrival_s is None else request.arrival_s
        t_slo_s = request.t_slo_s
        if t_slo_s is not None and request.slo_s is not None:
            t_slo_s = min(max(t_slo_s, -longest_s), request.slo_s)
        return msgspec.structs.replace(
            request,
            ready_at_s=ready_s,
            arrival_s=min(max(arrival_s, ready_s - longest_s), ready_s),
            t_slo_s=t_slo_s,
        )

    def _arrival_s(self, request: StageRequest, ready_at_s: float) -> float:
        claimed_s = request.arrival_s
        skew_s = self._params.max_skew_s * self._clock.time_scale
        if claimed_s is not None and claimed_s > ready_at_s + skew_s:
            self._metrics.arrivals_refused.add(cause="future")
        elif claimed_s is not None and claimed_s < ready_at_s - self._params.max_query_age_s:
            self._metrics.arrivals_refused.add(cause="past")
        elif claimed_s is not None:
            return min(claimed_s, ready_at_s)
        known_s = self._memory.arrival_s(request.query_id)
        return ready_at_s if known_s is None else min(known_s, ready_at_s)


def what_is_wrong(request: StageRequest) -> str:
    """Return why a readable call asks for something impossible, or an empty text."""
    if request.prompt is not None and request.messages is not None:
        return "both prompt and messages; give one of them"
    if not request.prompt and not request.messages:
        return "neither prompt nor messages"
    if len(request.prefix) > MAX_PREFIX_PARTS:
        return f"prefix has {len(request.prefix)} parts, at most {MAX_PREFIX_PARTS} are read"
    return ""
