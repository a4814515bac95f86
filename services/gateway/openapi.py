"""The OpenAPI document of the gateway, from its routes and message classes.

Served at `/openapi.json`; `docs/openapi.json` is a checked-in copy that a test compares.
"""

from collections.abc import Iterable

import msgspec

from services.gateway.dead_letters import Letter
from services.gateway.fields import HEADER, MeshFields
from services.gateway.openapi_operations import OPERATIONS, REF, Json, Operation
from services.gateway.openapi_schemas import plain_schemas
from services.gateway.query_routes import Question
from shared.contracts.messages import CallTimes, QueryResult
from shared.contracts.query_events import QueryEvent

_MEANINGS = {
    200: "Done.",
    202: "Under way.",
    400: "A field is missing or wrong, or no instance has the context or ability needed.",
    401: "No API key, or one that is not known.",
    403: "The key is not allowed to do this.",
    404: "No such model, query or letter.",
    408: "The body did not arrive in time.",
    409: "It was done already, or the id belongs to another question.",
    413: "Larger than the mesh carries.",
    429: "A bound is hit: rate, open calls or queues; `Retry-After` says when to come back.",
    499: "Cancelled.",
    502: "The engines failed on it; the outcome is in the body.",
    503: "A part of the mesh does not answer; `Retry-After` says when to come back.",
    504: "Its deadline passed; the outcome is in the body.",
}


def openapi_document(version: str) -> Json:
    """Return the OpenAPI 3.1 document.

    Args:
        version: Of the application.
    """
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hexflow gateway",
            "version": version,
            "description": "OpenAI-compatible calls with deadlines, questions for agents, and the "
            "live state of the mesh. Seconds are mesh seconds; instants (`*_at_s`, `arrival_s`) "
            "are on the mesh clock.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
        },
    }


def _operation(operation: Operation) -> Json:
    found: Json = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "parameters": list(_parameters(operation)),
        "responses": {str(status): _response(operation, status) for status in operation.statuses},
    }
    if operation.body is not None:
        content = {"application/json": {"schema": operation.body}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace("-", "/").split("/")
    return "_".join([operation.method, *filter(None, words)])


def _parameters(operation: Operation) -> Iterable[Json]:
    for part in operation.path.split("/"):
        if part.startswith("{"):
            name = part.strip("{}")
            kind = "integer" if name == "offset" else "string"
            yield {"name": name, "in": "path", "required": True, "schema": {"type": kind}}
    for name, (schema, description) in operation.query.items():
        yield {"name": name, "in": "query", "schema": schema, "description": description}
    if operation.headers:
        texts = _descriptions(MeshFields)
        for field in msgspec.structs.fields(MeshFields):
            name = HEADER + field.name.replace("_", "-")
            schema = {"type": "string"}
            yield {"name": name, "in": "header", "schema": schema, "description": texts[field.name]}
    if operation.method == "post" and operation.tag != "Dashboard":
        yield {
            "name": "idempotency-key",
            "in": "header",
            "schema": {"type": "string"},
            "description": "Requests with the same key are the same call.",
        }


def _response(operation: Operation, status: int) -> Json:
    if status >= 400:
        content: Json = {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}
    else:
        content = {"application/json": {"schema": operation.answer}}
        if operation.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
    found: Json = {"description": _MEANINGS[status], "content": content}
    if status in (429, 503):
        found["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return found


def _descriptions(cls: type) -> dict[str, str]:
    """Return the descriptions of a class's fields, from its docstring."""
    found: dict[str, str] = {}
    name = ""
    for line in (cls.__doc__ or "").partition("Attributes:")[2].splitlines():
        text = line.strip()
        head, colon, rest = text.partition(": ")
        if line.startswith(" " * 8) and not line.startswith(" " * 9) and colon:
            name = head
            found[name] = rest
        elif name and text:
            found[name] += f" {text}"
    return found


def _schemas() -> dict[str, Json]:
    classes = (MeshFields, Question, QueryResult, QueryEvent, CallTimes, Letter)
    _, components = msgspec.json.schema_components(classes, ref_template=REF)
    for cls in classes:
        for name, text in _descriptions(cls).items():
            if name in components[cls.__name__].get("properties", {}):
                components[cls.__name__]["properties"][name]["description"] = text
    return {**components, **plain_schemas()}
