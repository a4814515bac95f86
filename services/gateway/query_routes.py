"""`/v1/queries`: ask an agent a question, watch it work, come back for the answer, cancel."""

import hashlib
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.access import Access
from services.gateway.admission import Admission
from services.gateway.agents import Agents
from services.gateway.asgi import json_response, read_body, send_events, send_json, unless_gone
from services.gateway.fields import tenants_query_id
from services.gateway.fleet import Fleet
from services.gateway.openai_answers import event
from services.gateway.openai_requests import parse_object
from services.gateway.params import GatewayParams
from services.gateway.problems import CLIENT_CLOSED, Problem, wrong_fields
from services.gateway.query_desk import OpenQuery, QueryDesk, result_view
from services.gateway.tenants import Tenant
from shared.contracts.messages import Count, Id, Name, QueryRequest

IDEMPOTENCY = "idempotency-key"


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/queries`.

    Attributes:
        question: What is asked.
        database: Name of a database that the agents know; empty: their only one.
        hint: Further knowledge that belongs to the question.
        workflow: Workflow that answers.
        inputs: Further named inputs of other workflows.
        model: Model that answers; empty: the agents' default.
        slo_s: Deadline after its arrival, mesh seconds; None: the tenant's default.
        max_rows: Most rows wanted; 0: the agents' default.
        query_id: Its id; None: from the idempotency key, else a new one.
        stream: Whether to send events while it runs, or only the result at the end.
        tenant: Who asks; believed only where no API keys are set up.
    """

    question: Annotated[str, Meta(min_length=1, max_length=100_000)]
    database: Annotated[str, Meta(max_length=128)] = ""
    hint: Annotated[str, Meta(max_length=100_000)] = ""
    workflow: Name = "text2sql"
    inputs: dict[str, Any] = {}
    model: Annotated[str, Meta(max_length=128)] = ""
    slo_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    max_rows: Count = 0
    query_id: Id | None = None
    stream: bool = True
    tenant: Name | None = None


_STATUS = {
    "completed": 200,
    "unanswered": 200,
    "failed": 502,
    "rejected": 400,
    "evicted": 504,
    "cancelled": CLIENT_CLOSED,
}


class QueryRoutes:
    """Handlers of the query API.

    Args:
        desk: Asks.
        access: Says who is asking.
        admission: Says who gets in.
        agents: Says who could answer.
        fleet: The instances.
        params: Bounds.
    """

    def __init__(
        self,
        *,
        desk: QueryDesk,
        access: Access,
        admission: Admission,
        agents: Agents,
        fleet: Fleet,
        params: GatewayParams,
    ) -> None:
        self._desk = desk
        self._agents = agents
        self._fleet = fleet
        self._access = access
        self._admission = admission
        self._params = params

    async def ask(self, request: Request) -> Response:
        """Answer `POST /v1/queries`."""
        self._access.tenant(request.headers)
        raw = await read_body(
            request, max_bytes=self._params.max_body_bytes, timeout_s=self._params.body_timeout_s
        )
        try:
            question = msgspec.convert(parse_object(raw), Question)
        except msgspec.ValidationError as exc:
            text, param = wrong_fields(exc, Question.__struct_fields__)
            raise Problem(400, text, code="invalid_value", param=param) from exc
        if not question.question.strip():
            raise Problem(400, "there is no question", code="invalid_value", param="question")
        tenant = self._access.tenant(request.headers, question.tenant)
        key = request.headers.get(IDEMPOTENCY)
        asked = self._request(question, tenant, key)
        async with AsyncExitStack() as place:
            if self._desk.find(asked.query_id) is None:
                await place.enter_async_context(self._admission.place(tenant))
                if not self._params.asks_unannounced:
                    await self._agents.check(asked)
                if asked.model:
                    named = self._fleet.named(asked.model)
                    asked = msgspec.structs.replace(asked, model=named)
            query = await self._desk.ask(asked, place)
        return QueryResponse(query, streams=question.stream)

    async def look(self, request: Request) -> Response:
        """Answer `GET /v1/queries/{query_id}`: its state, or its events with `?stream=true`."""
        tenant = self._access.tenant(request.headers)
        query_id = self._query_id(tenant, request.path_params["query_id"])
        query = self._desk.find(query_id)
        if query is not None and _may_see(tenant, query.request.tenant):
            if request.query_params.get("stream") == "true":
                return QueryResponse(query, streams=True)
            return json_response(view(query))
        known = await self._desk.look(query_id)
        if known is None or not _may_see(tenant, known.tenant):
            raise Problem(404, "no such query is known", code="not_found")
        state = "ended" if known.result is not None else "running"
        return json_response({"query_id": query_id, "state": state, "result": known.result})

    async def cancel(self, request: Request) -> Response:
        """Answer `DELETE /v1/queries/{query_id}`: cancel it and all its calls."""
        tenant = self._access.tenant(request.headers)
        query_id = self._query_id(tenant, request.path_params["query_id"])
        query = self._desk.find(query_id)
        owner, is_over = "", False
        if query is not None:
            owner, is_over = query.request.tenant, query.result is not None
        else:
            known = await self._desk.look(query_id)
            if known is not None:
                owner, is_over = known.tenant, known.result is not None
        if not owner or not _may_see(tenant, owner):
            raise Problem(404, "no such query is known", code="not_found")
        if is_over:
            raise Problem(409, "it has ended already", code="already_ended")
        await self._desk.cancel(query_id)
        return json_response({"query_id": query_id, "state": "cancelling"}, status=202)

    def _request(self, asked: Question, tenant: Tenant, key: str | None) -> QueryRequest:
        if asked.query_id is not None:
            query_id = asked.query_id
        elif key:
            query_id = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        else:
            query_id = uuid.uuid4().hex
        return QueryRequest(
            query_id=self._query_id(tenant, query_id),
            workflow=asked.workflow,
            question=asked.question,
            database=asked.database,
            hint=asked.hint,
            inputs=asked.inputs,
            tenant=tenant.name,
            model=asked.model,
            slo_s=asked.slo_s if asked.slo_s is not None else tenant.slo_s,
            max_rows=asked.max_rows,
            events=True,
        )

    def _query_id(self, tenant: Tenant, query_id: str) -> str:
        if self._access.tenants.is_open or (tenant.is_admin and "/" in query_id):
            return query_id
        return tenants_query_id(tenant.name, query_id)


class QueryResponse(Response):
    """Tells of a question until its result; a client that leaves leaves it running.

    Args:
        query: The question.
        streams: Whether to send events, or the result alone.
    """

    def __init__(self, query: OpenQuery, *, streams: bool) -> None:
        super().__init__()
        self._query = query
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        del scope
        work = self._stream(send) if self._streams else self._whole(send)
        await unless_gone(receive, work)

    async def _stream(self, send: Send) -> None:
        headers = [("x-hexflow-query-id", self._query.request.query_id)]
        await send_events(send, self._events(), [h for h in headers if h[1].isascii()])

    async def _whole(self, send: Send) -> None:
        async with aclosing(self._query.changes()) as changes:
            async for _ in changes:
                pass
        found = view(self._query)
        result = self._query.result
        kind = result.kind if result is not None else "failed"
        status = _STATUS[kind]
        if status >= 400 and result is not None:
            problem = Problem(status, result.detail or kind, code=result.reason or kind)
            await send_json(send, {**problem.body(), **found}, status=status)
            return
        await send_json(send, found)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        query = self._query
        yield event({"query_id": query.request.query_id, "state": "running"}, "query")
        async with aclosing(query.changes()) as changes:
            async for one in changes:
                yield event(msgspec.to_builtins(one), one.kind)
        if query.result is not None:
            yield event(result_view(query.result), "result")


def view(query: OpenQuery) -> dict[str, Any]:
    """Return a question's state as JSON for the client."""
    return {
        "query_id": query.request.query_id,
        "state": "ended" if query.result is not None else "running",
        "arrival_s": query.arrival_s,
        "events": [msgspec.to_builtins(one) for one in query.events],
        "result": result_view(query.result) if query.result is not None else None,
    }


def _may_see(tenant: Tenant, owner: str) -> bool:
    return tenant.is_admin or tenant.name == owner
