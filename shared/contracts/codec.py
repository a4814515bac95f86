"""The only encoder and decoder of messages: typed structs in front of MessagePack.

`msgpack` writes and reads the bytes; `msgspec` validates. Bytes are data: no code is ever loaded.
"""

import hashlib
from typing import Any, TypeGuard, TypeVar

import msgpack
import msgspec

from shared.contracts.messages import (
    ALL_MESSAGES,
    BoundCall,
    CallOutcome,
    Message,
    QueryReplyTo,
    QueryRequest,
    QueryResult,
    ReplyTo,
    StageRequest,
)
from shared.errors import ContractError, FutureVersion

CONTENT_TYPE = "application/msgpack"
MAX_NESTING = 64
"""Most levels of maps and lists in a free-form field: encoding recurses once per level."""
_CONTAINERS = frozenset({dict, list})
_EXTENSIONS = frozenset({msgpack.ExtType, msgpack.Timestamp})

M = TypeVar("M", bound=Message)

_BY_TYPE: dict[str, type[Message]] = {str(cls.__struct_config__.tag): cls for cls in ALL_MESSAGES}


def mint_request_id(query_id: str, stage: str, iteration: int, sibling: int) -> str:
    """Return the id of a call: the same inputs give the same id, also after a restart.

    Args:
        query_id: The query.
        stage: Stage name.
        iteration: Occurrence of the stage, >= 0.
        sibling: Index among parallel calls, >= 0.

    Returns:
        32 hexadecimal digits.
    """
    parts = (query_id, stage, str(iteration), str(sibling))
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    packed = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return bytes(packed)


def headers_for(message: Message, traceparent: str | None = None) -> tuple[tuple[str, bytes], ...]:
    """Return the record headers that accompany a message.

    Args:
        message: The message to be published.
        traceparent: W3C trace context to carry on, when there is one.
    """
    headers = [
        ("content-type", CONTENT_TYPE.encode()),
        ("type", str(type(message).__struct_config__.tag).encode()),
        ("version", str(message.version).encode()),
    ]
    if traceparent:
        headers.append(("traceparent", traceparent.encode()))
    return tuple(headers)


def _unpack(raw: bytes) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(raw, strict_map_key=True)
    except Exception as exc:  # msgpack raises a dozen unrelated classes on hostile bytes
        msg = f"not MessagePack: {type(exc).__name__}"
        raise ContractError(msg) from exc
    if not isinstance(value, dict):
        msg = f"a message is a map, this is a {type(value).__name__}"
        raise ContractError(msg)
    return value


def _readable_request_id(fields: dict[str, Any]) -> str | None:
    nested = fields.get("request")
    candidate = fields.get("request_id")
    if candidate is None and isinstance(nested, dict):
        candidate = nested.get("request_id")
    if isinstance(candidate, str) and 0 < len(candidate) <= 128:
        return candidate
    return None


def _free_form(message: Message) -> list[Any]:
    """Return the fields whose content the contract leaves to producers and engines."""
    if isinstance(message, BoundCall):
        message = message.request
    if isinstance(message, StageRequest):
        return [message.sampling, message.extra, *(message.messages or ())]
    if isinstance(message, CallOutcome) and message.message is not None:
        return [message.message]
    if isinstance(message, QueryRequest):
        return [message.inputs]
    if isinstance(message, QueryResult):
        return [message.outputs, *map(list, message.rows)]
    return []


def _what_cannot_travel(message: Message) -> str:
    """Return why a message could not be encoded again, or an empty text.

    The mesh writes free-form fields again as it read them: what would fail then is refused here.
    """
    level = [value for value in _free_form(message) if value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            return f"nested deeper than {MAX_NESTING} levels"
        inner = [v for one in level for v in (one.values() if type(one) is dict else one)]
        kinds = set(map(type, inner))
        if kinds & _EXTENSIONS:
            return "MessagePack extension types (timestamps too) are not part of the contract"
        level = [v for v in inner if type(v) in _CONTAINERS] if kinds & _CONTAINERS else []
    return ""


def decode_any(raw: bytes, *allowed: type[M]) -> M:
    """Return the message in `raw`, which must be of one of the allowed classes.

    Args:
        raw: Record value.
        *allowed: Message classes that are expected here.

    Raises:
        FutureVersion: The message was written by a newer release.
        ContractError: It is not a valid message of an allowed type; `request_id` is set when it
            could still be read.
    """
    fields = _unpack(raw)
    request_id = _readable_request_id(fields)
    cls = _BY_TYPE.get(str(fields.get("type")))
    if cls is None or cls not in allowed:
        names = ", ".join(sorted(str(c.__struct_config__.tag) for c in allowed))
        msg = f"type {str(fields.get('type'))[:64]!r} where {names} is expected"
        raise ContractError(msg, request_id=request_id)
    version = fields.get("version", 1)
    if isinstance(version, int) and version > cls.CURRENT_VERSION:
        msg = f"version {version}; this release reads up to {cls.CURRENT_VERSION}"
        raise FutureVersion(msg, request_id=request_id)
    try:
        message = msgspec.convert(fields, cls)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise ContractError(str(exc), request_id=request_id) from exc
    wrong = _what_cannot_travel(message)
    if wrong:
        raise ContractError(wrong, request_id=request_id)
    return message


def decode(raw: bytes, cls: type[M]) -> M:
    """Return the message of class `cls` in `raw`; see `decode_any`."""
    return decode_any(raw, cls)


class ReturnAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to tell about a message that is no valid call.

    Attributes:
        request_id: The call.
        query_id: Its query; the call itself when none is readable.
        reply_to: Where its outcome goes; partition 0 of `stage-results` when unreadable.
        attempt: Its attempt; 0 when unreadable.
    """

    request_id: str
    query_id: str
    reply_to: ReplyTo
    attempt: int


def return_address(raw: bytes) -> ReturnAddress | None:
    """Return where to send a refusal of an undecodable call, as far as the bytes tell.

    Returns:
        None when not even the request_id can be read.
    """
    try:
        fields = _unpack(raw)
    except ContractError:
        return None
    request_id = _readable_request_id(fields)
    if request_id is None:
        return None
    nested = fields.get("request")
    call = nested if isinstance(nested, dict) else fields
    query_id = call.get("query_id")
    attempt = call.get("attempt")
    return ReturnAddress(
        request_id=request_id,
        query_id=query_id if _is_id(query_id) else request_id,
        reply_to=_readable_reply_to(call.get("reply_to")),
        attempt=attempt if type(attempt) is int and 0 <= attempt <= 1_000 else 0,
    )


def query_return_address(raw: bytes) -> tuple[str, QueryReplyTo] | None:
    """Return whom to tell about an undecodable question, and where, as far as the bytes tell.

    Returns:
        Its query_id and reply address; None when not even the query_id can be read.
    """
    try:
        fields = _unpack(raw)
    except ContractError:
        return None
    query_id = fields.get("query_id")
    if not _is_id(query_id):
        return None
    try:
        return query_id, msgspec.convert(fields.get("reply_to"), QueryReplyTo)
    except msgspec.ValidationError:
        return query_id, QueryReplyTo()


def _readable_reply_to(value: object) -> ReplyTo:
    try:
        return msgspec.convert(value, ReplyTo)
    except msgspec.ValidationError:
        return ReplyTo()


def _is_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= 128
