"""Calls → queries: grouping, structure, think times, prefixes, and an account of all of it."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError
from shared.simulation.importing.prefixes import infer_prefixes
from shared.simulation.importing.recording import (
    NS_PER_S,
    Imported,
    RecordedCall,
    Recording,
    Summary,
)
from shared.simulation.importing.structure import Structure, find_structure, group_stages

NO_NAME = "default"
MANY_STAGES = 50
SHOWN_PROBLEMS = 3


class _Tally(msgspec.Struct):
    """What was met while assembling, to be told once at the end."""

    sources: Counter[str]
    faults: list[str]
    num_early: int = 0
    num_mixed_models: int = 0
    num_without_model: int = 0
    num_conflicting: int = 0


def assemble(
    recording: Recording,
    *,
    model: str | None = None,
    tolerance_s: float = 0.0,
    with_prefixes: bool = True,
) -> Imported:
    """Return the trace that a recording holds.

    Args:
        recording: What was read.
        model: Model that every call shall ask for; None: the recorded one.
        tolerance_s: Overlap up to which two calls still count as one after the other, seconds.
        with_prefixes: Whether to infer shared prefixes from cached token counts.

    Raises:
        ConfigError: The recording has no usable call; says what was wrong with the first ones.
    """
    if not recording.calls:
        raise _nothing(recording)
    calls, prefix_notes = recording.calls, list[str]()
    if with_prefixes:
        calls, prefix_notes = infer_prefixes(calls)
    tally = _Tally(Counter(), [])
    groups: dict[str, list[RecordedCall]] = {}
    for call in calls:
        groups.setdefault(call.query_id, []).append(call)
    arrivals_ns = {query_id: _arrival_ns(group) for query_id, group in groups.items()}
    base_ns = min(arrivals_ns.values())
    queries = []
    for query_id in sorted(groups, key=lambda query_id: (arrivals_ns[query_id], query_id)):
        structure = find_structure(groups[query_id], round(tolerance_s * NS_PER_S))
        queries.append(_query(structure, arrivals_ns[query_id], base_ns, model, tally))
    summary = _summarise(recording, queries, base_ns, tally, prefix_notes, model)
    return Imported(queries=tuple(queries), summary=summary)


def _nothing(recording: Recording) -> ConfigError:
    parts = [f"{recording.source}: no usable LLM call in {recording.num_rows} rows or spans"]
    parts += [f"{why}: {count}" for why, count in recording.skipped.items()]
    parts += [f"{one.place}: {one.reason}" for one in recording.problems[:SHOWN_PROBLEMS]]
    return ConfigError("; ".join(parts))


def _arrival_ns(calls: Sequence[RecordedCall]) -> int:
    given = [call.query_arrival_ns for call in calls if call.query_arrival_ns is not None]
    return min([*given, *(call.start_ns for call in calls)])


def _query(
    structure: Structure, arrival_ns: int, base_ns: int, model: str | None, tally: _Tally
) -> TraceQuery:
    calls = structure.calls
    tally.sources[structure.source] += 1
    tally.faults += structure.faults
    own_model = model if model is not None else _query_model(calls, tally)
    return TraceQuery(
        query_id=calls[0].query_id,
        workflow=_one_of((call.workflow for call in calls), tally) or NO_NAME,
        tenant=_one_of((call.tenant for call in calls), tally) or NO_NAME,
        model=own_model,
        arrival_s=_seconds(arrival_ns - base_ns),
        slo_s=next((call.slo_s for call in calls if call.slo_s is not None), None),
        stages=_stages(structure, arrival_ns, own_model if model is None else None, tally),
    )


def _query_model(calls: Sequence[RecordedCall], tally: _Tally) -> str:
    models = Counter(call.model for call in calls if call.model)
    tally.num_without_model += sum(not call.model for call in calls)
    tally.num_mixed_models += len(models) > 1
    return models.most_common(1)[0][0] if models else NO_NAME


def _one_of(values: Iterable[str], tally: _Tally) -> str:
    """Return the first value that is not empty; calls of one query should agree."""
    found = list(dict.fromkeys(value for value in values if value))
    tally.num_conflicting += len(found) > 1
    return found[0] if found else ""


def _stages(
    structure: Structure, arrival_ns: int, query_model: str | None, tally: _Tally
) -> tuple[TraceStage, ...]:
    calls = structure.calls
    groups = group_stages(structure)
    stage_of = {index: stage for stage, group in enumerate(groups) for index in group}
    seen: Counter[str] = Counter()
    stages = []
    for number, group in enumerate(groups):
        name = calls[group[0]].stage
        parents = sorted({stage_of[parent] for parent in structure.parents[group[0]]})
        chain = [number - 1] if number else []
        stages.append(
            TraceStage(
                stage=name,
                iteration=seen[name],
                calls=tuple(_call(calls[index], query_model) for index in group),
                think_s=_think_s(structure, group, arrival_ns, tally),
                parents=None if parents == chain else tuple(parents),
            )
        )
        seen[name] += 1
    return tuple(stages)


def _call(call: RecordedCall, query_model: str | None) -> TraceCall:
    differs = query_model is not None and call.model not in ("", query_model)
    return TraceCall(
        input_tokens=call.input_tokens,
        output_tokens=call.output_tokens,
        prefix=call.prefix,
        model=call.model if differs else "",
    )


def _think_s(structure: Structure, group: list[int], arrival_ns: int, tally: _Tally) -> float:
    start_ns = min(structure.calls[index].start_ns for index in group)
    parents = structure.parents[group[0]]
    if not parents:
        return _seconds(start_ns - arrival_ns)
    ends_ns = [structure.calls[parent].end_ns for parent in parents]
    known_ns = [end_ns for end_ns in ends_ns if end_ns is not None]
    if len(known_ns) < len(ends_ns):
        return 0.0
    tally.num_early += start_ns < max(known_ns)
    return _seconds(max(0, start_ns - max(known_ns)))


def _seconds(ns: int) -> float:
    return round(ns / NS_PER_S, 6)


def _summarise(
    recording: Recording,
    queries: Sequence[TraceQuery],
    base_ns: int,
    tally: _Tally,
    prefix_notes: Sequence[str],
    model: str | None,
) -> Summary:
    stages = [stage for query in queries for stage in query.stages]
    by_stage = Counter(stage.stage for stage in stages for _ in stage.calls)
    known = {query.query_id for query in queries}
    span_s = (queries[-1].arrival_s or 0.0) - (queries[0].arrival_s or 0.0)
    return Summary(
        source=recording.source,
        kind=recording.kind,
        num_rows=recording.num_rows,
        num_queries=len(queries),
        num_calls=sum(query.num_calls for query in queries),
        num_stages=len(stages),
        incomplete_queries=len({one.query_id for one in recording.problems} & known),
        first_arrival_s=base_ns / NS_PER_S,
        span_s=round(span_s, 6),
        rate_qps=(len(queries) - 1) / span_s if span_s > 0 else None,
        calls_by_model=_calls_by_model(queries),
        queries_by_tenant=dict(Counter(query.tenant for query in queries)),
        queries_by_workflow=dict(Counter(query.workflow for query in queries)),
        calls_by_stage=dict(by_stage),
        inferred=(*recording.notes, *_inferences(tally, model), *prefix_notes),
        warnings=tuple(_warnings(tally, queries, by_stage)),
        skipped=recording.skipped,
        problems=tuple(recording.problems),
    )


def _calls_by_model(queries: Sequence[TraceQuery]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for query in queries:
        for stage in query.stages:
            counts.update(call.model or query.model for call in stage.calls)
    return dict(counts)


_SOURCES = {
    "recorded": "as recorded (parents)",
    "times": "from starts and ends: a call waits for those that had ended when it started",
    "order": "a chain in order of starts, as not all ends are known; think times are taken as 0",
}


def _inferences(tally: _Tally, model: str | None) -> list[str]:
    notes = [
        f"structure of {_count(count, 'query', 'queries')}: {_SOURCES[source]}"
        for source, count in sorted(tally.sources.items())
    ]
    if model is not None:
        notes.append(f"model {model!r} for every call, as asked")
    elif tally.num_without_model:
        calls = _count(tally.num_without_model, "call")
        notes.append(f"{calls} without a model: the query's other calls' model, else {NO_NAME!r}")
    return notes


def _warnings(tally: _Tally, queries: Sequence[TraceQuery], by_stage: Counter[str]) -> list[str]:
    warnings = []
    if len(queries) > 1 and all(query.num_calls == 1 for query in queries):
        warnings.append(
            "every query has a single call: if several belong to one query, name the attribute "
            "or column that ties them together (--query-attr)"
        )
    if len(by_stage) > MANY_STAGES:
        warnings.append(
            f"{len(by_stage)} different stage names: what is learned per stage needs few; name "
            "the attribute or column that holds them (--stage-attr)"
        )
    if tally.num_mixed_models:
        warnings.append(
            f"{_count(tally.num_mixed_models, 'query', 'queries')} with calls to several models: "
            "simulations and replays take them for calls to the query's most used one"
        )
    if tally.num_early:
        warnings.append(
            f"{_count(tally.num_early, 'stage')} started before a recorded parent had ended; "
            "think time taken as 0"
        )
    if tally.num_conflicting:
        warnings.append(
            f"{tally.num_conflicting} times the calls of one query named different tenants or "
            "workflows; the first one is taken"
        )
    shown = tally.faults[:SHOWN_PROBLEMS]
    if len(tally.faults) > len(shown):
        shown.append(f"and {len(tally.faults) - len(shown)} more parents that cannot be waited for")
    return warnings + shown


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
