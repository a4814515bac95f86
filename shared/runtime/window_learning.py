"""What the window teaches: shapes of workflows, speeds of instances, and where it must be cut.

Pure. Bounded influence: a stage's lengths are clipped at four times what is long for the median
tenant (of two: the one with the shorter calls), so a tenant that sends nonsense moves a shared
workflow's profile by a bounded amount.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median, median_low
from types import MappingProxyType

import msgspec

from shared.contracts.messages import LatencyEvent, SpeedUpdate
from shared.contracts.query_window import QueryRecord
from shared.domain.instance import InstanceSpec
from shared.domain.profile import StageEstimate, WorkflowShape
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.scheduling.attainment import percentile
from shared.scheduling.changepoints import latest_change
from shared.scheduling.shapes import INPUTS_PER_OUTPUT, shape_from_trace
from shared.simulation.speed_fit import RanCall, SpeedRequest

CLIP = 4.0
NOTABLE = 0.1
LEAST_EXPECTED_TOKENS = 5_000

StageName = tuple[str, str]


def learned_shapes(
    queries: Sequence[TraceQuery],
    records: Iterable[QueryRecord],
    priors: Mapping[str, WorkflowShape],
) -> dict[str, WorkflowShape]:
    """Return the shape of every workflow in the window.

    Args:
        queries: The window's ended queries.
        records: The same as events, for what only the engine knows (cache hits, bytes per token).
        priors: What is expected so far.
    """
    shapes = shape_from_trace(tamed(queries), priors=priors)
    calls: dict[StageName, list[LatencyEvent]] = defaultdict(list)
    for record in records:
        for event in record.calls.values():
            if event.kind == "completed" and event.usage.input_tokens > 0:
                calls[record.workflow, event.stage].append(event)
    return {
        workflow: msgspec.structs.replace(
            shape,
            stages={
                stage: _as_measured(estimate, calls.get((workflow, stage), ()))
                for stage, estimate in shape.stages.items()
            },
        )
        for workflow, shape in shapes.items()
    }


def tamed(queries: Sequence[TraceQuery]) -> list[TraceQuery]:
    """Return the queries with lengths clipped to what is plausible for their stage."""
    lengths: dict[StageName, dict[str, list[TraceCall]]] = defaultdict(lambda: defaultdict(list))
    for query in queries:
        for stage in query.stages:
            lengths[query.workflow, stage.stage][query.tenant].extend(stage.calls)
    limits = {key: _limits(by_tenant) for key, by_tenant in lengths.items()}
    return [
        msgspec.structs.replace(
            query,
            stages=tuple(
                _clipped(stage, limits[query.workflow, stage.stage]) for stage in query.stages
            ),
        )
        for query in queries
    ]


def clipped(queries: Sequence[TraceQuery]) -> list[str]:
    """Return the queries that `tamed` changes, by id."""
    pairs = zip(queries, tamed(queries), strict=True)
    return [query.query_id for query, tame in pairs if query.stages != tame.stages]


def _limits(by_tenant: Mapping[str, Sequence[TraceCall]]) -> tuple[int, int]:
    """Return the longest prompt and output believed."""
    inputs = median_low(
        percentile([c.input_tokens for c in calls], 95) for calls in by_tenant.values()
    )
    outputs = median_low(
        percentile([c.output_tokens for c in calls], 95) for calls in by_tenant.values()
    )
    return round(CLIP * inputs), round(CLIP * outputs)


def _clipped(stage: TraceStage, limits: tuple[int, int]) -> TraceStage:
    longest_input, longest_output = limits
    if all(
        call.input_tokens <= longest_input and call.output_tokens <= longest_output
        for call in stage.calls
    ):
        return stage
    return msgspec.structs.replace(
        stage,
        calls=tuple(
            msgspec.structs.replace(
                call,
                input_tokens=min(call.input_tokens, longest_input),
                output_tokens=min(call.output_tokens, longest_output),
            )
            for call in stage.calls
        ),
    )


def _as_measured(estimate: StageEstimate, calls: Sequence[LatencyEvent]) -> StageEstimate:
    if not calls:
        return estimate
    cached = sum(event.usage.cached_tokens for event in calls) / len(calls)
    per_token = [e.prompt_bytes / e.usage.input_tokens for e in calls if e.prompt_bytes]
    return msgspec.structs.replace(
        estimate,
        cached_tokens=min(cached, estimate.input_tokens),
        bytes_per_token=median(per_token) if per_token else estimate.bytes_per_token,
    )


def is_notable(new: WorkflowShape, old: WorkflowShape | None) -> bool:
    """Return whether a shape differs by more than a tenth anywhere that matters."""
    if (
        old is None
        or set(new.stages) != set(old.stages)
        or set(new.remaining) != set(old.remaining)
    ):
        return True
    return any(
        _differs(new.stages[name].output_tokens, old.stages[name].output_tokens)
        or _differs(new.stages[name].input_tokens, old.stages[name].input_tokens)
        or _differs(
            new.stages[name].cached_tokens,
            old.stages[name].cached_tokens,
            scale=new.stages[name].input_tokens,
        )
        for name in new.stages
    ) or any(
        _differs(count, old.remaining[key].get(later, 0.0), scale=1.0)
        for key, counts in new.remaining.items()
        for later, count in counts.items()
    )


def _differs(new: float, old: float, *, scale: float = 0.0) -> bool:
    return abs(new - old) > NOTABLE * max(scale, old, 1e-9)


def speed_requests(
    records: Iterable[QueryRecord],
    fleet: Mapping[str, InstanceSpec],
    known: Mapping[str, SpeedUpdate] = MappingProxyType({}),
) -> dict[str, SpeedRequest]:
    """Return, per instance of the fleet, the calls it completed."""
    calls: dict[str, list[RanCall]] = defaultdict(list)
    for event in _completed(records):
        started_s, finished_s = event.times.started_at_s, event.times.finished_at_s
        if event.instance_id in fleet and started_s is not None and finished_s is not None:
            calls[event.instance_id].append(
                RanCall(
                    started_s=started_s,
                    finished_s=finished_s,
                    input_tokens=max(1, event.usage.input_tokens - event.usage.cached_tokens),
                    output_tokens=max(1, event.usage.output_tokens),
                )
            )
    return {
        instance_id: SpeedRequest(
            spec=fleet[instance_id],
            calls=tuple(found),
            known=known[instance_id].factor if instance_id in known else 1.0,
        )
        for instance_id, found in calls.items()
    }


def hit_factors(records: Iterable[QueryRecord]) -> dict[str, float]:
    """Return, per instance, prompt tokens found cached ÷ expected there, in [0, 1].

    What was expected is what the dispatcher's model said before any learned factor; it is rebuilt
    from the prefix chains: a prefix that an instance has seen should be cached there.
    """
    seen: dict[str, set[str]] = defaultdict(set)
    expected: dict[str, float] = defaultdict(float)
    found: dict[str, float] = defaultdict(float)
    for event in sorted(_completed(records), key=_started_s):
        known = seen[event.instance_id]
        hit = 0
        for part in event.prefix:
            if part.prefix_id not in known:
                break
            hit += part.tokens
        expected[event.instance_id] += min(hit, event.usage.input_tokens)
        found[event.instance_id] += event.usage.cached_tokens
        known.update(part.prefix_id for part in event.prefix)
    return {
        instance_id: min(1.0, found[instance_id] / total)
        for instance_id, total in expected.items()
        if total >= LEAST_EXPECTED_TOKENS
    }


def window_cut_s(
    records: Sequence[QueryRecord], running: Sequence[QueryRecord] = ()
) -> float | None:
    """Return the arrival after which rate, mix and length of queries are as they are now.

    Args:
        records: Ended queries.
        running: Those that have not ended: they have arrived, too.

    Returns:
        Mesh clock; None when nothing changed within the window.
    """
    ordered = sorted(records, key=_arrival_s)
    arrivals_s = sorted(record.arrival_s for record in [*records, *running])
    in_rate = latest_change([later - earlier for earlier, later in pairwise(arrivals_s)])
    found = [] if in_rate is None else [arrivals_s[in_rate]]
    for measure in (_work, _uncached_share):
        cut = latest_change([measure(record) for record in ordered])
        if cut is not None:
            found.append(ordered[cut].arrival_s)
    return max(found, default=None)


def _work(record: QueryRecord) -> float:
    return sum(
        event.usage.input_tokens / INPUTS_PER_OUTPUT + event.usage.output_tokens
        for event in record.calls.values()
    )


def _uncached_share(record: QueryRecord) -> float:
    total = sum(event.usage.input_tokens for event in record.calls.values())
    cached = sum(event.usage.cached_tokens for event in record.calls.values())
    return 1.0 - cached / total if total else 1.0


def _completed(records: Iterable[QueryRecord]) -> Iterable[LatencyEvent]:
    return (
        event
        for record in records
        for event in record.calls.values()
        if event.kind == "completed" and event.instance_id
    )


def _started_s(event: LatencyEvent) -> float:
    return event.times.started_at_s or 0.0


def _arrival_s(record: QueryRecord) -> float:
    return record.arrival_s
