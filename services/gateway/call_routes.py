"""`/v1/chat/completions`, `/v1/completions`, `/v1/models`: the OpenAI API."""

import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.access import Access
from services.gateway.admission import Admission
from services.gateway.asgi import (
    ClientGoneError,
    json_response,
    read_body,
    send_events,
    send_json,
    unless_gone,
)
from services.gateway.calls import CallDesk, OpenCall
from services.gateway.chunk_reader import Stream
from services.gateway.fields import MeshFields, mesh_fields, needs_of, tenants_query_id
from services.gateway.fleet import Fleet
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai_answers import (
    Shape,
    answer,
    error_event,
    first_events,
    last_events,
    text_event,
)
from services.gateway.openai_requests import Asked, parse_chat, parse_object, parse_text
from services.gateway.params import GatewayParams
from services.gateway.problems import Problem, model_not_found, problem_of
from services.gateway.query_memory import QueryMemory
from services.gateway.tenants import Tenant
from shared.contracts.messages import CallOutcome, StageRequest
from shared.ports import Clock

MAX_PARENTS = 64
IDEMPOTENCY = "idempotency-key"
Parse = Callable[[dict[str, Any]], Asked]


class CallRoutes:
    """Handlers of the OpenAI API.

    Args:
        desk: Takes calls to the mesh.
        fleet: Says which models there are.
        access: Says who is asking.
        admission: Says who gets in.
        memory: Says where in its query a call is.
        clock: Mesh clock.
        params: Bounds.
        metrics: Counts.
    """

    def __init__(
        self,
        *,
        desk: CallDesk,
        fleet: Fleet,
        access: Access,
        admission: Admission,
        memory: QueryMemory,
        clock: Clock,
        params: GatewayParams,
        metrics: GatewayMetrics,
    ) -> None:
        self.desk = desk
        self.admission = admission
        self.metrics = metrics
        self._fleet = fleet
        self._access = access
        self._memory = memory
        self._clock = clock
        self._params = params

    async def chat(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        return await self._call(request, parse_chat)

    async def text(self, request: Request) -> Response:
        """Answer `POST /v1/completions`."""
        return await self._call(request, parse_text)

    async def models(self, request: Request) -> Response:
        """Answer `GET /v1/models`."""
        self._access.tenant(request.headers)
        return json_response({"object": "list", "data": self._fleet.models()})

    async def model(self, request: Request) -> Response:
        """Answer `GET /v1/models/{model}`."""
        self._access.tenant(request.headers)
        wanted = request.path_params["model"]
        for found in self._fleet.models():
            if found["id"] == wanted:
                return json_response(found)
        raise model_not_found(wanted, self._fleet.offered())

    def problem_of(self, outcome: CallOutcome, model: str) -> Problem:
        """Return what a client is told of a call that did not complete."""
        return problem_of(
            outcome,
            is_model_served=any(True for _ in self._fleet.serving(model)),
            retry_after_s=self._params.retry_after_s,
        )

    async def _call(self, request: Request, parse: Parse) -> Response:
        self._access.tenant(request.headers)  # nobody without a key makes us read megabytes
        raw = await read_body(
            request, max_bytes=self._params.max_body_bytes, timeout_s=self._params.body_timeout_s
        )
        body = parse_object(raw)
        fields = mesh_fields(request.headers, body)
        tenant = self._access.tenant(request.headers, fields.tenant)
        asked = parse(body)
        asked = msgspec.structs.replace(asked, model=self._fleet.named(asked.model))
        key = request.headers.get(IDEMPOTENCY)
        call = self._request(asked, fields, tenant, body, key)
        late_s = fields.late_s if fields.late_s is not None else self._params.late_s
        shape = Shape(
            request_id=call.request_id,
            model=asked.model,
            created=int(time.time()),
            is_chat=asked.is_chat,
        )
        return CallResponse(
            self,
            tenant,
            call,
            asked,
            shape,
            late_s,
        )

    def _request(
        self,
        asked: Asked,
        fields: MeshFields,
        tenant: Tenant,
        body: dict[str, Any],
        idempotency_key: str | None,
    ) -> StageRequest:
        query_id = "" if fields.query_id is None else self._query_id(tenant, fields.query_id)
        now_s = self._clock.now_s()
        place = self._memory.begin(query_id, fields.stage, now_s) if query_id else None
        parents = fields.parents
        if parents is None:
            parents = place.parents[-MAX_PARENTS:] if place else ()
        iteration = fields.iteration
        if iteration is None:
            iteration = place.iteration if place else 0
        think_s = fields.think_s
        if think_s is None:
            think_s = place.think_s if place else 0.0
        return StageRequest(
            request_id=_request_id(tenant, idempotency_key),
            query_id=query_id,
            workflow=fields.workflow,
            stage=fields.stage,
            iteration=iteration,
            sibling=fields.sibling,
            siblings=max(fields.siblings, fields.sibling + 1),
            parents=parents,
            tenant=tenant.name,
            model=asked.model,
            needs=needs_of(body, fields, self._fleet.features(asked.model)),
            messages=asked.messages,
            prompt=asked.prompt,
            max_tokens=asked.max_tokens,
            sampling=asked.sampling,
            extra=asked.extra,
            stream=asked.stream,
            prefix=fields.prefix,
            arrival_s=place.arrival_s if place else None,
            slo_s=fields.slo_s if fields.slo_s is not None else tenant.slo_s,
            think_s=think_s,
        )

    def _query_id(self, tenant: Tenant, query_id: str) -> str:
        """Return a query's id on the mesh: no tenant can name, or cancel, another's query."""
        if self._access.tenants.is_open:
            return query_id
        return tenants_query_id(tenant.name, query_id)


def _request_id(tenant: Tenant, idempotency_key: str | None) -> str:
    """Return a call's id: the same for the same idempotency key, else new."""
    if not idempotency_key:
        return uuid.uuid4().hex
    text = f"{tenant.name}\x1f{idempotency_key}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class CallResponse(Response):
    """Runs one call and answers with what comes of it.

    Args:
        routes: Where the call is made.
        tenant: Who asks.
        call: The call.
        asked: What the client wants.
        shape: How its answer begins.
        late_s: How long after the deadline an answer is still wanted, mesh seconds.
    """

    def __init__(
        self,
        routes: CallRoutes,
        tenant: Tenant,
        call: StageRequest,
        asked: Asked,
        shape: Shape,
        late_s: float,
    ) -> None:
        super().__init__()
        self._routes = routes
        self._tenant = tenant
        self._call = call
        self._asked = asked
        self._shape = shape
        self._late_s = late_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call; a client that leaves cancels it."""
        del scope
        try:
            await unless_gone(receive, self._run(send))
        except ClientGoneError:
            self._routes.metrics.gone.add()
            raise

    async def _run(self, send: Send) -> None:
        desk, call = self._routes.desk, self._call
        async with self._routes.admission.place(self._tenant):
            reading = desk.reading(call) if call.stream else nullcontext(Stream())
            with reading as stream:
                async with desk.call(call, self._late_s) as opened:
                    if call.stream:
                        await self._stream(send, opened, stream)
                    else:
                        await self._whole(send, opened)

    async def _whole(self, send: Send, opened: OpenCall) -> None:
        outcome = await self._routes.desk.outcome(opened)
        if outcome.kind != "completed":
            raise self._routes.problem_of(outcome, self._shape.model)
        await send_json(send, answer(self._shape, outcome), headers=_headers(outcome))

    async def _stream(self, send: Send, opened: OpenCall, stream: Stream) -> None:
        headers = [
            ("x-hexflow-request-id", self._call.request_id),
            ("x-hexflow-query-id", self._call.effective_query_id),
        ]
        await send_events(send, self._events(opened, stream), headers)

    async def _events(self, opened: OpenCall, stream: Stream) -> AsyncGenerator[bytes, None]:
        """Yield the answer's events; a Problem before the first of them is raised."""
        has_begun = False
        try:
            async with aclosing(self._routes.desk.texts(opened, stream)) as texts:
                async for text in texts:
                    head = b"" if has_begun else first_events(self._shape)
                    has_begun = True
                    yield head + text_event(self._shape, text)
            outcome = await self._routes.desk.outcome(opened)
            if outcome.kind != "completed":
                raise self._routes.problem_of(outcome, self._shape.model)
        except Problem as problem:
            if not has_begun:
                raise
            yield error_event(problem)
            return
        head = b"" if has_begun else first_events(self._shape)
        include_usage = self._asked.include_usage
        yield head + last_events(self._shape, outcome, include_usage=include_usage)


def _headers(outcome: CallOutcome) -> list[tuple[str, str]]:
    times = outcome.times
    found = [
        ("x-hexflow-request-id", outcome.request_id),
        ("x-hexflow-query-id", outcome.query_id),
        ("x-hexflow-instance", outcome.instance_id),
        ("x-hexflow-attempt", str(outcome.attempt)),
    ]
    if times.started_at_s is not None and times.ready_at_s is not None:
        found.append(("x-hexflow-queue-s", f"{times.started_at_s - times.ready_at_s:.6f}"))
    return [(name, value) for name, value in found if value.isascii() and value.isprintable()]
