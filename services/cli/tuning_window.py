"""Where `hexflow tune` takes its window from: a trace, recorded latency events, a running mesh."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from services.cli.session import MeshAccess
from services.cli.workload import read_file
from shared.contracts.codec import decode
from shared.contracts.episodes import episode
from shared.contracts.messages import LatencyEvent
from shared.contracts.query_window import QueryRecord, Window
from shared.contracts.topics import LATENCY_EVENTS
from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError, ContractError
from shared.ports import TopicPartition
from shared.runtime.window_learning import learned_shapes, speed_requests, window_cut_s
from shared.scheduling.judgement import Observed, warm_up_of
from shared.scheduling.shapes import default_shapes, shape_from_trace
from shared.simulation.speed_fit import fit_speed
from shared.simulation.window_replay import shares_of

MAX_QUERIES = 100_000
EVENT_MARK = b'"latency_event"'
FETCH_S = 1.0


class TuningWindow(msgspec.Struct, frozen=True, kw_only=True):
    """What a tuning decision rests on.

    Attributes:
        source: For people.
        queries: With arrivals.
        shapes: What the dispatcher is to expect.
        alpha: α that was in force most of the time; None: unknown.
        observed: What really happened; None for a trace.
        speed_factors: Learned per instance.
        hop_s: Time of one message, seconds.
        num_ignored: Events left out, by cause.
        num_cut: Queries left out because they arrived before a change.
    """

    source: str
    queries: tuple[TraceQuery, ...]
    shapes: dict[str, WorkflowShape]
    alpha: float | None = None
    observed: Observed | None = None
    speed_factors: dict[str, float] = {}
    hop_s: float = 0.0
    num_ignored: dict[str, int] = {}
    num_cut: int = 0


def is_window_file(path: Path) -> bool:
    """Return whether a file holds latency events, one JSON object a line."""
    return EVENT_MARK in read_file(path)[:4_096]


def read_events(path: Path) -> list[LatencyEvent]:
    """Return the latency events of a file.

    Raises:
        ConfigError: A line is no latency event; names it.
    """
    events = []
    for number, line in enumerate(read_file(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            events.append(msgspec.json.decode(line, type=LatencyEvent))
        except msgspec.MsgspecError as exc:
            raise ConfigError(f"{path}, line {number}: no latency event: {exc}") from exc
    return events


def events_text(events: Iterable[LatencyEvent]) -> bytes:
    """Return events as a window file."""
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


async def read_mesh(access: MeshAccess) -> list[LatencyEvent]:
    """Return the latency events that a mesh's broker still holds; unreadable ones are left out."""
    name = access.topics.name(LATENCY_EVENTS)
    partitions = [
        TopicPartition(name, index) for index in range(await access.broker.partitions_of(name))
    ]
    events: list[LatencyEvent] = []
    async with access.broker.partition_consumer(partitions, start="beginning") as consumer:
        while records := await consumer.fetch(timeout_s=FETCH_S):
            for record in records:
                try:
                    events.append(decode(record.value or b"", LatencyEvent))
                except ContractError:
                    continue
    return events


def window_of_events(
    events: Sequence[LatencyEvent],
    fleet: Sequence[InstanceSpec],
    source: str,
    *,
    max_queries: int = MAX_QUERIES,
    cuts: bool = True,
) -> TuningWindow:
    """Return the window that latency events make.

    Args:
        events: In the order in which they were written.
        fleet: The instances.
        source: For people.
        max_queries: Most queries, the latest are kept.
        cuts: Whether to leave out what arrived before the latest change of the workload.

    Raises:
        ConfigError: Nothing in them ended.
    """
    window = Window(max_queries)
    for offset, event in enumerate(events):
        window.add(event, offset)
    records = window.ended(window.latest_end_s() + 1e9, 0.0)
    cut_s = window_cut_s(records) if cuts else None
    kept = [record for record in records if cut_s is None or record.arrival_s >= cut_s]
    if not kept:
        raise ConfigError(f"{source}: no query has ended in it")
    found = episode(kept)
    start = warm_up_of(len(found.queries))
    return TuningWindow(
        source=source,
        queries=found.queries,
        shapes={**default_shapes(), **learned_shapes(found.queries, kept, default_shapes())},
        alpha=_usual_alpha(kept),
        observed=Observed(
            p95_s=found.percentile_s(95, start=start),
            num_queries=len(found.queries),
            shares=shares_of(found.generated_tokens),
        ),
        speed_factors=_speeds(kept, {spec.instance_id: spec for spec in fleet}),
        hop_s=found.hop_s,
        num_ignored=window.num_implausible,
        num_cut=len(records) - len(kept),
    )


def window_of_trace(queries: Sequence[TraceQuery], source: str) -> TuningWindow:
    """Return the window that a trace with arrivals makes; nothing was observed in it."""
    shapes = {**default_shapes(), **shape_from_trace(queries)}
    return TuningWindow(source=source, queries=tuple(queries), shapes=shapes)


def _usual_alpha(records: Iterable[QueryRecord]) -> float | None:
    alphas = Counter(
        event.alpha
        for record in records
        for event in record.calls.values()
        if event.alpha is not None
    )
    return alphas.most_common(1)[0][0] if alphas else None


def _speeds(records: Sequence[QueryRecord], fleet: Mapping[str, InstanceSpec]) -> dict[str, float]:
    fits = {
        instance_id: fit_speed(request.spec, request.calls)
        for instance_id, request in speed_requests(records, fleet).items()
    }
    return {instance_id: fit.factor for instance_id, fit in fits.items() if fit is not None}
