"""The AsyncAPI 3.0 document of the mesh, generated from the message classes and topics.

`hexflow asyncapi` prints it; `docs/asyncapi.json` is a checked-in copy that a test compares.
"""

from typing import Any

import msgspec

from shared.contracts.codec import CONTENT_TYPE
from shared.contracts.messages import (
    AlphaUpdate,
    BoundCall,
    CallOutcome,
    CancelQuery,
    DeadLetter,
    InstanceState,
    LatencyEvent,
    Message,
    QueryRequest,
    QueryResult,
    RecoveryProbe,
    SpeedUpdate,
    StageRequest,
    WorkflowProfile,
)
from shared.contracts.topics import (
    CANCELLATIONS,
    CONTROL,
    DEAD_LETTERS,
    INSTANCE_PREFIX,
    INSTANCE_STATES,
    LATENCY_EVENTS,
    QUERIES,
    QUERY_RESULTS,
    STAGE_REQUESTS,
    STAGE_RESULTS,
    Topics,
)

_CHANNELS: tuple[tuple[str, str, str, tuple[type[Message], ...]], ...] = (
    (
        STAGE_REQUESTS,
        "query_id",
        (
            "One message is one LLM call. Producers write it; the mesh writes a call again, with "
            "attempt + 1, when it hands it back."
        ),
        (StageRequest,),
    ),
    (
        STAGE_RESULTS,
        "query_id; the partition is the request's reply_to.partition",
        (
            "At-least-once. The outcome of a call is the record with the lowest offset in its "
            "reply partition that carries its request_id: take the first, drop later ones."
        ),
        (CallOutcome,),
    ),
    (
        INSTANCE_PREFIX + "{instanceId}",
        "query_id",
        "Calls bound to one instance; one partition.",
        (BoundCall,),
    ),
    (
        INSTANCE_STATES,
        "instance_id, or probe/<owner_id>",
        "Compacted. Heartbeat, capacity and backlog of every instance.",
        (InstanceState, RecoveryProbe),
    ),
    (
        LATENCY_EVENTS,
        "query_id",
        "Every ended attempt with its times and token counts; no text. One partition.",
        (LatencyEvent,),
    ),
    (
        CONTROL,
        "alpha/<pool>, profile/<workflow> or speed/<instance>",
        "Compacted. What the tuner decided and learned; a reader keeps the highest revision.",
        (AlphaUpdate, WorkflowProfile, SpeedUpdate),
    ),
    (
        CANCELLATIONS,
        "query_id",
        "Tombstones: every call of the query is cancelled until `until_s`.",
        (CancelQuery,),
    ),
    (
        QUERIES,
        "query_id",
        (
            "One message is one question. The agent that owns the partition drives its workflow "
            "and ends it with one result."
        ),
        (QueryRequest,),
    ),
    (
        QUERY_RESULTS,
        "query_id; the partition is the question's reply_to.partition",
        (
            "At-least-once. The result of a question is the record with the lowest offset in its "
            "reply partition that carries its query_id: take the first, drop later ones."
        ),
        (QueryResult,),
    ),
    (
        DEAD_LETTERS,
        "none",
        "Messages nobody could handle, with their original bytes.",
        (DeadLetter,),
    ),
)


def _tag(cls: type[Message]) -> str:
    return str(cls.__struct_config__.tag)


def _channel_id(topic: str) -> str:
    return topic.replace("{", "").replace("}", "").replace(".", "-")


def _message(cls: type[Message]) -> dict[str, Any]:
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    return {
        "name": _tag(cls),
        "title": cls.__name__,
        "summary": summary,
        "contentType": CONTENT_TYPE,
        "headers": {
            "type": "object",
            "properties": {
                "content-type": {"const": CONTENT_TYPE},
                "type": {"const": _tag(cls)},
                "version": {"type": "string"},
                "traceparent": {"type": "string", "description": "W3C trace context"},
            },
        },
        "payload": {"$ref": f"#/components/schemas/{cls.__name__}"},
    }


def _without_base64(schema: Any) -> Any:
    """Return a schema whose bytes are what MessagePack carries: bytes, not base64 as in JSON."""
    if isinstance(schema, list):
        return [_without_base64(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("contentEncoding") == "base64":
        return {"type": "string", "format": "binary", "description": "MessagePack bin"}
    return {name: _without_base64(one) for name, one in schema.items()}


def _channel(
    topics: Topics, topic: str, key: str, description: str, classes: tuple[type[Message], ...]
) -> dict[str, Any]:
    channel: dict[str, Any] = {
        "address": topics.name(topic),
        "description": f"{description} Record key: {key}.",
        "messages": {_tag(c): {"$ref": f"#/components/messages/{c.__name__}"} for c in classes},
    }
    if "{instanceId}" in topic:
        channel["parameters"] = {"instanceId": {"description": "The instance's id"}}
    return channel


def document(version: str, topics: Topics | None = None) -> dict[str, Any]:
    """Return the AsyncAPI document.

    Args:
        version: Version of hexflow.
        topics: Names to show; the default prefix when None.
    """
    topics = topics or Topics()
    classes = tuple(cls for *_, group in _CHANNELS for cls in group)
    _, schemas = msgspec.json.schema_components(classes, ref_template="#/components/schemas/{name}")
    operations: dict[str, Any] = {}
    for topic, action, name in (
        (STAGE_REQUESTS, "receive", "submitCall"),
        (STAGE_RESULTS, "send", "publishOutcome"),
        (CANCELLATIONS, "receive", "cancelQuery"),
        (QUERIES, "receive", "ask"),
        (QUERY_RESULTS, "send", "answer"),
    ):
        operations[name] = {
            "action": action,
            "channel": {"$ref": f"#/channels/{_channel_id(topic)}"},
        }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "hexflow mesh",
            "version": version,
            "license": {"name": "Apache-2.0"},
            "description": (
                "Values are MessagePack maps with `type` and `version`. Unknown fields are "
                "ignored; new fields have defaults; types never change. Instants are seconds on "
                "the mesh clock: Unix seconds of the broker's append time multiplied by the time "
                "scale (1 in production). A producer writes `stage-requests` and `cancellations` "
                "and reads its own partition of `stage-results`; operations are described from "
                "the mesh's side."
            ),
        },
        "defaultContentType": CONTENT_TYPE,
        "channels": {
            _channel_id(topic): _channel(topics, topic, key, text, group)
            for topic, key, text, group in _CHANNELS
        },
        "operations": operations,
        "components": {
            "messages": {cls.__name__: _message(cls) for cls in classes},
            "schemas": _without_base64(schemas),
        },
    }
