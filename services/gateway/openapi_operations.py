"""Every path and method of the gateway, for its OpenAPI document."""

from typing import Any

import msgspec

from services.gateway.mesh_routes import OUTCOMES

Json = dict[str, Any]
REF = "#/components/schemas/{name}"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path.

    Attributes:
        method: HTTP method, lower case.
        path: Path with parameters in braces.
        tag: Group in the document.
        summary: What it does.
        statuses: Statuses it may answer with.
        body: Schema of its request body; None: it has none.
        answer: Schema of a good answer.
        streams: Whether it can answer with server-sent events.
        query: Query parameters: name -> (schema, description).
        headers: Whether it takes the mesh's headers.
    """

    method: str
    path: str
    tag: str
    summary: str
    statuses: tuple[int, ...] = (200, 401)
    body: Json | None = None
    answer: Json = msgspec.field(default_factory=lambda: {"type": "object"})
    streams: bool = False
    query: dict[str, tuple[Json, str]] = {}
    headers: bool = False


def _list(inner: Json) -> Json:
    return {"type": "object", "properties": {"data": {"type": "array", "items": inner}}}


_LIMIT: dict[str, tuple[Json, str]] = {
    "limit": ({"type": "integer", "minimum": 1, "maximum": 2000}, "Most rows.")
}
_CALL_STATUSES = (200, 400, 401, 403, 404, 408, 413, 429, 499, 502, 503, 504)
OPERATIONS = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        tag="OpenAI",
        summary="One chat completion, whole or as a stream.",
        statuses=_CALL_STATUSES,
        body={"$ref": REF.format(name="ChatRequest")},
        answer={"$ref": REF.format(name="ChatAnswer")},
        streams=True,
        headers=True,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        tag="OpenAI",
        summary="One text completion, whole or as a stream.",
        statuses=_CALL_STATUSES,
        body={"$ref": REF.format(name="TextRequest")},
        answer={"$ref": REF.format(name="TextAnswer")},
        streams=True,
        headers=True,
    ),
    Operation(
        method="get",
        path="/v1/models",
        tag="OpenAI",
        summary="Models and adapters that live instances offer.",
        answer=_list({"$ref": REF.format(name="Model")}),
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        tag="OpenAI",
        summary="One model.",
        statuses=(200, 401, 404),
        answer={"$ref": REF.format(name="Model")},
    ),
    Operation(
        method="post",
        path="/v1/queries",
        tag="Queries",
        summary="Ask an agent a question: a stream of events that ends with `result`, or that "
        "alone. A client that leaves leaves it running.",
        statuses=(200, 400, 401, 403, 409, 413, 429, 499, 502, 503, 504),
        body={"$ref": REF.format(name="Question")},
        answer={"$ref": REF.format(name="QueryState")},
        streams=True,
    ),
    Operation(
        method="get",
        path="/v1/queries/{query_id}",
        tag="Queries",
        summary="State, events and result of a question; `stream=true` follows it.",
        statuses=(200, 401, 404, 503),
        answer={"$ref": REF.format(name="QueryState")},
        streams=True,
        query={"stream": ({"type": "boolean"}, "Whether to follow it as a stream.")},
    ),
    Operation(
        method="delete",
        path="/v1/queries/{query_id}",
        tag="Queries",
        summary="Cancel a question and all its calls.",
        statuses=(202, 401, 404, 409, 503),
    ),
    Operation(
        method="get",
        path="/api/mesh",
        tag="Dashboard",
        summary="Everything the dashboard begins with: fleet, summary, queries, history, α.",
        statuses=(200, 401, 403),
        answer={"$ref": REF.format(name="Mesh")},
        query=_LIMIT,
    ),
    Operation(
        method="get",
        path="/api/events",
        tag="Dashboard",
        summary="What changed, once per period, as events named `mesh`. An event whose `since` is "
        "above the `change` you know means that you missed one: get `/api/mesh` again.",
        statuses=(200, 401, 403, 503),
        streams=True,
    ),
    Operation(
        method="get",
        path="/api/fleet",
        tag="Dashboard",
        summary="Every instance: load, waiting calls by urgency, P95, drift.",
        statuses=(200, 401, 403),
        answer=_list({"$ref": REF.format(name="Instance")}),
    ),
    Operation(
        method="get",
        path="/api/queries",
        tag="Dashboard",
        summary="Recent queries, changed last first; without an administrator's key one's own.",
        statuses=(200, 400, 401),
        answer=_list({"$ref": REF.format(name="QueryRow")}),
        query={
            **_LIMIT,
            "tenant": ({"type": "string"}, "Only this tenant's."),
            "outcome": ({"enum": list(OUTCOMES)}, "Only those in this state."),
        },
    ),
    Operation(
        method="get",
        path="/api/queries/{query_id}",
        tag="Dashboard",
        summary="One query: its calls, and where its time went.",
        statuses=(200, 401, 404),
        answer={"$ref": REF.format(name="QueryDetail")},
    ),
    Operation(
        method="get",
        path="/api/alpha",
        tag="Dashboard",
        summary="Changes of α, oldest first, with the tuner's reasons.",
        statuses=(200, 401, 403),
        answer=_list({"$ref": REF.format(name="AlphaChange")}),
    ),
    Operation(
        method="get",
        path="/api/dead-letters",
        tag="Dashboard",
        summary="Recent dead letters, newest first, without their text.",
        statuses=(200, 401, 403),
        answer=_list({"$ref": REF.format(name="Letter")}),
        query=_LIMIT,
    ),
    Operation(
        method="get",
        path="/api/dead-letters/{offset}/text",
        tag="Dashboard",
        summary="The original message, where the gateway may show text.",
        statuses=(200, 401, 403, 404),
    ),
    Operation(
        method="post",
        path="/api/dead-letters/{offset}/replay",
        tag="Dashboard",
        summary="Publish the original message on its topic again.",
        statuses=(200, 401, 403, 404, 409, 503),
        query={"again": ({"type": "boolean"}, "Also when it was sent again before.")},
    ),
)
