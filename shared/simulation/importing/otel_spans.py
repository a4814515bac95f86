"""Spans from OpenTelemetry files: OTLP/JSON and flattened spans, one JSON value after another.

Accepted, also mixed in one file:

- OTLP/JSON as the Collector's file exporter writes it: objects with `resourceSpans`, one per line
  or a single one over many lines.
- Flattened spans: one object per span, with `trace_id`, `span_id`, `parent_span_id`, `name`,
  `start_time`, `end_time` and `attributes` (an object, or spread over the span's own keys with or
  without `attributes.` in front). The Python SDK's console exporter writes such objects, with
  `context` around the ids.

Source: OTLP file exporter and OTLP/JSON encoding, opentelemetry.io/docs/specs/otel/protocol
(ids are hex, 64-bit integers may be strings).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.simulation.importing.recording import Problem
from shared.simulation.importing.values import instant_ns, read

_OTHER_SIGNALS = ("resourceMetrics", "resourceLogs")
_SCOPES = ("scopeSpans", "instrumentationLibrarySpans")
_TRACE_ID = ("trace_id", "traceId", "traceID", "context.trace_id")
_SPAN_ID = ("span_id", "spanId", "spanID", "context.span_id")
_PARENT_ID = ("parent_span_id", "parentSpanId", "parent_id")
_START = ("start_time", "startTimeUnixNano", "start_time_unix_nano", "startTime", "timestamp")
_END = ("end_time", "endTimeUnixNano", "end_time_unix_nano", "endTime")
_NAME = ("name", "span_name")
_STATUS = ("status.code", "status.status_code", "status_code", "status")
_ERROR_CODES = ("2", "ERROR", "STATUS_CODE_ERROR", "StatusCode.ERROR")
_MAX_DEPTH = 32


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One span.

    Attributes:
        place: Where it stands, for messages.
        trace_id: Its trace.
        span_id: Itself.
        parent_id: The span around it; empty for a root.
        name: Its name.
        start_ns: Unix nanoseconds.
        end_ns: Unix nanoseconds; None when not recorded.
        attributes: Its own attributes; dotted names.
        resource: Attributes of the process it comes from.
        has_error: Whether its status is an error.
    """

    place: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int | None
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
    has_error: bool


class SpanFile(msgspec.Struct, kw_only=True):
    """What a file holds.

    Attributes:
        kinds: The forms met: `OTLP/JSON`, `flattened spans`.
        num_spans: Spans seen, unusable ones included.
        spans: The usable ones.
        problems: Lines and spans that cannot be read.
    """

    kinds: dict[str, None] = {}
    num_spans: int = 0
    spans: list[Span] = []
    problems: list[Problem] = []


def read_spans(text: str, source: str) -> SpanFile:
    """Read every span of a file.

    Raises:
        ConfigError: The file is empty.
    """
    if not text.strip():
        raise ConfigError(f"{source}: the file is empty; OTLP/JSON or spans as JSON are expected")
    found = SpanFile()
    for line, value in _json_values(text, found.problems, source):
        place = f"{source}:{line}"
        for item in value if isinstance(value, list) else [value]:
            _take(item, place, found)
    return found


def _json_values(text: str, problems: list[Problem], source: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, value); what is no JSON is listed and skipped up to the next line."""
    decoder = json.JSONDecoder()
    position, line = 0, 1
    while True:
        start = _skip_blank(text, position)
        line += text.count("\n", position, start)
        if start >= len(text):
            return
        try:
            value, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as exc:
            problems.append(Problem(f"{source}:{line}", f"not JSON: {exc}"))
            newline = text.find("\n", start)
            position = newline if newline >= 0 else len(text)
            value = None
        else:
            yield line, _without_half_characters(value, text[start:position])
        line += text.count("\n", start, position)


def _without_half_characters(value: Any, raw: str) -> Any:
    r"""Return a value whose texts can be written again: `"\ud83d"` alone is half a character."""
    if "\\ud" not in raw.lower():
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _skip_blank(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position


def _take(item: Any, place: str, found: SpanFile) -> None:
    if not isinstance(item, dict):
        found.problems.append(Problem(place, "a JSON object is expected"))
        return
    if any(signal in item for signal in _OTHER_SIGNALS):
        found.problems.append(Problem(place, "holds metrics or logs; traces are needed"))
        return
    if "resourceSpans" in item:
        found.kinds["OTLP/JSON"] = None
        _take_otlp(item, place, found)
    else:
        found.kinds["flattened spans"] = None
        resource = item.get("resource")
        inner = resource.get("attributes", resource) if isinstance(resource, dict) else {}
        _take_span(item, _attributes(inner), place, found)


def _take_otlp(item: dict[str, Any], place: str, found: SpanFile) -> None:
    for group in _objects(item.get("resourceSpans")):
        resource = group.get("resource")
        attributes = resource.get("attributes") if isinstance(resource, dict) else None
        shared = _attributes(attributes)
        for scope in (one for key in _SCOPES for one in _objects(group.get(key))):
            for span in _objects(scope.get("spans")):
                _take_span(span, shared, place, found)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _take_span(
    item: dict[str, Any], resource: Mapping[str, Any], place: str, found: SpanFile
) -> None:
    found.num_spans += 1
    fields = _flat({key: value for key, value in item.items() if key != "attributes"})
    span_id = _id(_first(fields, _SPAN_ID))
    if span_id:
        place = f"{place}, span {span_id}"
    try:
        found.spans.append(_span(item, fields, resource, span_id, place))
    except ValueError as exc:
        found.problems.append(Problem(place, str(exc)))


def _span(
    item: dict[str, Any],
    fields: dict[str, Any],
    resource: Mapping[str, Any],
    span_id: str,
    place: str,
) -> Span:
    trace_id = _id(_first(fields, _TRACE_ID))
    if not trace_id or not span_id:
        raise ValueError("no trace id or no span id: not a span")
    start_ns = _instant(fields, _START)
    end_ns = _instant(fields, _END)
    if start_ns is None:
        raise ValueError("no start time")
    if end_ns is not None and end_ns < start_ns:
        raise ValueError("ends before it starts")
    return Span(
        place=place,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=_id(_first(fields, _PARENT_ID)),
        name=str(_first(fields, _NAME) or ""),
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=_spread(fields) | _attributes(item.get("attributes")),
        resource=resource,
        has_error=str(_first(fields, _STATUS)) in _ERROR_CODES,
    )


def _instant(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if fields.get(name) not in (None, "")), None)
    if name is None:
        return None
    if "nano" not in name.lower():
        return read(instant_ns, fields[name], name)
    try:
        return int(fields[name])
    except (TypeError, ValueError):
        raise ValueError(f"{name}: {fields[name]!r:.60} is no instant") from None


def _spread(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the span's own dotted keys as attributes, without `attributes.` in front."""
    return {key.removeprefix("attributes."): value for key, value in fields.items() if "." in key}


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _id(value: Any) -> str:
    """Return an id in one spelling: lower case, no `0x`; only zeros means none."""
    text = str(value).strip().lower().removeprefix("0x") if value is not None else ""
    return text if text.strip("0") else ""


def _attributes(value: Any) -> dict[str, Any]:
    """Return attributes by dotted name: an object, or OTLP's list of keys and values."""
    if isinstance(value, dict):
        return _flat(value)
    return {
        str(pair["key"]): _otlp_value(pair.get("value"))
        for pair in _objects(value)
        if "key" in pair
    }


def _otlp_value(value: Any, depth: int = 0) -> Any:
    if not isinstance(value, dict) or not value or depth > _MAX_DEPTH:
        return None
    kind, inner = next(iter(value.items()))
    if kind == "arrayValue":
        items = _objects(inner.get("values")) if isinstance(inner, dict) else []
        return [_otlp_value(item, depth + 1) for item in items]
    if kind == "kvlistValue":
        pairs = _objects(inner.get("values")) if isinstance(inner, dict) else []
        return {str(pair.get("key")): _otlp_value(pair.get("value"), depth + 1) for pair in pairs}
    return inner


def _flat(value: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict) and depth < _MAX_DEPTH:
            flat |= _flat(inner, f"{prefix}{key}.", depth + 1)
        else:
            flat[f"{prefix}{key}"] = inner
    return flat
