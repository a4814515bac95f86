"""Traces in the authors' JSON form: text in, text out.

    [{"Text2SQLRequest": [{"step": "revise", "input_length": 5859, "output_length": 74}, ...]}, ...]

The form has no timestamps and no structure beyond the order of the calls: consecutive
`generate_candidate` calls form one parallel stage, and so do consecutive `evaluate` calls; every
other call is a stage of its own. Step names are mapped to stage names by one rule
(`stage_name`). Prompts share their stage's template (`shared.domain.text2sql`).

Source: the traces released with HexGen-Flow (arXiv 2505.05286).
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from shared.domain import text2sql
from shared.domain.near_names import nearest
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError

QUERY_KEY = "Text2SQLRequest"
MAX_TOKENS = 10_000_000
_SUFFIX = "_llama-agent"

STEP_OF_STAGE = {
    stage: stage for stage in text2sql.STAGES if stage != text2sql.INFORMATION_RETRIEVER
} | {
    text2sql.INFORMATION_RETRIEVER: "Information Retriever",
    text2sql.GENERATE_CANDIDATE: text2sql.GENERATE_CANDIDATE + _SUFFIX,
}


def stage_name(step: str) -> str:
    """Return the stage a step belongs to.

    Lower case, blanks become `_`, and the suffix `_llama-agent` (which names the authors' agent,
    not the stage) is dropped: `Information Retriever` is `information_retriever`.
    """
    return step.strip().lower().replace(" ", "_").removesuffix(_SUFFIX)


def parse_authors_trace(
    text: str | bytes, source_name: str = "trace", *, allow_unknown_steps: bool = False
) -> tuple[TraceQuery, ...]:
    """Read a trace in the authors' JSON form.

    Args:
        text: The file's content (bytes are UTF-8).
        source_name: Name of the file, for error messages.
        allow_unknown_steps: Take a step that is not part of the workflow as a serial stage
            instead of refusing it.

    Returns:
        Queries `q00000`, `q00001`, ... in the file's order, without arrivals and SLOs.

    Raises:
        ConfigError: Names the place (query, call, field), what is wrong and what is accepted.
    """
    data = _load_json(text, source_name)
    if not isinstance(data, list):
        raise ConfigError(f"{source_name}: expected a list of queries, found {_kind(data)}")
    if not data:
        raise ConfigError(f"{source_name}: the trace has no queries")
    return tuple(
        _parse_query(item, index, f"{source_name}: query {index}", allow_unknown_steps)
        for index, item in enumerate(data)
    )


def dump_authors_trace(queries: Iterable[TraceQuery]) -> str:
    """Write queries in the authors' JSON form (arrivals, SLOs and prefixes have no place in it)."""
    data = [
        {
            QUERY_KEY: [
                {
                    "step": STEP_OF_STAGE.get(stage.stage, stage.stage),
                    "input_length": call.input_tokens,
                    "output_length": call.output_tokens,
                }
                for stage in query.stages
                for call in stage.calls
            ]
        }
        for query in queries
    ]
    return json.dumps(data, indent=1) + "\n"


def _load_json(text: str | bytes, source_name: str) -> Any:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise ConfigError(
            f"{source_name}:{exc.lineno}:{exc.colno}: not valid JSON: {exc.msg}"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{source_name}: not valid JSON: {exc}") from exc


def _parse_query(item: Any, index: int, place: str, allow_unknown_steps: bool) -> TraceQuery:
    if not isinstance(item, dict):
        raise ConfigError(f"{place}: expected an object with {QUERY_KEY!r}, found {_kind(item)}")
    if QUERY_KEY not in item:
        raise ConfigError(f"{place}: {_missing(QUERY_KEY, item)}")
    entries = item[QUERY_KEY]
    if not isinstance(entries, list):
        raise ConfigError(f"{place}: {QUERY_KEY!r} must be a list of calls, is {_kind(entries)}")
    if not entries:
        raise ConfigError(f"{place}: the query has no calls; at least one is needed")
    calls = [
        _parse_call(entry, f"{place}, call {number}", allow_unknown_steps)
        for number, entry in enumerate(entries)
    ]
    return TraceQuery(
        query_id=f"q{index:05d}", workflow=text2sql.WORKFLOW, stages=stages_of_calls(calls)
    )


def _parse_call(entry: Any, place: str, allow_unknown_steps: bool) -> tuple[str, int, int]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: expected an object, found {_kind(entry)}")
    step = _field(entry, "step", place)
    if not isinstance(step, str) or not step.strip():
        raise ConfigError(f"{place}: 'step' must be a name, is {step!r}")
    stage = stage_name(step)
    if stage not in text2sql.STAGES and not allow_unknown_steps:
        known = ", ".join(STEP_OF_STAGE[known_stage] for known_stage in text2sql.STAGES)
        raise ConfigError(
            f"{place}: unknown step {step!r}; known steps: {known} "
            "(unknown steps can be allowed as serial stages)"
        )
    return stage, _tokens(entry, "input_length", place), _tokens(entry, "output_length", place)


def _field(entry: dict[str, Any], key: str, place: str) -> Any:
    if key not in entry:
        raise ConfigError(f"{place}: {_missing(key, entry)}")
    return entry[key]


def _tokens(entry: dict[str, Any], key: str, place: str) -> int:
    value = _field(entry, key, place)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        shown = repr(value)[:40]
        raise ConfigError(f"{place}: {key!r} must be an integer in 1..{MAX_TOKENS:,}, is {shown}")
    return value


def stages_of_calls(calls: Sequence[tuple[str, int, int]]) -> tuple[TraceStage, ...]:
    """Group calls into stages: consecutive calls of a parallel stage belong together.

    Args:
        calls: (stage, input tokens, output tokens) in order.
    """
    groups: list[tuple[str, list[tuple[int, int]]]] = []
    for stage, input_tokens, output_tokens in calls:
        if groups and groups[-1][0] == stage and stage in text2sql.PARALLEL_STAGES:
            groups[-1][1].append((input_tokens, output_tokens))
        else:
            groups.append((stage, [(input_tokens, output_tokens)]))
    return build_stages(groups)


def build_stages(
    groups: Iterable[tuple[str, Sequence[tuple[int, int]]]],
) -> tuple[TraceStage, ...]:
    """Return a chain of stages with iterations counted and template prefixes filled in.

    Args:
        groups: (stage, its siblings' (input tokens, output tokens)) in order.
    """
    seen: dict[str, int] = {}
    stages = []
    for stage, lengths in groups:
        chains = text2sql.template_chains(stage, [length for length, _ in lengths])
        calls = tuple(
            TraceCall(input_tokens=length, output_tokens=output, prefix=chain)
            for (length, output), chain in zip(lengths, chains, strict=True)
        )
        iteration = seen.get(stage, 0)
        seen[stage] = iteration + 1
        stages.append(TraceStage(stage=stage, iteration=iteration, calls=calls))
    return tuple(stages)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), repr(value)[:40])


def _missing(key: str, found: dict[str, Any]) -> str:
    near = nearest(key, found)
    hint = f"; did you mean {key!r} where it says {near!r}?" if near else ""
    return f"{key!r} is missing{hint}"
