"""The mesh's own fields of an HTTP call: which query and stage it belongs to, and its deadline.

Three places, the first that names a field wins: headers (`x-hexflow-slo-s: 30`), a `hexflow` object
in the body (`extra_body={"hexflow": {"slo_s": 30}}`), and the body's `metadata`, where OpenAI
allows only texts (`{"hexflow_slo_s": "30"}`). All are optional. Pure.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.problems import Problem, wrong_fields
from shared.contracts.messages import Id, Name, Needs, Seconds
from shared.domain.trace import PrefixPart

HEADER = "x-hexflow-"
BODY_KEY = "hexflow"
METADATA_PREFIX = "hexflow_"
MAX_ID = 128


class MeshFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client may say about a call's place in its query.

    Attributes:
        query_id: The query; None: the call is its own query.
        workflow: Workflow name.
        stage: Stage name.
        iteration: Occurrence of the stage; None: counted by the gateway.
        sibling: Index among the parallel calls of the stage.
        siblings: How many there are.
        parents: Call ids (`id` of earlier answers without `chatcmpl-`) that this one waited for;
            None: worked out by the gateway.
        slo_s: The query's deadline after its arrival, mesh seconds; None: the tenant's default.
        late_s: How long after the deadline an answer is still wanted, mesh seconds; None: the
            gateway's default.
        think_s: Time spent between the parents' answers and this call, mesh seconds; None: as the
            gateway saw it.
        features: Abilities that the instance must have; None: derived from the request.
        prefix: Prefix chain of the prompt, outermost first.
        tenant: Who asks; believed only where no API keys are set up.
    """

    query_id: Id | None = None
    workflow: Name = "default"
    stage: Name = "call"
    iteration: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    sibling: Annotated[int, Meta(ge=0, le=10_000)] = 0
    siblings: Annotated[int, Meta(ge=1, le=10_000)] = 1
    parents: tuple[Id, ...] | None = None
    slo_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    late_s: Seconds | None = None
    think_s: Seconds | None = None
    features: tuple[Name, ...] | None = None
    prefix: tuple[PrefixPart, ...] = ()
    tenant: Name | None = None


_NAMES = frozenset(field.name for field in msgspec.structs.fields(MeshFields))
_LISTS = frozenset({"parents", "features"})


def mesh_fields(headers: Mapping[str, str], body: Mapping[str, Any]) -> MeshFields:
    """Return the mesh's fields of a request.

    Args:
        headers: Lower-case names.
        body: The JSON object.

    Raises:
        Problem: A field is unknown or out of bounds.
    """
    raw: dict[str, Any] = {}
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        raw |= _from_texts(metadata, METADATA_PREFIX)
    own = body.get(BODY_KEY, {})
    if not isinstance(own, dict):
        raise Problem(400, "hexflow: expected an object", code="invalid_value", param=BODY_KEY)
    raw |= own
    raw |= _from_texts(headers, HEADER)
    try:
        return msgspec.convert(raw, MeshFields, strict=False)
    except msgspec.ValidationError as exc:
        text = f"hexflow: {wrong_fields(exc, _NAMES)[0]}"
        raise Problem(400, text, code="invalid_value", param=BODY_KEY) from exc


def tenants_query_id(tenant: str, query_id: str) -> str:
    """Return a query's id on the mesh: no tenant can name, or cancel, another's query.

    An id that the tenant was told, which begins with its name, is taken as it is.
    """
    if query_id.startswith(f"{tenant}/"):
        return query_id
    full = f"{tenant}/{query_id}"
    if len(full) <= MAX_ID:
        return full
    return f"{tenant[:64]}/{hashlib.blake2b(full.encode(), digest_size=16).hexdigest()}"


def _from_texts(texts: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in texts.items():
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix).replace("-", "_")
        if name in _LISTS and isinstance(value, str):
            found[name] = [part.strip() for part in value.split(",") if part.strip()]
        else:
            found[name] = value
    return found


def needs_of(body: Mapping[str, Any], fields: MeshFields, offered: frozenset[str]) -> Needs:
    """Return what an instance must offer.

    Tools and structured output are asked for only where some instance says that it has them: a
    fleet whose instances declare nothing takes every call.

    Args:
        body: The request.
        fields: What the client said.
        offered: Abilities that the model's live instances declare.
    """
    if fields.features is not None:
        return Needs(features=fields.features)
    wanted = []
    if body.get("tools"):
        wanted.append("tools")
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") != "text":
        wanted.append("structured_output")
    return Needs(features=tuple(name for name in wanted if name in offered))
