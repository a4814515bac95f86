"""From a call's outcome to what OpenAI clients expect: whole answers and stream events. Pure."""

from typing import Any

import msgspec

from services.gateway.problems import Problem, outcome_view
from shared.contracts.messages import CallOutcome, Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What all parts of one answer have in common.

    Attributes:
        request_id: The call.
        model: As the client named it.
        created: Unix seconds.
        is_chat: Whether it is a chat completion.
    """

    request_id: str
    model: str
    created: int
    is_chat: bool

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """Return the fields that every object begins with."""
        if self.is_chat:
            name, prefix = "chat.completion", "chatcmpl-"
            name += ".chunk" if is_chunk else ""
        else:
            name, prefix = "text_completion", "cmpl-"
        return {
            "id": prefix + self.request_id,
            "object": name,
            "created": self.created,
            "model": self.model,
        }


def event(data: object, name: str = "") -> bytes:
    """Return one server-sent event with a JSON object as data."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def usage_view(usage: Usage) -> dict[str, Any]:
    """Return token counts in OpenAI's words."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def answer(shape: Shape, outcome: CallOutcome) -> dict[str, Any]:
    """Return the whole answer of a completed call."""
    text = outcome.text or ""
    choice: dict[str, Any] = {"index": 0}
    if shape.is_chat:
        message = {"role": "assistant", "content": text, **(outcome.message or {})}
        choice["message"] = message
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": outcome.finish_reason or "stop"}
    return {
        **shape.head(is_chunk=False),
        "choices": [choice],
        "usage": usage_view(outcome.usage),
        "hexflow": outcome_view(outcome),
    }


def first_events(shape: Shape) -> bytes:
    """Return what a stream begins with: the role, for chat."""
    return _chunk(shape, {"role": "assistant", "content": ""}) if shape.is_chat else b""


def text_event(shape: Shape, text: str) -> bytes:
    """Return a piece of generated text."""
    return _chunk(shape, {"content": text}) if shape.is_chat else _chunk(shape, text)


def last_events(shape: Shape, outcome: CallOutcome, *, include_usage: bool) -> bytes:
    """Return the end of a completed stream: what is no text, the finish reason, token counts."""
    parts = []
    message = outcome.message or {}
    rest = {k: v for k, v in message.items() if k not in ("role", "content") and v}
    if shape.is_chat and rest:
        parts.append(_chunk(shape, _indexed(rest)))
    reason = outcome.finish_reason or "stop"
    parts.append(_chunk(shape, {} if shape.is_chat else "", finish_reason=reason))
    if include_usage:
        last = {**shape.head(is_chunk=True), "choices": [], "usage": usage_view(outcome.usage)}
        parts.append(event({**last, "hexflow": outcome_view(outcome)}))
    return b"".join([*parts, DONE])


def error_event(problem: Problem) -> bytes:
    """Return the end of a stream that failed; OpenAI clients raise an `APIError` on it."""
    return event(problem.body())


def _indexed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message's parts as a stream carries them: tool calls have an index there."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    numbered = [{"index": i, **one} for i, one in enumerate(calls) if isinstance(one, dict)]
    return {**message, "tool_calls": numbered}


def _chunk(shape: Shape, part: dict[str, Any] | str, finish_reason: str | None = None) -> bytes:
    content = {"delta": part} if shape.is_chat else {"text": part}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
    return event({**shape.head(is_chunk=True), "choices": [choice]})
