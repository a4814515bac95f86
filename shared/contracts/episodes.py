"""A window as a replay wants it: queries in order of arrival, ended or completed conditionally.

Only arrivals, structure, lengths and think times are taken; recorded call times depend on the α
that produced them. A query that has not ended yet borrows its remainder from a query of the same
workflow that went through the same stage, drawn at random; it counts as censored: it has taken
*more than* it has taken so far.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from shared.contracts.messages import LatencyEvent
from shared.contracts.query_window import QueryRecord, ready_s
from shared.domain.trace import TraceQuery, TraceStage
from shared.scheduling.attainment import QueryEnd
from shared.scheduling.censoring import censored_percentile

Place = tuple[str, str, int]
Donors = Mapping[Place, Sequence[tuple[TraceQuery, int]]]


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """Queries of the window in order of arrival, ready for a replay.

    Attributes:
        queries: With arrivals relative to the first one.
        ends: How each ended in reality; for one still running, where it stands.
        is_censored: Which of them are still running.
        generated_tokens: instance_id -> tokens it generated for these queries.
        hop_s: Time of one message between services as seen, seconds.
        origin_s: When the first query arrived, mesh clock.
    """

    queries: tuple[TraceQuery, ...]
    ends: tuple[QueryEnd, ...]
    is_censored: tuple[bool, ...] = ()
    generated_tokens: dict[str, int] = {}
    hop_s: float = 0.0
    origin_s: float = 0.0

    def percentile_s(self, percent: float, *, start: int = 0) -> float:
        """Return a percentile of the observed end-to-end times, seconds; NaN when none ended.

        Args:
            percent: In (0, 100].
            start: How many of the first queries are left out.
        """
        flags = self.is_censored or (False,) * len(self.ends)
        pairs = list(zip(self.ends, flags, strict=True))[start:]
        return censored_percentile(
            [end.latency_s for end, censored in pairs if end.completed and not censored],
            [end.latency_s for end, censored in pairs if censored],
            percent,
        )

    @property
    def attainment(self) -> float:
        """Share of the ended queries that were answered within their SLO, in [0, 1]."""
        flags = self.is_censored or (False,) * len(self.ends)
        ended = [end for end, censored in zip(self.ends, flags, strict=True) if not censored]
        return sum(end.met for end in ended) / len(ended) if ended else 0.0


def episode(
    ended: Iterable[QueryRecord],
    running: Iterable[QueryRecord] = (),
    *,
    now_s: float = 0.0,
    seed: int = 0,
) -> Episode:
    """Return a replayable episode.

    Args:
        ended: Queries that ended.
        running: Queries that did not; their remainder is drawn.
        now_s: Present instant, mesh clock.
        seed: Of the draws.
    """
    done = list(ended)
    traces = {record.query_id: record.trace() for record in done}
    donors = _donors(traces.values())
    rng = np.random.default_rng(seed)
    open_ids = set()
    for record in running:
        completed = _completed(record, donors, rng)
        if completed is not None:
            traces[record.query_id] = completed
            open_ids.add(record.query_id)
            done.append(record)
    done.sort(key=lambda record: (record.arrival_s, record.query_id))
    origin_s = done[0].arrival_s if done else 0.0
    return Episode(
        queries=tuple(
            msgspec.structs.replace(traces[record.query_id], arrival_s=record.arrival_s - origin_s)
            for record in done
        ),
        ends=tuple(
            msgspec.structs.replace(record.end(), end_s=max(now_s, record.last_end_s))
            if record.query_id in open_ids
            else record.end()
            for record in done
        ),
        is_censored=tuple(record.query_id in open_ids for record in done),
        generated_tokens=_generated_tokens(done),
        hop_s=_hop_s(done),
        origin_s=origin_s,
    )


def _donors(traces: Iterable[TraceQuery]) -> Donors:
    found: dict[Place, list[tuple[TraceQuery, int]]] = defaultdict(list)
    for trace in traces:
        for index, stage in enumerate(trace.stages):
            found[trace.workflow, stage.stage, stage.iteration].append((trace, index))
    return found


def _completed(record: QueryRecord, donors: Donors, rng: np.random.Generator) -> TraceQuery | None:
    """Return a running query with a drawn remainder; None where nobody went the same way."""
    trace = record.trace()
    last = trace.stages[-1]
    choices = donors.get((record.workflow, last.stage, last.iteration), ())
    if not choices:
        return None
    donor, index = choices[int(rng.integers(len(choices)))]
    announced = max(event.siblings for event in record.groups()[-1][1])
    stages = [*trace.stages[:-1], _filled(last, announced, donor.stages[index])]
    rest = [msgspec.structs.replace(stage, parents=None) for stage in donor.stages[index + 1 :]]
    return msgspec.structs.replace(trace, stages=(*stages, *rest))


def _filled(stage: TraceStage, announced: int, donor: TraceStage) -> TraceStage:
    """Return a stage with the siblings that have not ended yet, lengths as the donor's."""
    missing = max(0, announced - len(stage.calls))
    extra = tuple(donor.calls[place % len(donor.calls)] for place in range(missing))
    return msgspec.structs.replace(stage, calls=(*stage.calls, *extra))


def _generated_tokens(records: Iterable[QueryRecord]) -> dict[str, int]:
    generated: dict[str, int] = {}
    for event in _events(records):
        if event.instance_id:
            tokens = generated.get(event.instance_id, 0) + event.usage.output_tokens
            generated[event.instance_id] = tokens
    return generated


def _hop_s(records: Sequence[QueryRecord]) -> float:
    """Return what one message between services takes, seconds.

    A stage costs three: its parents' outcomes to the producer and back as a request, the request
    to a dispatcher, the bound call to its instance. The medians of what was seen, divided by three.
    """
    legs: tuple[list[float], list[float], list[float]] = ([], [], [])
    for record in records:
        for event in record.calls.values():
            times, ready = event.times, ready_s(event)
            ends_s = record.parents_end_s(event)
            if ends_s is not None:
                legs[0].append(max(0.0, ready - ends_s - max(0.0, event.think_s)))
            if times.dispatched_at_s is not None:
                legs[1].append(max(0.0, times.dispatched_at_s - ready))
                if times.queued_at_s is not None:
                    legs[2].append(max(0.0, times.queued_at_s - times.dispatched_at_s))
    return sum(float(np.median(leg)) for leg in legs if leg) / len(legs)


def _events(records: Iterable[QueryRecord]) -> Iterable[LatencyEvent]:
    return (event for record in records for event in record.calls.values())
