"""Traces: recorded or generated workloads, as a tree of stages and calls.

A `TraceQuery` is one user question: its stages form a chain (or a DAG through `parents`), the
calls of one stage run in parallel. Token counts are what really happened, so a policy must never
read `output_tokens`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta


class PrefixPart(msgspec.Struct, frozen=True, array_like=True):
    """One link of a prefix chain: text shared with other calls, from the start of the prompt.

    Attributes:
        prefix_id: Identifies the text; equal ids mean equal text.
        tokens: Its length, tokens, > 0.
    """

    prefix_id: Annotated[str, Meta(min_length=1, max_length=128)]
    tokens: Annotated[int, Meta(ge=1, le=10_000_000)]


class TraceCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One LLM call of a trace.

    Attributes:
        input_tokens: Prompt length, tokens, >= 1.
        output_tokens: Generated length, tokens, >= 1 (hidden from policies).
        prefix: Prefix chain, outermost (most shared) first; sum of tokens <= input_tokens.
        model: Model this call asks for where it is not the query's; empty: the query's.
    """

    input_tokens: int
    output_tokens: int
    prefix: tuple[PrefixPart, ...] = ()
    model: str = ""


class TraceStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: calls that start together; the next stage starts when all have ended.

    Attributes:
        stage: Stage name, e.g. `generate_candidate`.
        iteration: 0-based count of this stage name's earlier occurrences in the query.
        calls: The parallel calls, at least one.
        think_s: Time between the last parent's end and this stage's start, seconds.
        parents: Indices of the earlier stages that must end first; None means the one before
            (the chain), `()` means the stage starts when the query arrives.
    """

    stage: str
    calls: tuple[TraceCall, ...]
    iteration: int = 0
    think_s: float = 0.0
    parents: tuple[int, ...] | None = None


class TraceQuery(msgspec.Struct, frozen=True, kw_only=True):
    """One query of a trace.

    Attributes:
        query_id: Unique within the trace.
        workflow: Workflow name.
        tenant: Who asks.
        model: Model its calls ask for.
        arrival_s: Arrival relative to the trace's start, seconds; None when not recorded.
        slo_s: End-to-end deadline relative to arrival, seconds; None when not recorded.
        slo_scale: SLO as a multiple of the mean isolated time; used when `slo_s` is None.
        stages: In order, at least one.
    """

    query_id: str
    stages: tuple[TraceStage, ...]
    workflow: str = "text2sql"
    tenant: str = "default"
    model: str = "default"
    arrival_s: float | None = None
    slo_s: float | None = None
    slo_scale: float | None = None

    @property
    def num_calls(self) -> int:
        """Number of LLM calls in all stages."""
        return sum(len(stage.calls) for stage in self.stages)
