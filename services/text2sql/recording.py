"""Runs as traces: what `hexflow simulate` and `hexflow compare` replay."""

from collections.abc import Iterable, Sequence

from shared.contracts.messages import QueryCall, QueryResult
from shared.domain.trace import PrefixPart, TraceCall, TraceQuery, TraceStage


def trace_of(results: Iterable[QueryResult]) -> list[TraceQuery]:
    """Return the queries of results that made calls, in order of arrival.

    Only completed calls are in it: their lengths are known. Arrivals are relative to the first.
    """
    found = sorted((one for one in results if _completed(one)), key=lambda one: one.arrival_s)
    start_s = found[0].arrival_s if found else 0.0
    return [
        TraceQuery(
            query_id=one.query_id,
            workflow=one.workflow,
            tenant=one.tenant,
            model=one.model or "default",
            arrival_s=one.arrival_s - start_s,
            slo_s=one.slo_s or None,
            stages=_stages(_completed(one)),
        )
        for one in found
    ]


def _completed(result: QueryResult) -> list[QueryCall]:
    return [call for call in result.calls if call.kind == "completed"]


def _stages(calls: Sequence[QueryCall]) -> tuple[TraceStage, ...]:
    groups: dict[tuple[str, int], list[QueryCall]] = {}
    for call in calls:
        groups.setdefault((call.stage, call.iteration), []).append(call)
    place = {call.request_id: n for n, group in enumerate(groups.values()) for call in group}
    found = []
    for index, ((stage, iteration), group) in enumerate(groups.items()):
        named = {place[one] for call in group for one in call.parents if one in place}
        parents = tuple(sorted(one for one in named if one < index))
        found.append(
            TraceStage(
                stage=stage,
                iteration=iteration,
                calls=tuple(_call(call) for call in sorted(group, key=lambda one: one.sibling)),
                think_s=min(call.think_s for call in group),
                parents=None if parents == (index - 1,) else parents,
            )
        )
    return tuple(found)


def _call(call: QueryCall) -> TraceCall:
    input_tokens = max(1, call.usage.input_tokens)
    return TraceCall(
        input_tokens=input_tokens,
        output_tokens=max(1, call.usage.output_tokens),
        prefix=_fitting(call.prefix, input_tokens),
    )


def _fitting(prefix: Sequence[PrefixPart], input_tokens: int) -> tuple[PrefixPart, ...]:
    """Return the part of a chain that the prompt can hold: its lengths were estimates."""
    kept, left = [], input_tokens
    for part in prefix:
        left -= part.tokens
        if left < 0:
            break
        kept.append(part)
    return tuple(kept)
