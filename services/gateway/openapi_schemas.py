"""Schemas of what the gateway's answers hold, where no message class says it."""

from collections.abc import Iterable

from services.gateway.mesh_routes import OUTCOMES
from services.gateway.openapi_operations import REF, Json


def _object(required: Iterable[str] = (), **properties: Json) -> Json:
    found: Json = {"type": "object", "properties": properties}
    if required:
        found["required"] = list(required)
    return found


def plain_schemas() -> dict[str, Json]:
    """Return them by name."""
    text, number = {"type": "string"}, {"type": "number"}
    whole, flag, anything = {"type": "integer"}, {"type": "boolean"}, {"type": "object"}
    maybe: Json = {"type": ["number", "null"]}
    common: Json = {
        "model": text,
        "max_tokens": whole,
        "stream": flag,
        "stream_options": _object(include_usage=flag),
        "hexflow": {"$ref": REF.format(name="MeshFields")},
        "metadata": {
            "type": "object",
            "description": "Texts; those named hexflow_... are the mesh's fields.",
        },
    }
    passed = "Every other field (tools, response_format, ...) reaches the engine unchanged."
    outcome = {"$ref": REF.format(name="Outcome")}
    answer: Json = {
        "id": text,
        "object": text,
        "created": whole,
        "model": text,
        "choices": {"type": "array", "items": anything},
        "usage": anything,
        "hexflow": outcome,
    }
    row: Json = {
        "query_id": text,
        "tenant": text,
        "workflow": text,
        "model": text,
        "arrival_s": number,
        "slo_s": number,
        "took_s": number,
        "is_late": flag,
        "outcome": {"enum": [one for one in OUTCOMES if one != "late"]},
        "calls_ended": whole,
        "change": whole,
    }
    listed = {"type": "array", "items": anything}
    return {
        "Error": _object(
            ("error",),
            error=_object(
                ("message", "type", "param", "code"),
                message=text,
                type=text,
                param={"type": ["string", "null"]},
                code=text,
                outcome=outcome,
            ),
        ),
        "Outcome": _object(
            kind=text,
            reason=text,
            detail=text,
            request_id=text,
            query_id=text,
            attempt=whole,
            instance_id=text,
            deadline_s=maybe,
            t_slo_s=maybe,
            slo_defaulted=flag,
            times={"$ref": REF.format(name="CallTimes")},
        ),
        "ChatRequest": {
            **_object(("model", "messages"), messages=listed, **common),
            "description": passed,
        },
        "TextRequest": {
            **_object(("model", "prompt"), prompt=text, **common),
            "description": passed,
        },
        "ChatAnswer": _object(**answer),
        "TextAnswer": _object(**answer),
        "Model": _object(("id",), id=text, object=text, max_model_len=whole, hexflow=anything),
        "QueryState": _object(
            query_id=text,
            state={"enum": ["running", "ended"]},
            events={"type": "array", "items": {"$ref": REF.format(name="QueryEvent")}},
            result={"$ref": REF.format(name="QueryResult")},
        ),
        "QueryRow": _object(**row),
        "QueryDetail": _object(**row, calls=listed, explanation=anything),
        "Instance": _object(
            instance_id=text,
            gpu=text,
            model=text,
            phase=text,
            running=whole,
            capacity=whole,
            waiting=whole,
            backlog_s=number,
            kv_used=number,
            p95_s=maybe,
            drift=maybe,
            waiting_by_slack={
                "type": ["array", "null"],
                "description": "Calls too late to start in time, under 5 s, under 30 s, more. "
                "Null: nobody watches the events, or the policy does not order by urgency.",
                "items": whole,
            },
            first_waiting=listed,
        ),
        "AlphaChange": _object(
            pool=text,
            alpha=number,
            previous_alpha=maybe,
            reason=text,
            predicted_p95_s=maybe,
            at_s=number,
        ),
        "Agent": _object(
            agent_id=text,
            databases={
                "type": ["array", "null"],
                "description": "Names that it knows; null: too many to list.",
                "items": text,
            },
            workflows={"type": "array", "items": text},
        ),
        "Mesh": _object(
            agents={"type": "array", "items": {"$ref": REF.format(name="Agent")}},
            fleet={"type": "array", "items": {"$ref": REF.format(name="Instance")}},
            queries={"type": "array", "items": {"$ref": REF.format(name="QueryRow")}},
            alpha={"type": "array", "items": {"$ref": REF.format(name="AlphaChange")}},
            summary=anything,
            history=listed,
            dead_letters=whole,
            change=whole,
        ),
    }
