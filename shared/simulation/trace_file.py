"""hexflow's own trace format: everything a `TraceQuery` holds, versioned, one query per line.

    {"format": "hexflow-trace", "version": 1}
    {"query_id": "q1", "workflow": "text2sql", "arrival_s": 0.4, "slo_s": 290.0, "stages": [...]}
    ...

Additions never raise the version: unknown fields are ignored and new ones have defaults.
`parse_trace` also reads the authors' JSON form, so that a reader need not know which one it has.
"""

import json
import math
from collections.abc import Iterable

import msgspec

from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError
from shared.simulation.traces import MAX_TOKENS, parse_authors_trace

FORMAT = "hexflow-trace"
VERSION = 1


class _Header(msgspec.Struct, frozen=True):
    format: str
    version: int


def dump_trace(queries: Iterable[TraceQuery]) -> str:
    """Write queries in hexflow's format, with arrivals, SLOs, parents and prefixes."""
    header = msgspec.json.encode(_Header(FORMAT, VERSION))
    lines = [header, *(msgspec.json.encode(query) for query in queries)]
    return b"\n".join([*lines, b""]).decode()


def parse_trace(
    text: str | bytes, source_name: str = "trace", *, allow_unknown_steps: bool = False
) -> tuple[TraceQuery, ...]:
    """Read a trace in hexflow's format or in the authors' JSON form.

    Args:
        text: The file's content (bytes are UTF-8).
        source_name: Name of the file, for error messages.
        allow_unknown_steps: Take unknown steps of the authors' form as serial stages.

    Raises:
        ConfigError: Names the place, what is wrong and what is accepted.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{source_name}: not UTF-8: {exc}") from exc
    if not text.lstrip().startswith("{"):
        return parse_authors_trace(text, source_name, allow_unknown_steps=allow_unknown_steps)
    return _parse_lines(text, source_name)


def _parse_lines(text: str, source_name: str) -> tuple[TraceQuery, ...]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    _check_header(lines[0][1], f"{source_name}:{lines[0][0]}")
    queries: list[TraceQuery] = []
    seen: dict[str, int] = {}
    for number, line in lines[1:]:
        place = f"{source_name}:{number}"
        query = _decode(line, place)
        _check_query(query, place)
        if query.query_id in seen:
            first = seen[query.query_id]
            raise ConfigError(f"{place}: query_id {query.query_id!r} is used on line {first} too")
        seen[query.query_id] = number
        queries.append(query)
    if not queries:
        raise ConfigError(f"{source_name}: the trace has no queries")
    return tuple(queries)


def _check_header(line: str, place: str) -> None:
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ConfigError(
            f"{place}: the first line must be "
            f"{json.dumps({'format': FORMAT, 'version': VERSION})}; {exc}"
        ) from exc
    if header.format != FORMAT:
        raise ConfigError(f"{place}: format {header.format!r} is unknown, {FORMAT!r} is read")
    if not 1 <= header.version <= VERSION:
        raise ConfigError(
            f"{place}: version {header.version} of the trace format is unknown, "
            f"up to {VERSION} is read; a newer hexflow may have written it"
        )


def _decode(line: str, place: str) -> TraceQuery:
    try:
        return msgspec.json.decode(line, type=TraceQuery)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ConfigError(f"{place}: {exc}") from exc


def _check_query(query: TraceQuery, place: str) -> None:
    if not query.query_id:
        raise ConfigError(f"{place}: 'query_id' must not be empty")
    if not query.stages:
        raise ConfigError(
            f"{place}: query {query.query_id!r} has no stages; at least one is needed"
        )
    _check_seconds(query.arrival_s, "arrival_s", place, allow_zero=True)
    _check_seconds(query.slo_s, "slo_s", place, allow_zero=False)
    _check_seconds(query.slo_scale, "slo_scale", place, allow_zero=False)
    for index, stage in enumerate(query.stages):
        _check_stage(stage, index, f"{place}, stage {index}")


def _check_stage(stage: TraceStage, index: int, place: str) -> None:
    if not stage.stage:
        raise ConfigError(f"{place}: 'stage' must not be empty")
    if not stage.calls:
        raise ConfigError(f"{place}: the stage has no calls; at least one is needed")
    if stage.iteration < 0:
        raise ConfigError(f"{place}: 'iteration' must be at least 0, is {stage.iteration}")
    _check_seconds(stage.think_s, "think_s", place, allow_zero=True)
    for parent in stage.parents or ():
        if not 0 <= parent < index:
            raise ConfigError(
                f"{place}: parent {parent} must be the index of an earlier stage (0..{index - 1})"
            )
    for sibling, call in enumerate(stage.calls):
        _check_call(call, f"{place}, call {sibling}")


def _check_call(call: TraceCall, place: str) -> None:
    for key, tokens in (("input_tokens", call.input_tokens), ("output_tokens", call.output_tokens)):
        if not 1 <= tokens <= MAX_TOKENS:
            raise ConfigError(f"{place}: {key!r} must be in 1..{MAX_TOKENS:,}, is {tokens}")
    shared_tokens = sum(part.tokens for part in call.prefix)
    if shared_tokens > call.input_tokens:
        raise ConfigError(
            f"{place}: the prefix has {shared_tokens} tokens, the whole prompt {call.input_tokens}"
        )


def _check_seconds(value: float | None, key: str, place: str, *, allow_zero: bool) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value < 0.0 or (value == 0.0 and not allow_zero):
        bound = "at least 0" if allow_zero else "above 0"
        raise ConfigError(f"{place}: {key!r} must be {bound}, is {value}")
