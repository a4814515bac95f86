"""What the readers hand to the assembler, and what comes out of it."""

import msgspec

from shared.domain.trace import PrefixPart, TraceQuery

MAX_NAME = 128
NS_PER_S = 1_000_000_000


class AttributeNames(msgspec.Struct, frozen=True, kw_only=True):
    """Where to look for what: names of span attributes, or of columns of a table.

    Attributes:
        query: Groups calls into queries; empty: the built-in names, else the trace id.
        stage: Names the stage; empty: the built-in names, else inferred.
        tenant: Names who asks; empty: the built-in names.
        workflow: Names the kind of query; empty: the built-in names.
        slo: Holds the query's deadline relative to its arrival, seconds; empty: built-in names.
    """

    query: str = ""
    stage: str = ""
    tenant: str = ""
    workflow: str = ""
    slo: str = ""


class Problem(msgspec.Struct, frozen=True):
    """A row or span that could not be used.

    Attributes:
        place: Where it is: file, line, span.
        reason: What is wrong with it.
        query_id: The query it belonged to, when that could still be read.
    """

    place: str
    reason: str
    query_id: str = ""


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One LLM call as it was recorded.

    Attributes:
        place: Where it stands in the input, for messages.
        query_id: The query it belongs to.
        start_ns: When it was asked for, Unix nanoseconds (or from any common start).
        end_ns: When its last token came, same clock; None when not recorded.
        stage: Stage name.
        input_tokens: Prompt length, tokens.
        output_tokens: Generated length, tokens.
        model: Model asked for; empty when not recorded.
        tenant: Who asked; empty when not recorded.
        workflow: Kind of the query; empty when not recorded.
        slo_s: The query's deadline relative to its arrival, seconds.
        query_arrival_ns: When the query arrived; None: with its first call.
        prefix: Prefix chain, when recorded.
        cached_tokens: Prompt tokens found in a cache, when recorded.
        call_id: Name of the call within its query, when `parents` may name it.
        parents: Names of the calls it waited for; None when not recorded.
        path: Ids of the spans around it, outermost first.
    """

    place: str
    query_id: str
    start_ns: int
    end_ns: int | None
    stage: str
    input_tokens: int
    output_tokens: int
    model: str = ""
    tenant: str = ""
    workflow: str = ""
    slo_s: float | None = None
    query_arrival_ns: int | None = None
    prefix: tuple[PrefixPart, ...] = ()
    cached_tokens: int | None = None
    call_id: str = ""
    parents: tuple[str, ...] | None = None
    path: tuple[str, ...] = ()


class Recording(msgspec.Struct, kw_only=True):
    """Everything read from one input.

    Attributes:
        source: Name of the file.
        kind: What it was read as, for people.
        num_rows: Rows or spans seen.
        calls: Those that are usable LLM calls.
        problems: Those that should have been calls and are not usable.
        skipped: Why others were left out -> how many.
        notes: What was inferred while reading, one sentence each.
    """

    source: str
    kind: str
    num_rows: int = 0
    calls: list[RecordedCall] = []
    problems: list[Problem] = []
    skipped: dict[str, int] = {}
    notes: list[str] = []

    def skip(self, why: str) -> None:
        """Count a row that is no call, and does not pretend to be one."""
        self.skipped[why] = self.skipped.get(why, 0) + 1


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What an import found, inferred and left out.

    Attributes:
        source: Name of the file.
        kind: What it was read as.
        num_rows: Rows or spans seen.
        num_queries: Queries of the trace.
        num_calls: Calls of the trace.
        num_stages: Stages of the trace.
        incomplete_queries: Queries of the trace that lack an unusable call.
        first_arrival_s: Arrival of the first query, seconds on the recording's clock.
        span_s: From the first arrival to the last, seconds.
        rate_qps: Mean arrival rate, queries per second; None for a single query.
        calls_by_model: Model -> calls.
        queries_by_tenant: Tenant -> queries.
        queries_by_workflow: Workflow -> queries.
        calls_by_stage: Stage name -> calls.
        inferred: What was not in the input and how it was filled in, one sentence each.
        warnings: What a person should look at, one sentence each.
        skipped: Why rows were left out that are no LLM calls -> how many.
        problems: Unusable rows, in the order of the input.
    """

    source: str
    kind: str
    num_rows: int
    num_queries: int
    num_calls: int
    num_stages: int
    incomplete_queries: int
    first_arrival_s: float
    span_s: float
    rate_qps: float | None
    calls_by_model: dict[str, int]
    queries_by_tenant: dict[str, int]
    queries_by_workflow: dict[str, int]
    calls_by_stage: dict[str, int]
    inferred: tuple[str, ...]
    warnings: tuple[str, ...]
    skipped: dict[str, int]
    problems: tuple[Problem, ...]


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """An import's trace and what there is to say about it.

    Attributes:
        queries: In order of arrival.
        summary: Counts, inferences, problems.
    """

    queries: tuple[TraceQuery, ...]
    summary: Summary
