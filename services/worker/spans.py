"""A call's time at an instance as spans: waiting, then generating. Made when it ends.

Names and attributes of the second follow OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/).
"""

from services.worker.calls import HeldCall
from shared.contracts.messages import CallOutcome
from shared.runtime.tracing import Traces, Value


def trace_call(
    traces: Traces, held: HeldCall, outcome: CallOutcome, unix_per_mesh_s: float
) -> None:
    """Record where a call's time at this instance went.

    Args:
        traces: Where spans go.
        held: The call.
        outcome: How it ended.
        unix_per_mesh_s: Wall seconds per mesh second: the mesh clock counts from the same instant.
    """
    times = outcome.times
    if not traces.is_on or times.queued_at_s is None or times.finished_at_s is None:
        return
    left_s = times.started_at_s if times.started_at_s is not None else times.finished_at_s
    error = None if outcome.kind == "completed" else outcome.reason or outcome.kind
    waiting = traces.start(
        "queue",
        "consumer",
        held.traceparent,
        at_unix_s=times.queued_at_s * unix_per_mesh_s,
        attributes=_place(outcome, held)
        | {
            "messaging.system": "kafka",
            "messaging.operation.name": "process",
            "messaging.destination.name": held.record.tp.topic,
        },
    )
    has_started = times.started_at_s is not None
    waiting.end(at_unix_s=left_s * unix_per_mesh_s, error=None if has_started else error)
    if not has_started:
        return
    request = held.request
    operation = "chat" if request.messages is not None else "text_completion"
    generating = traces.start(
        f"{operation} {request.model}",
        "client",
        waiting.traceparent,
        at_unix_s=left_s * unix_per_mesh_s,
        attributes=_place(outcome, held)
        | {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "hexflow",
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": request.max_tokens,
        },
    )
    first_s = times.first_token_at_s
    generating.end(
        at_unix_s=times.finished_at_s * unix_per_mesh_s,
        error=error,
        attributes={
            "gen_ai.usage.input_tokens": outcome.usage.input_tokens,
            "gen_ai.usage.output_tokens": outcome.usage.output_tokens,
            "gen_ai.response.finish_reasons": outcome.finish_reason or None,
            "hexflow.time_to_first_token_s": None if first_s is None else first_s - left_s,
        },
    )


def _place(outcome: CallOutcome, held: HeldCall) -> dict[str, Value | None]:
    request = held.request
    return {
        "hexflow.query_id": outcome.query_id,
        "hexflow.request_id": outcome.request_id,
        "hexflow.workflow": request.workflow,
        "hexflow.stage": request.stage,
        "hexflow.attempt": outcome.attempt,
        "hexflow.instance_id": outcome.instance_id,
    }
