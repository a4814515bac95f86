"""What the HTTP API says when something goes wrong, in the shape that OpenAI clients know.

Every error body is `{"error": {"message", "type", "param", "code"}}`, with the call's `outcome`
inside where there is one. Statuses: docs/gateway.md has the table. Pure.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from shared.contracts.messages import CallOutcome
from shared.domain.near_names import did_you_mean
from shared.errors import (
    ContractError,
    EngineUnavailable,
    FutureVersion,
    InvalidCall,
    NoEligibleInstance,
    QueueFull,
    TooLarge,
)

CLIENT_CLOSED = 499  # nobody reads it; logs do
INVALID = "invalid_request_error"


class Problem(Exception):
    """An error that the client is told.

    Args:
        status: HTTP status.
        message: One sentence for people.
        code: Constant word.
        kind: OpenAI's `type`.
        param: The field that is wrong, where it is one.
        retry_after_s: When to try again, wall seconds; None: no advice.
        retries: Whether OpenAI clients should retry; None: as the status says.
        outcome: How the call ended, where it got that far.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        kind: str = INVALID,
        param: str | None = None,
        retry_after_s: float | None = None,
        retries: bool | None = None,
        outcome: CallOutcome | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s
        self.retries = retries
        self.outcome = outcome

    def body(self) -> dict[str, Any]:
        """Return the JSON object for the client."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        if self.outcome is not None:
            error["outcome"] = outcome_view(self.outcome)
        return {"error": error}

    def headers(self) -> list[tuple[str, str]]:
        """Return the response headers that go with it."""
        found = []
        if self.retry_after_s is not None:
            found.append(("retry-after", str(max(1, math.ceil(self.retry_after_s)))))
        if self.retries is not None:
            found.append(("x-should-retry", str(self.retries).lower()))
        return found


def outcome_view(outcome: CallOutcome) -> dict[str, Any]:
    """Return an outcome as JSON for the client: everything but the text."""
    found: dict[str, Any] = {
        "kind": outcome.kind,
        "reason": outcome.reason,
        "detail": outcome.detail,
        "request_id": outcome.request_id,
        "query_id": outcome.query_id,
        "attempt": outcome.attempt,
        "instance_id": outcome.instance_id,
        "deadline_s": outcome.deadline_s,
        "t_slo_s": outcome.t_slo_s,
        "slo_defaulted": outcome.slo_defaulted,
        "times": msgspec.to_builtins(outcome.times),
    }
    return found


_OF_REASON = {
    InvalidCall.reason: (400, "invalid_call"),
    ContractError.reason: (400, "invalid_call"),
    FutureVersion.reason: (400, "invalid_call"),
    "call_refused": (400, "call_refused"),
    TooLarge.reason: (413, "too_large"),
}


def problem_of(outcome: CallOutcome, *, is_model_served: bool, retry_after_s: float) -> Problem:
    """Return what a client is told of a call that did not complete.

    Args:
        outcome: How it ended.
        is_model_served: Whether a live instance offers the call's model.
        retry_after_s: What to advise when the mesh is full, wall seconds.
    """
    text = outcome.detail or outcome.reason or outcome.kind
    if outcome.reason in _OF_REASON:
        status, code = _OF_REASON[outcome.reason]
        return Problem(status, text, code=code, outcome=outcome)
    if outcome.kind == "rejected":
        return _rejected(outcome, text, is_model_served, retry_after_s)
    if outcome.kind == "evicted":
        return deadline_problem(text, outcome)
    if outcome.kind == "cancelled":
        return Problem(
            CLIENT_CLOSED, f"cancelled: {text}", code="cancelled", kind="cancelled", outcome=outcome
        )
    if outcome.reason == EngineUnavailable.reason:
        return Problem(
            503,
            f"the call failed: {text}",
            code=EngineUnavailable.reason,
            kind="server_error",
            retry_after_s=retry_after_s,
            outcome=outcome,
        )
    return Problem(
        502,
        f"the call failed: {text}",
        code=outcome.reason or "failed",
        kind="server_error",
        outcome=outcome,
    )


def _rejected(
    outcome: CallOutcome, text: str, is_model_served: bool, retry_after_s: float
) -> Problem:
    if outcome.reason != NoEligibleInstance.reason:
        code = "queue_full" if outcome.reason == QueueFull.reason else outcome.reason
        return Problem(
            429,
            text,
            code=code,
            kind="rate_limit_error",
            retry_after_s=retry_after_s,
            outcome=outcome,
        )
    if is_model_served:  # a context or an ability that nobody offers: retrying does not help
        return Problem(400, text, code="no_eligible_instance", outcome=outcome)
    return Problem(
        503,
        text,
        code="no_eligible_instance",
        kind="server_error",
        retry_after_s=retry_after_s,
        outcome=outcome,
    )


def deadline_problem(text: str, outcome: CallOutcome) -> Problem:
    """Return the error of a call whose deadline passed; no retry can meet it any more."""
    return Problem(
        504,
        f"the deadline passed: {text}",
        code="deadline_passed",
        kind="timeout_error",
        retries=False,
        outcome=outcome,
    )


def unavailable(what: str, retry_after_s: float = 5.0) -> Problem:
    """Return the error for a part of the mesh that does not answer."""
    return Problem(
        503,
        f"{what} does not answer; try again",
        code="unavailable",
        kind="server_error",
        retry_after_s=retry_after_s,
    )


def model_not_found(model: str, offered: Iterable[str]) -> Problem:
    """Return the error for a model that no instance offers.

    Args:
        model: As the client named it.
        offered: Models and adapters that live instances offer.
    """
    hint = did_you_mean(model, offered) or "; GET /v1/models lists those that are offered"
    text = f"no instance offers the model {model!r}{hint}"
    return Problem(404, text, code="model_not_found", param="model")


def wrong_fields(exc: msgspec.ValidationError, known: Iterable[str]) -> tuple[str, str | None]:
    """Return what a validation says for people, and the field it is about.

    Args:
        exc: What msgspec says.
        known: Names of the fields, for the nearest to one that is not known.
    """
    text = str(exc)
    named = re.search(r"unknown field `([^`]*)`", text)
    if named:
        return text + did_you_mean(named[1], known), named[1]
    named = re.search(r"required field `([^`]*)`|at `\$\.([^`]*)`", text)
    return text, (named[1] or named[2]) if named else None
