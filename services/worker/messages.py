"""The messages that a worker writes about a call."""

import msgspec

from services.worker.calls import HeldCall
from shared.contracts.codec import ReturnAddress, decode, encode
from shared.contracts.messages import (
    MAX_DETAIL,
    CallOutcome,
    CallTimes,
    LatencyEvent,
    OutcomeKind,
    StageRequest,
)
from shared.errors import ContractError, DeadlinePassed, GenerationFailed, TooLarge
from shared.ports import Finished


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ends.

    Attributes:
        kind: Kind of its outcome.
        reason: Constant word for anything but completed.
        detail: One sentence for people.
        finished: What the engine gave (completed only).
    """

    kind: OutcomeKind
    reason: str = ""
    detail: str = ""
    finished: Finished | None = None


def verdict_if_hopeless(held: HeldCall, now_s: float, evict_after_s: float) -> Verdict | None:
    """Return how to end a call whose query's deadline passed too long ago, else None."""
    late_s = now_s - held.call.deadline_s
    if late_s <= evict_after_s:
        return None
    detail = f"the query's deadline passed {late_s:.0f} s ago"
    return Verdict(kind="evicted", reason=DeadlinePassed.reason, detail=detail)


def outcome_of(held: HeldCall, verdict: Verdict, instance_id: str) -> CallOutcome:
    """Return the outcome of a call."""
    call, finished = held.call, verdict.finished
    outcome = CallOutcome(
        request_id=held.request_id,
        query_id=held.query_id,
        kind=verdict.kind,
        reason=verdict.reason,
        detail=_sayable(verdict.detail[:MAX_DETAIL]),
        attempt=held.attempt,
        instance_id=instance_id,
        times=times_of(held),
        t_slo_s=held.request.t_slo_s,
        deadline_s=call.deadline_s,
        terms=call.terms,
        slo_defaulted=held.request.slo_defaulted,
    )
    if finished is None:
        return outcome
    return msgspec.structs.replace(
        outcome,
        text=finished.text,
        message=finished.message,
        finish_reason=finished.finish_reason,
        usage=finished.usage,
    )


def check_result(finished: Finished) -> None:
    """Refuse what an engine gave where no outcome could carry it, or no reader take it.

    Raises:
        GenerationFailed: Says what is wrong with it.
    """
    outcome = CallOutcome(
        request_id="check",
        query_id="check",
        kind="completed",
        text=finished.text,
        message=finished.message,
        finish_reason=finished.finish_reason,
        usage=finished.usage,
    )
    try:
        decode(encode(outcome), CallOutcome)
    except ContractError as exc:
        raise GenerationFailed(f"the engine's result is none: {exc.detail}") from exc
    except (ValueError, OverflowError, TypeError, RecursionError) as exc:
        raise GenerationFailed(f"the engine's result is none: {type(exc).__name__}") from exc


def _sayable(text: str) -> str:
    """Return text that UTF-8 can carry, whoever said it."""
    return text.encode(errors="replace").decode()


def without_text(outcome: CallOutcome, error: TooLarge) -> CallOutcome:
    """Return the outcome to publish where the real one is above the largest message size."""
    return msgspec.structs.replace(
        outcome,
        kind="failed",
        reason=error.reason,
        detail="the answer is above the largest message size",
        text=None,
        message=None,
    )


def refusal_of(address: ReturnAddress, error: ContractError, instance_id: str) -> CallOutcome:
    """Return the outcome of a call whose message cannot be read."""
    return CallOutcome(
        request_id=address.request_id,
        query_id=address.query_id,
        kind="rejected",
        reason=error.reason,
        detail=error.detail[:MAX_DETAIL],
        attempt=address.attempt,
        instance_id=instance_id,
    )


def next_attempt_of(held: HeldCall, failed_on: str = "", *, counts: bool = True) -> StageRequest:
    """Return the request that hands a call back: one attempt later, ready time and budget kept.

    Args:
        held: The call.
        failed_on: The instance, where its engine failed the call: others are preferred then.
        counts: Whether it then counts among the call's failed attempts.
    """
    before = held.request.failed_on
    after = before if not failed_on or failed_on in before else (*before, failed_on)
    return msgspec.structs.replace(
        held.request,
        attempt=held.attempt + 1,
        failed_on=after,
        failures=held.request.failures + bool(failed_on and counts),
    )


def times_of(held: HeldCall) -> CallTimes:
    """Return when things happened to a call."""
    return CallTimes(
        ready_at_s=held.request.ready_at_s,
        dispatched_at_s=held.call.dispatched_at_s,
        queued_at_s=held.queued_at_s,
        started_at_s=held.started_at_s,
        first_token_at_s=held.first_token_at_s,
        finished_at_s=held.finished_at_s,
    )


def latency_event_of(held: HeldCall, outcome: CallOutcome) -> LatencyEvent:
    """Return what the tuner learns from the end of a call."""
    request, call = held.request, held.call
    arrival_s = request.arrival_s if request.arrival_s is not None else request.ready_at_s or 0.0
    return LatencyEvent(
        request_id=outcome.request_id,
        query_id=outcome.query_id,
        workflow=request.workflow,
        stage=request.stage,
        iteration=request.iteration,
        sibling=request.sibling,
        siblings=request.siblings,
        parents=request.parents,
        tenant=request.tenant,
        model=request.model,
        instance_id=outcome.instance_id,
        kind=outcome.kind,
        reason=outcome.reason,
        attempt=outcome.attempt,
        arrival_s=arrival_s,
        slo_s=request.slo_s if request.slo_s is not None else call.deadline_s - arrival_s,
        think_s=request.think_s,
        times=outcome.times,
        usage=outcome.usage,
        prefix=request.prefix,
        t_slo_s=request.t_slo_s or 0.0,
        t_comp_s=call.t_comp_s,
        predicted_output_tokens=call.predicted_output_tokens,
        expected_cached_tokens=call.expected_cached_tokens,
        alpha=call.terms.alpha,
        prompt_bytes=request.prompt_bytes or 0,
        terms=call.terms,
    )
