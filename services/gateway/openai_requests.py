"""From the body of an OpenAI request to the fields of a mesh call. Pure.

What the mesh does not know travels on unchanged: sampling parameters in `sampling`, everything else
(`tools`, `response_format`, ...) in `extra`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.fields import BODY_KEY
from services.gateway.openai_checks import check_fields, check_messages, refuse
from services.gateway.problems import Problem
from shared.contracts.codec import MAX_NESTING

SAMPLING = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "length_penalty",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
_TAKEN = frozenset({"model", "messages", "prompt", "max_tokens", "stream", "n", BODY_KEY})
MAX_MODEL = 128
MAX_TOKENS = 10_000_000


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for.

    Attributes:
        model: Model or adapter.
        messages: Chat messages; or
        prompt: plain text.
        max_tokens: Longest output, tokens.
        stream: Whether it wants server-sent events.
        include_usage: Whether the stream ends with the token counts.
        sampling: Sampling parameters.
        extra: All other fields.
    """

    model: str
    messages: tuple[dict[str, Any], ...] | None
    prompt: str | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    sampling: dict[str, Any]
    extra: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether it came as chat messages."""
        return self.messages is not None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        Problem: It is no UTF-8, no JSON, no object, or nested too deep.
    """
    try:
        value = msgspec.json.decode(raw.decode("utf-8", errors="strict"))
    except UnicodeDecodeError as exc:
        raise Problem(400, "the body is not UTF-8", code="invalid_utf8") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        raise Problem(400, f"the body is no JSON: {exc}", code="invalid_json") from exc
    if not isinstance(value, dict):
        raise Problem(400, "the body must be a JSON object", code="invalid_json")
    if _depth(value) > MAX_NESTING:
        text = f"nested deeper than {MAX_NESTING} levels"
        raise Problem(400, text, code="invalid_json")
    return value


def parse_chat(body: Mapping[str, Any]) -> Asked:
    """Return what a `/v1/chat/completions` request asks for.

    Raises:
        Problem: A field is missing or wrong.
    """
    return _asked(body, messages=check_messages(body.get("messages")), prompt=None)


def parse_text(body: Mapping[str, Any]) -> Asked:
    """Return what a `/v1/completions` request asks for.

    Raises:
        Problem: A field is missing or wrong; several prompts or token ids count as wrong.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        refuse("prompt", "one text is needed; send several prompts as several requests")
    return _asked(body, messages=None, prompt=prompt)


def _asked(
    body: Mapping[str, Any], *, messages: tuple[dict[str, Any], ...] | None, prompt: str | None
) -> Asked:
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL:
        refuse("model", "the name of a model is needed; GET /v1/models lists them")
    n = body.get("n")
    if n is not None and (type(n) is not int or n != 1):
        refuse("n", "a call has one answer; send the request again for more")
    check_fields(body)
    options = body.get("stream_options")
    rest = {key: value for key, value in body.items() if key not in _TAKEN}
    rest.pop("stream_options", None)
    return Asked(
        model=model,
        messages=messages,
        prompt=prompt,
        max_tokens=_max_tokens(body),
        stream=body.get("stream") or False,
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        sampling={key: value for key, value in rest.items() if key in SAMPLING},
        extra={key: value for key, value in rest.items() if key not in SAMPLING},
    )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= MAX_TOKENS:
            refuse(name, f"a whole number from 1 to {MAX_TOKENS:,}")
        return value
    return None


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level and depth <= MAX_NESTING:
        depth += 1
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = [one for one in inner if isinstance(one, dict | list)]
    return depth
