"""The tuner's memory: recent queries, rebuilt from latency events alone.

Pure: it is fed events and asked for queries. Only arrivals, structure, lengths and think times
are taken for a replay; recorded call times depend on the α that produced them.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from shared.contracts.messages import LatencyEvent
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.scheduling.attainment import QueryEnd

MAX_PLAUSIBLE_S = 30 * 86_400.0


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

    def add(self, event: LatencyEvent) -> None:
        """Take one ended call; a later attempt replaces an earlier one."""
        self.calls[event.request_id] = event
        self.failed = self.failed or event.kind != "completed"
        end_s = event.times.finished_at_s
        if end_s is not None:
            self.last_end_s = max(self.last_end_s, end_s)

    def missing_siblings(self) -> int:
        """Return how many announced siblings have not ended yet."""
        seen: dict[tuple[str, int], int] = {}
        wanted: dict[tuple[str, int], int] = {}
        for event in self.calls.values():
            key = (event.stage, event.iteration)
            seen[key] = seen.get(key, 0) + 1
            wanted[key] = max(wanted.get(key, 0), event.siblings)
        return sum(max(0, wanted[key] - count) for key, count in seen.items())

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
        groups: dict[tuple[str, int], list[LatencyEvent]] = {}
        for event in self.calls.values():
            groups.setdefault((event.stage, event.iteration), []).append(event)
        ordered = sorted(groups.items(), key=lambda item: min(map(_ready_s, item[1])))
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
                    think_s=max(event.think_s for event in events),
                    calls=tuple(_call(event) for event in sorted(events, key=_sibling)),
                )
                for (stage, iteration), events in ordered
            ),
        )


def _ready_s(event: LatencyEvent) -> float:
    return event.times.ready_at_s if event.times.ready_at_s is not None else event.arrival_s


def _sibling(event: LatencyEvent) -> int:
    return event.sibling


def _call(event: LatencyEvent) -> TraceCall:
    return TraceCall(
        input_tokens=max(1, event.usage.input_tokens),
        output_tokens=max(1, event.usage.output_tokens),
        prefix=event.prefix,
    )


def implausible(event: LatencyEvent) -> str | None:
    """Return why an event cannot be true, or None.

    Clocks jump and producers lie; what is impossible is counted and left out.
    """
    times = event.times
    if event.slo_s <= 0 or event.arrival_s < 0:
        return "arrival_or_slo"
    order = [times.ready_at_s, times.started_at_s, times.first_token_at_s, times.finished_at_s]
    known = [at for at in order if at is not None]
    if any(later < earlier - 1.0 for earlier, later in pairwise(known)):
        return "time_runs_backwards"
    if known and not 0.0 <= known[-1] - event.arrival_s + 1.0 <= MAX_PLAUSIBLE_S:
        return "duration"
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

    def add(self, event: LatencyEvent, offset: int) -> bool:
        """Take one event; returns False when it was left out."""
        fault = implausible(event)
        if fault is not None:
            self.num_implausible[fault] = self.num_implausible.get(fault, 0) + 1
            return False
        record = self._queries.get(event.query_id)
        if record is None:
            record = QueryRecord(event, offset)
            self._queries[event.query_id] = record
        known = record.calls.get(event.request_id)
        if known is not None and known.attempt >= event.attempt:
            self.num_duplicates += 1
            return False
        record.add(event)
        while len(self._queries) > self._max_queries:
            self._queries.popitem(last=False)
        return True

    def oldest_offset(self) -> int | None:
        """Return the first offset the window rests on: commit it, and a restart rebuilds it."""
        return min((record.first_offset for record in self._queries.values()), default=None)

    def ended(self, now_s: float, quiet_s: float) -> list[QueryRecord]:
        """Return the queries taken to have ended.

        A query has no end mark on this topic: it counts as ended when all announced siblings are
        in and nothing more has come for `quiet_s` mesh seconds.
        """
        return [
            record
            for record in self._queries.values()
            if record.missing_siblings() == 0 and now_s - record.last_end_s >= quiet_s
        ]

    def latest_end_s(self) -> float:
        """Return the latest end of a call seen, mesh clock; 0 when there is none."""
        return max((record.last_end_s for record in self._queries.values()), default=0.0)


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """Ended queries of the window in order of arrival, ready for a replay.

    Attributes:
        queries: With arrivals relative to the first one.
        ends: How each ended in reality.
        generated_tokens: instance_id -> tokens it generated for these queries.
    """

    queries: tuple[TraceQuery, ...]
    ends: tuple[QueryEnd, ...]
    generated_tokens: dict[str, int] = {}


def episode(records: Iterable[QueryRecord]) -> Episode:
    """Return a replayable episode of ended queries."""
    ordered = sorted(records, key=lambda record: (record.arrival_s, record.query_id))
    origin_s = ordered[0].arrival_s if ordered else 0.0
    return Episode(
        queries=tuple(
            msgspec.structs.replace(record.trace(), arrival_s=record.arrival_s - origin_s)
            for record in ordered
        ),
        ends=tuple(record.end() for record in ordered),
        generated_tokens=_generated_tokens(ordered),
    )


def _generated_tokens(records: Iterable[QueryRecord]) -> dict[str, int]:
    generated: dict[str, int] = {}
    for record in records:
        for event in record.calls.values():
            if event.instance_id:
                tokens = generated.get(event.instance_id, 0) + event.usage.output_tokens
                generated[event.instance_id] = tokens
    return generated
