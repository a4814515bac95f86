"""A call as vLLM takes it; pure, without vllm: the field names are those of its `SamplingParams`.

OpenAI's names (`response_format`, `max_completion_tokens`) and vLLM's own older ones
(`guided_json`, ...) are understood. A field that neither knows is refused rather than dropped.
"""

from typing import Any

from shared.contracts.messages import BoundCall
from shared.errors import CallRefused

SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("ignore_eos", "min_tokens", "bad_words", "include_stop_str_in_output"),
        *("skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids"),
    }
)
STRUCTURE = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
IGNORED = frozenset({"user", "stream", "stream_options", "n", "best_of", "metadata", "store"})
TEMPLATE = frozenset({"tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt"})


def sampling_fields(call: BoundCall, room_tokens: int) -> dict[str, Any]:
    """Return the arguments of `SamplingParams`, `structured_outputs` still as a plain dict.

    Args:
        call: The call.
        room_tokens: Tokens that the context leaves for the output; the default of `max_tokens`.

    Raises:
        CallRefused: A field is unknown or wrong, or there is no room.
    """
    request = call.request
    given = {**request.extra, **request.sampling}
    if given.get("n") not in (None, 1):
        raise CallRefused("a call has one answer; ask for more with sibling calls (n is above 1)")
    limit = request.max_tokens or given.pop("max_completion_tokens", None) or room_tokens
    given.pop("max_completion_tokens", None)
    if room_tokens < 1:
        raise CallRefused("the prompt is as long as the context: there is no room for an answer")
    fields: dict[str, Any] = {"max_tokens": min(limit, room_tokens)}
    structure = _structure(given)
    if structure:
        fields["structured_outputs"] = structure
    for name, value in given.items():
        if name in SAMPLING:
            fields[name] = value
        elif name not in IGNORED | TEMPLATE:
            raise CallRefused(f"vLLM's engine knows no field {name!r}")
    return fields


def _structure(given: dict[str, Any]) -> dict[str, Any]:
    """Take what asks for structured output out of the fields, in vLLM's names."""
    found: dict[str, Any] = {}
    form = given.pop("response_format", None)
    if isinstance(form, dict):
        kind = form.get("type")
        if kind == "json_schema":
            found["json"] = _schema(form)
        elif kind == "json_object":
            found["json_object"] = True
        elif kind not in (None, "text"):
            raise CallRefused(f"response_format {kind!r} is unknown")
    own = given.pop("structured_outputs", None)
    if isinstance(own, dict):
        found |= {name: value for name, value in own.items() if value is not None}
    for name in STRUCTURE:
        value = given.pop(f"guided_{name}", None)
        if value is not None:
            found[name] = value
    if len(found) > 1:
        raise CallRefused(f"structured output is asked for in several ways: {', '.join(found)}")
    return found


def _schema(form: dict[str, Any]) -> Any:
    inner = form.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise CallRefused("response_format json_schema has no json_schema.schema")
    return schema


def template_fields(call: BoundCall) -> dict[str, Any]:
    """Return what the chat template is given besides the messages."""
    given = {**call.request.extra, **call.request.sampling}
    own = given.get("chat_template_kwargs")
    fields: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    if given.get("tools"):
        fields["tools"] = given["tools"]
    return {"add_generation_prompt": given.get("add_generation_prompt", True), **fields}
