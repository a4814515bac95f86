"""What OpenAI's API says of the fields it knows: roles, contents, types. Pure.

Checked here are the fields that engines take from OpenAI or share with vLLM; a field that nobody
knows passes. `param` names the place as OpenAI does: `messages[0].role`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from services.gateway.problems import Problem
from shared.domain.near_names import did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
IN_PLACE_OF_CONTENT = ("tool_calls", "function_call", "refusal", "audio")


class Rule(NamedTuple):
    """What a field has to be.

    Attributes:
        text: In words.
        holds: Whether a value is such a one.
    """

    text: str
    holds: Callable[[Any], bool]


def refuse(param: str, text: str, *, code: str = "invalid_value") -> NoReturn:
    """Refuse a request because of one field.

    Raises:
        Problem: Always.
    """
    raise Problem(400, f"{param}: {text}", code=code, param=param)


def check_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Return the messages of a chat, when they are such.

    Raises:
        Problem: They are not; names the first message and field that is wrong.
    """
    if not isinstance(messages, list):
        refuse("messages", "a list of messages is needed")
    if not messages:
        refuse("messages", "the list is empty; at least one message is needed", code="empty_array")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    return tuple(messages)


def _check_message(place: str, message: Any) -> None:
    if not isinstance(message, dict):
        refuse(place, "a message is an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        refuse(f"{place}.role", f"one of {', '.join(ROLES)} is needed{hint}")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and not _is_list_of(dict)(tool_calls):
        refuse(f"{place}.tool_calls", "a list of objects is needed")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not any(message.get(name) for name in IN_PLACE_OF_CONTENT):
            refuse(f"{place}.content", "a text is needed; null goes with tool_calls only")
    else:
        _check_content(f"{place}.content", content)


def _check_content(place: str, content: Any) -> None:
    """Check a text or a list of parts; an empty text is one, as engines take it."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        refuse(place, "a text or a list of parts is needed")
    if not content:
        refuse(place, "the list is empty; at least one part is needed", code="empty_array")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            refuse(f"{place}[{index}]", "a part is an object with a type")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            refuse(f"{place}[{index}].text", "a text is needed")


def check_fields(body: Mapping[str, Any]) -> None:
    """Check the type and bounds of every field that has a rule; null counts as left out.

    Raises:
        Problem: One is wrong; names it.
    """
    for name, rule in RULES.items():
        value = body.get(name)
        if value is not None and not rule.holds(value):
            refuse(name, f"{rule.text} is needed", code="invalid_type")


def _is_number(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _is_whole(low: float = -math.inf, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(one) in kinds for one in value)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or _is_list_of(str)(value)


def _has_type(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


_FLAG = Rule("true or false", _is(bool))
_OBJECT = Rule("an object", _is(dict))
_TEXT = Rule("a text", _is(str))
_PENALTY = Rule("a number from -2 to 2", _is_number(-2, 2))
_SHARE = Rule("a number from 0 to 1", _is_number(0, 1))
RULES: Mapping[str, Rule] = {
    "frequency_penalty": _PENALTY,
    "ignore_eos": _FLAG,
    "length_penalty": Rule("a number", _is_number(-math.inf)),
    "logit_bias": _OBJECT,
    "logprobs": Rule("true or false, or a whole number", _is(bool, int)),
    "metadata": _OBJECT,
    "min_p": _SHARE,
    "min_tokens": Rule("a whole number from 0", _is_whole(0)),
    "parallel_tool_calls": _FLAG,
    "presence_penalty": _PENALTY,
    "repetition_penalty": Rule("a number from 0", _is_number(0)),
    "response_format": Rule("an object with a type", _has_type),
    "seed": Rule("a whole number", _is_whole()),
    "skip_special_tokens": _FLAG,
    "stop": Rule("a text or a list of texts", _is_stop),
    "stop_token_ids": Rule("a list of whole numbers", _is_list_of(int)),
    "stream": _FLAG,
    "stream_options": _OBJECT,
    "temperature": Rule("a number from 0", _is_number(0)),
    "tool_choice": Rule("a text or an object", _is(str, dict)),
    "tools": Rule("a list of objects", _is_list_of(dict)),
    "top_k": Rule("a whole number from -1", _is_whole(-1)),
    "top_logprobs": Rule("a whole number from 0", _is_whole(0)),
    "top_p": _SHARE,
    "user": _TEXT,
}
