"""Recent queries, rebuilt from latency events alone.

Fed events, asked for queries. Pure. What cannot be true is left out and counted, by cause; nothing
a producer claims is believed where the mesh's own instants say otherwise (`think_s` is at most the
gap that was seen between the parents' ends and the call).
"""

from collections import OrderedDict
from collections.abc import Collection
from itertools import pairwise

from shared.contracts.messages import LatencyEvent
from shared.domain.trace import PrefixPart, TraceCall, TraceQuery, TraceStage
from shared.scheduling.attainment import QueryEnd

MAX_PLAUSIBLE_S = 30 * 86_400.0
MAX_QUERY_CALLS = 10_000
CLOCK_TOLERANCE_S = 1.0
SURELY_LAST = 0.98
LEAST_SEEN = 10
QUIET_FACTOR = 2.0

StageKey = tuple[str, int]


class QueryRecord:
    """What is known of one query.

    Args:
        first: The first event seen of it.
        offset: That event's offset.
    """

    def __init__(self, first: LatencyEvent, offset: int) -> None:
        self.query_id = first.query_id
        self.workflow = first.workflow
        self.tenant = first.tenant
        self.model = first.model
        self.arrival_s = first.arrival_s
        self.slo_s = first.slo_s
        self.first_offset = offset
        self.last_end_s = first.arrival_s
        self.failed = False
        self.calls: dict[str, LatencyEvent] = {}
        self._groups: list[tuple[StageKey, list[LatencyEvent]]] | None = None

    def add(self, event: LatencyEvent) -> None:
        """Take one ended call; a later attempt replaces an earlier one."""
        self.calls[event.request_id] = event
        self._groups = None
        self.failed = self.failed or event.kind != "completed"
        end_s = event.times.finished_at_s
        if end_s is not None:
            self.last_end_s = max(self.last_end_s, end_s)

    def groups(self) -> list[tuple[StageKey, list[LatencyEvent]]]:
        """Return the stages in the order in which they became ready, siblings sorted."""
        if self._groups is not None:
            return self._groups
        found: dict[StageKey, list[LatencyEvent]] = {}
        for event in self.calls.values():
            found.setdefault((event.stage, event.iteration), []).append(event)
        for events in found.values():
            events.sort(key=_sibling)
        self._groups = sorted(found.items(), key=lambda item: (min(map(ready_s, item[1])), item[0]))
        return self._groups

    def missing_siblings(self) -> int:
        """Return how many announced siblings have not ended yet."""
        return sum(
            max(0, max(event.siblings for event in events) - len(events))
            for _, events in self.groups()
        )

    def last_stage(self) -> StageKey:
        """Return the stage that became ready last."""
        return self.groups()[-1][0]

    def end(self) -> QueryEnd:
        """Return how the query ended, as far as its events tell."""
        return QueryEnd(
            arrival_s=self.arrival_s,
            end_s=self.last_end_s,
            slo_s=self.slo_s,
            completed=not self.failed,
        )

    def trace(self) -> TraceQuery:
        """Return the query's structure and lengths for a replay."""
        groups = self.groups()
        index_of = {
            event.request_id: index for index, (_, events) in enumerate(groups) for event in events
        }
        return TraceQuery(
            query_id=self.query_id,
            workflow=self.workflow,
            tenant=self.tenant,
            model=self.model,
            arrival_s=self.arrival_s,
            slo_s=self.slo_s,
            stages=tuple(
                TraceStage(
                    stage=stage,
                    iteration=iteration,
                    think_s=min(self._think_s(event) for event in events),
                    parents=_parents(events, index, index_of),
                    calls=tuple(_call(event) for event in events),
                )
                for index, ((stage, iteration), events) in enumerate(groups)
            ),
        )

    def parents_end_s(self, event: LatencyEvent) -> float | None:
        """Return when the last of a call's parents ended, mesh clock; None: not known."""
        parents = [self.calls.get(request_id) for request_id in event.parents]
        ends = [
            parent.times.finished_at_s
            for parent in parents
            if parent is not None and parent.times.finished_at_s is not None
        ]
        return max(ends, default=None)

    def _think_s(self, event: LatencyEvent) -> float:
        ends_s = self.parents_end_s(event)
        since_s = self.arrival_s if ends_s is None else ends_s
        return max(0.0, min(event.think_s, ready_s(event) - since_s))


def ready_s(event: LatencyEvent) -> float:
    """Return when a call became ready, mesh clock."""
    return event.times.ready_at_s if event.times.ready_at_s is not None else event.arrival_s


def _sibling(event: LatencyEvent) -> int:
    return event.sibling


def _parents(
    events: list[LatencyEvent], index: int, index_of: dict[str, int]
) -> tuple[int, ...] | None:
    """Return the parents' indices where they are no plain chain."""
    named = {request_id for event in events for request_id in event.parents}
    found = tuple(sorted({index_of[one] for one in named if one in index_of}))
    if not found or found == (index - 1,) or found[-1] >= index:
        return None
    return found


def _call(event: LatencyEvent) -> TraceCall:
    input_tokens = max(1, event.usage.input_tokens)
    chain: list[PrefixPart] = []
    left = input_tokens
    for part in event.prefix:
        if part.tokens > left:
            break  # claims more than the prompt holds
        chain.append(part)
        left -= part.tokens
    return TraceCall(
        input_tokens=input_tokens,
        output_tokens=max(1, event.usage.output_tokens),
        prefix=tuple(chain),
    )


def implausible(event: LatencyEvent, now_s: float | None = None) -> str | None:
    """Return why an event cannot be true, or None.

    Clocks jump and producers lie; what is impossible is counted and left out.

    Args:
        event: The event.
        now_s: Present instant, mesh clock; None: unknown.
    """
    times = event.times
    if event.slo_s <= 0 or event.arrival_s < 0:
        return "arrival_or_slo"
    order = [times.ready_at_s, times.started_at_s, times.first_token_at_s, times.finished_at_s]
    known = [at for at in order if at is not None]
    if any(later < earlier - CLOCK_TOLERANCE_S for earlier, later in pairwise(known)):
        return "time_runs_backwards"
    if known and not 0.0 <= known[-1] - event.arrival_s + CLOCK_TOLERANCE_S <= MAX_PLAUSIBLE_S:
        return "duration"
    if now_s is not None and max([event.arrival_s, *known]) > now_s + 60.0:
        return "future"
    if event.kind == "completed" and event.usage.output_tokens < 1:
        return "usage"
    return None


class Window:
    """The most recent queries, bounded in number.

    Args:
        max_queries: Most queries remembered; the oldest are dropped.
    """

    def __init__(self, max_queries: int) -> None:
        self._max_queries = max_queries
        self._queries: OrderedDict[str, QueryRecord] = OrderedDict()
        self.num_implausible: dict[str, int] = {}
        self.num_duplicates = 0

    def __len__(self) -> int:
        return len(self._queries)

    def add(
        self,
        event: LatencyEvent,
        offset: int,
        *,
        now_s: float | None = None,
        instances: Collection[str] | None = None,
    ) -> str | None:
        """Take one event; returns None, or why it was left out.

        Args:
            event: The event.
            offset: Its offset.
            now_s: Present instant, mesh clock; None: unknown.
            instances: Instances that ever were; None: not known.
        """
        fault = self._fault(event, now_s, instances)
        if fault is not None:
            self.num_implausible[fault] = self.num_implausible.get(fault, 0) + 1
            return fault
        record = self._queries.get(event.query_id)
        known = record.calls.get(event.request_id) if record is not None else None
        if known is not None and known.attempt >= event.attempt:
            self.num_duplicates += 1
            return "duplicate"
        if record is None:
            record = self._queries[event.query_id] = QueryRecord(event, offset)
        record.add(event)
        while len(self._queries) > self._max_queries:
            self._queries.popitem(last=False)
        return None

    def _fault(
        self, event: LatencyEvent, now_s: float | None, instances: Collection[str] | None
    ) -> str | None:
        fault = implausible(event, now_s)
        if fault is not None:
            return fault
        if instances is not None and event.instance_id and event.instance_id not in instances:
            return "unknown_instance"
        record = self._queries.get(event.query_id)
        if record is None:
            return None
        if (event.tenant, event.model) != (record.tenant, record.model):
            return "two_owners"
        return "too_many_calls" if len(record.calls) >= MAX_QUERY_CALLS else None

    def oldest_offset(self) -> int | None:
        """Return the first offset the window rests on: commit it, and a restart rebuilds it."""
        return min((record.first_offset for record in self._queries.values()), default=None)

    def records(self) -> list[QueryRecord]:
        """Return every query, oldest first."""
        return list(self._queries.values())

    def ended(self, now_s: float, quiet_s: float) -> list[QueryRecord]:
        """Return the queries taken to have ended, see `split`."""
        return self.split(now_s, quiet_s)[0]

    def split(self, now_s: float, quiet_s: float) -> tuple[list[QueryRecord], list[QueryRecord]]:
        """Return the queries taken to have ended, and those still running.

        A query has no end mark on this topic. It counts as ended when a call of it failed, or when
        all announced siblings are in and nothing more has come for `quiet_s`, or for twice the
        longest response of a call in the window where that is more (under overload the next call
        waits long); and at once after a stage that was the last one nearly always.
        """
        quiet_s = max(quiet_s, QUIET_FACTOR * self._slow_response_s())
        silent = [record for record in self._queries.values() if record.missing_siblings() == 0]
        last = _surely_last([r for r in silent if now_s - r.last_end_s >= quiet_s])
        ended: list[QueryRecord] = []
        running: list[QueryRecord] = []
        for record in self._queries.values():
            is_complete = record.missing_siblings() == 0
            is_over = now_s - record.last_end_s >= quiet_s or (
                (record.workflow, *record.last_stage()) in last
            )
            (ended if is_complete and is_over else running).append(record)
        return ended, running

    def latest_end_s(self) -> float:
        """Return the latest end of a call seen, mesh clock; 0 when there is none."""
        return max((record.last_end_s for record in self._queries.values()), default=0.0)

    def _slow_response_s(self) -> float:
        """Return the 99th percentile of the calls' times from ready to finished, seconds."""
        times = sorted(
            event.times.finished_at_s - ready_s(event)
            for record in self._queries.values()
            for event in record.calls.values()
            if event.times.finished_at_s is not None
        )
        return times[int(0.99 * (len(times) - 1))] if times else 0.0


def _surely_last(ended: list[QueryRecord]) -> set[tuple[str, str, int]]:
    """Return the stages after which queries of a workflow nearly always ended."""
    passed: dict[tuple[str, str, int], int] = {}
    final: dict[tuple[str, str, int], int] = {}
    for record in ended:
        groups = record.groups()
        for key, _ in groups:
            place = (record.workflow, *key)
            passed[place] = passed.get(place, 0) + 1
        place = (record.workflow, *groups[-1][0])
        final[place] = final.get(place, 0) + 1
    return {
        place
        for place, count in final.items()
        if passed[place] >= LEAST_SEEN and count >= SURELY_LAST * passed[place]
    }
