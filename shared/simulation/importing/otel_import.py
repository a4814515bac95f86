"""LLM calls among OpenTelemetry spans, by the GenAI semantic conventions.

A span is a call when `gen_ai.operation.name` says so (`chat`, `text_completion`,
`generate_content`), or when it names no operation but both token counts, as vLLM's own
`llm_request` spans do. A call seen twice (by the client and, inside, by the server or another
instrumentation) counts once: the outermost span that has token counts.

Source: semantic-conventions-genai, gen-ai-spans.md; vLLM's `SpanAttributes` (older names
`gen_ai.usage.prompt_tokens` and `completion_tokens`, no model, no operation); OpenInference and
OpenLLMetry for the names they use instead.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shared.domain.trace import PrefixPart
from shared.errors import ConfigError
from shared.simulation.importing.csv_import import UNNAMED_STAGE, prefix_chain
from shared.simulation.importing.otel_spans import Span, read_spans
from shared.simulation.importing.recording import (
    MAX_NAME,
    AttributeNames,
    Problem,
    RecordedCall,
    Recording,
)
from shared.simulation.importing.values import positive_s, read, tokens

OPERATION = "gen_ai.operation.name"
CALL_OPERATIONS = frozenset({"chat", "text_completion", "generate_content", "completion"})
INPUT_TOKENS = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.prompt_tokens",
    "llm.token_count.prompt",
    "llm.usage.prompt_tokens",
)
OUTPUT_TOKENS = (
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.completion_tokens",
    "llm.token_count.completion",
    "llm.usage.completion_tokens",
)
CACHED_TOKENS = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
    "llm.token_count.prompt_details.cache_read",
)
MODEL = ("gen_ai.request.model", "gen_ai.response.model", "llm.model_name")
QUERY = ("hexflow.query_id",)
STAGE = ("hexflow.stage", "gen_ai.prompt.name")
TENANT = ("hexflow.tenant", "tenant.id", "tenant")
WORKFLOW = ("hexflow.workflow", "gen_ai.workflow.name", "traceloop.workflow.name")
SLO = ("hexflow.slo_s",)
AGENT = "gen_ai.agent.name"
SERVICE = "service.name"
PREFIX_IDS = "hexflow.prefix.ids"
PREFIX_TOKENS = "hexflow.prefix.tokens"

_Key = tuple[str, str]

# Kinds that other conventions give to spans which are no LLM calls.
_KINDS = {"openinference.span.kind": frozenset({"LLM"}), "traceloop.span.kind": frozenset({""})}
_MAX_PATH = 100
# Names of spans that say how a call was made, not what for.
_SAYS_NOTHING = re.compile(
    r"(GET|POST|PUT|PATCH|DELETE)\b.*|llm_request|invoke_(agent|workflow)"
    r"|((openai|litellm|langchain|vllm)[._ ])?(chat|text_completion|generate_content|completion)s?"
    r"([. ].*)?",
    re.IGNORECASE,
)
_AFFIX = re.compile(r"^(invoke_agent|invoke_workflow|execute_task)\s+|\.(task|agent|workflow)$")


def read_otel(
    text: str | bytes, source: str = "spans", names: AttributeNames | None = None
) -> Recording:
    """Read the LLM calls among the spans of a file.

    Args:
        text: The file's content (bytes are UTF-8).
        source: Name of the file, for messages.
        names: Attributes of your own that hold the query, stage, tenant, workflow and deadline;
            looked up on the span, then on the spans around it, then on its resource.

    Raises:
        ConfigError: The file is empty or not UTF-8.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{source}: not UTF-8: {exc}") from exc
    found = read_spans(text, source)
    recording = Recording(
        source=source,
        kind=" and ".join(found.kinds) or "spans",
        num_rows=found.num_spans,
        problems=found.problems,
    )
    _Importer(recording, found.spans, names or AttributeNames()).run()
    return recording


class _Importer:
    """Finds the calls in a set of spans."""

    def __init__(self, recording: Recording, spans: list[Span], names: AttributeNames) -> None:
        self._recording = recording
        self._names = names
        self._spans: dict[_Key, Span] = {}
        for span in spans:
            if _key(span) in self._spans:
                recording.skip("spans exported twice")
            else:
                self._spans[_key(span)] = span
        self._num_inferred_stages = 0
        self._num_without_query = 0

    def run(self) -> None:
        """Sort every span into calls, problems and what is no call."""
        counted = {key for key, span in self._spans.items() if _is_call(span) and _has_usage(span)}
        counted -= self._sums(counted)
        above_a_call: set[_Key] = set()
        inner: dict[_Key, Span] = {}
        outer: dict[_Key, _Key] = {}
        for key, span in self._spans.items():
            above = [_key(one) for one in self._around(span)]
            outermost = next((one for one in reversed(above) if one in counted), None)
            if outermost is not None:
                outer[key] = outermost
            if key in counted:
                above_a_call.update(above)
                if outermost is not None:
                    inner.setdefault(outermost, span)
        for key, span in self._spans.items():
            self._sort(span, key in counted, key in outer, key in above_a_call, inner.get(key))
        self._tell()

    def _sums(self, counted: set[_Key]) -> set[_Key]:
        """Return spans that carry the sum of several calls inside them, and name no operation."""
        num_inside: Counter[_Key] = Counter()
        for key in counted:
            above = (_key(one) for one in self._around(self._spans[key]))
            num_inside.update([one for one in above if one in counted][:1])
        return {
            key
            for key, number in num_inside.items()
            if number > 1 and OPERATION not in self._spans[key].attributes
        }

    def _sort(
        self, span: Span, is_counted: bool, is_inside: bool, is_around: bool, server: Span | None
    ) -> None:
        if is_counted and not is_inside:
            self._take(span, server)
        elif is_counted:
            self._recording.skip("calls seen again inside their own span")
        elif _is_call(span) and not is_inside and not is_around:
            self._refuse(span)
        else:
            self._recording.skip("spans that are no LLM calls")

    def _around(self, span: Span) -> Iterator[Span]:
        """Yield the known spans around a span, innermost first."""
        seen = {span.span_id}
        parent = self._spans.get((span.trace_id, span.parent_id))
        while parent is not None and parent.span_id not in seen:
            yield parent
            seen.add(parent.span_id)
            parent = self._spans.get((parent.trace_id, parent.parent_id))

    def _refuse(self, span: Span) -> None:
        error = span.attributes.get("error.type")
        failed = f"failed ({error}); " if error else "failed; " if span.has_error else ""
        missing = INPUT_TOKENS if _first(span, INPUT_TOKENS) is None else OUTPUT_TOKENS
        self._list(span, f"{failed}{missing[0]} is missing")

    def _take(self, span: Span, server: Span | None) -> None:
        try:
            self._recording.calls.append(self._call(span, server))
        except ValueError as exc:
            self._list(span, str(exc))

    def _list(self, span: Span, reason: str) -> None:
        query_id = self._query(span)[0] or span.trace_id
        self._recording.problems.append(Problem(span.place, reason, query_id[:MAX_NAME]))

    def _call(self, span: Span, server: Span | None) -> RecordedCall:
        query_id, arrival_ns = self._query(span)
        self._num_without_query += not query_id
        input_tokens = _tokens(span, INPUT_TOKENS, least=1)
        slo = self._lookup(span, self._names.slo, SLO)
        return RecordedCall(
            place=span.place,
            query_id=_fitting(query_id or span.trace_id, "the query's id"),
            start_ns=span.start_ns,
            end_ns=span.end_ns,
            stage=self._stage(span),
            input_tokens=input_tokens,
            output_tokens=_tokens(span, OUTPUT_TOKENS, least=1),
            model=_text(_first(span, MODEL) or (_first(server, MODEL) if server else None)),
            tenant=_text(self._lookup(span, self._names.tenant, TENANT)),
            workflow=_text(self._lookup(span, self._names.workflow, (*WORKFLOW, SERVICE))),
            slo_s=None if slo is None else read(positive_s, slo, self._names.slo or SLO[0]),
            query_arrival_ns=arrival_ns,
            prefix=_prefix(span, input_tokens),
            cached_tokens=_cached(span, server),
            path=self._path(span),
        )

    def _lookup(self, span: Span, own: str, known: tuple[str, ...]) -> Any:
        """Return an attribute of the span, of the nearest span around it, or of its resource."""
        keys = (own,) if own else known
        for one in (span, *self._around(span)):
            value = _first(one, keys)
            if value is not None:
                return value
        return next((span.resource[key] for key in keys if key in span.resource), None)

    def _query(self, span: Span) -> tuple[str, int]:
        """Return the query's id if it has one, and when the query arrived as far as spans tell."""
        keys = (self._names.query,) if self._names.query else QUERY
        chain = (span, *self._around(span))
        named = [one for one in chain if _first(one, keys) is not None]
        if named:
            return str(_first(named[0], keys)).strip(), named[-1].start_ns
        return "", chain[-1].start_ns

    def _stage(self, span: Span) -> str:
        given = _text(self._lookup(span, self._names.stage, STAGE))
        if given:
            return given
        self._num_inferred_stages += 1
        around = [one for one in self._around(span) if one.parent_id]
        for one in (*around, span):
            name = _text(one.attributes.get(AGENT)) or _AFFIX.sub("", one.name.strip())
            if name and not _SAYS_NOTHING.fullmatch(name):
                return name[:MAX_NAME]
        return UNNAMED_STAGE

    def _path(self, span: Span) -> tuple[str, ...]:
        around = list(self._around(span))
        unknown = (around[-1] if around else span).parent_id
        ids = [*(one.span_id for one in around), *([unknown] if unknown else [])]
        return tuple(reversed(ids))[:_MAX_PATH]

    def _tell(self) -> None:
        notes = self._recording.notes
        if self._num_inferred_stages:
            notes.append(
                f"stage of {self._num_inferred_stages} calls: from the agent or span around them, "
                f"else their own name, else {UNNAMED_STAGE!r}"
            )
        if self._num_without_query:
            missing = f"{self._names.query} is missing" if self._names.query else "no query id"
            notes.append(f"{missing} on {self._num_without_query} calls: grouped by trace id")


def _is_call(span: Span) -> bool:
    operation = span.attributes.get(OPERATION)
    if operation is not None:
        return str(operation).lower() in CALL_OPERATIONS
    for key, kinds in _KINDS.items():
        if key in span.attributes and str(span.attributes[key]) not in kinds:
            return False
    return _has_usage(span)


def _has_usage(span: Span) -> bool:
    return _first(span, INPUT_TOKENS) is not None and _first(span, OUTPUT_TOKENS) is not None


def _first(span: Span, names: tuple[str, ...]) -> Any:
    return next((span.attributes[name] for name in names if _is_set(span.attributes, name)), None)


def _is_set(attributes: Mapping[str, Any], name: str) -> bool:
    return attributes.get(name) not in (None, "")


def _key(span: Span) -> _Key:
    return (span.trace_id, span.span_id)


def _fitting(text: str, what: str) -> str:
    if len(text) > MAX_NAME:
        raise ValueError(f"{what} is longer than {MAX_NAME} characters")
    return text


def _text(value: Any) -> str:
    return str(value).strip()[:MAX_NAME] if value is not None else ""


def _tokens(span: Span, names: tuple[str, ...], *, least: int) -> int:
    name = next(name for name in names if _is_set(span.attributes, name))
    return read(lambda value: tokens(value, least=least), span.attributes[name], name)


def _cached(span: Span, server: Span | None) -> int | None:
    for one in (span, server):
        if one is not None and _first(one, CACHED_TOKENS) is not None:
            return _tokens(one, CACHED_TOKENS, least=0)
    return None


def _prefix(span: Span, input_tokens: int) -> tuple[PrefixPart, ...]:
    ids, lengths = span.attributes.get(PREFIX_IDS), span.attributes.get(PREFIX_TOKENS)
    if not isinstance(ids, list) or not isinstance(lengths, list):
        return ()
    if len(ids) != len(lengths):
        raise ValueError(f"{PREFIX_IDS} and {PREFIX_TOKENS} differ in length")
    return prefix_chain([str(one) for one in ids], lengths, input_tokens)
