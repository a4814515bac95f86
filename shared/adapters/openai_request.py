"""A call as an OpenAI-compatible server is asked for it. Pure."""

import math
from typing import Any, NamedTuple

from shared.contracts.messages import BoundCall
from shared.domain.instance import InstanceSpec
from shared.errors import CallRefused

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
FURTHEST_MS = 2**53
LEAST_OUTPUT = 16
SPARE_TOKENS = 16
ROOMY_TOKENS = 256
PREDICTION_SLACK = 1.2


class UpstreamRequest(NamedTuple):
    """What is sent.

    Attributes:
        path: `/v1/chat/completions` or `/v1/completions`.
        body: The JSON object.
    """

    path: str
    body: dict[str, Any]


def upstream_request(
    call: BoundCall, spec: InstanceSpec, model: str, *, sends_priority: bool = False
) -> UpstreamRequest:
    """Return a call as the server takes it; it always streams, to see the first token.

    Args:
        call: The call; fields that the mesh does not know travel in its `sampling` and `extra`.
        spec: The instance.
        model: The server's name for the base model.
        sends_priority: Whether to say how urgent the call is.

    Raises:
        CallRefused: It wants several answers, or has neither messages nor prompt.
    """
    request = call.request
    body: dict[str, Any] = {**request.extra, **request.sampling}
    if body.get("n") not in (None, 1):
        raise CallRefused("a call has one answer; ask for more with sibling calls (n is above 1)")
    body["model"] = request.model if request.model in spec.adapters else model
    body["stream"] = True
    body["stream_options"] = {**_dict(body.get("stream_options")), "include_usage": True}
    if sends_priority:
        body["priority"] = priority_of(call)
    if request.messages is not None:
        body["messages"] = list(request.messages)
        if request.max_tokens is not None and "max_completion_tokens" not in body:
            body["max_tokens"] = request.max_tokens
        return UpstreamRequest(CHAT, body)
    if request.prompt is None:
        raise CallRefused("the call has neither messages nor a prompt")
    body["prompt"] = request.prompt
    body["max_tokens"] = request.max_tokens or _rest_of_context(call, spec)
    return UpstreamRequest(TEXT, body)


def priority_of(call: BoundCall) -> int:
    """Return a call's priority inside the engine, lower first: its queue score in milliseconds."""
    return round(max(-FURTHEST_MS, min(FURTHEST_MS, call.queue_score * 1_000.0)))


def _rest_of_context(call: BoundCall, spec: InstanceSpec) -> int | None:
    """Return the longest output that surely fits: without it, servers stop after 16 tokens.

    A prompt has at most one token per byte, which is far too many for a long one; there the
    prediction decides. Where that leaves no room either, None: a JSON null, which vLLM and
    llama.cpp take for all that their own count of the prompt leaves.
    """
    num_bytes = call.request.prompt_bytes or 0
    room = spec.max_context_tokens - num_bytes - SPARE_TOKENS
    if room < ROOMY_TOKENS:
        predicted = math.ceil(PREDICTION_SLACK * call.predicted_input_tokens)
        room = spec.max_context_tokens - min(num_bytes, predicted) - SPARE_TOKENS
    return room if room >= LEAST_OUTPUT else None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
