"""`/api/...`: what the dashboard shows, as JSON and as server-sent events.

An administrator's key sees everything; another tenant's key sees its own queries. No answer holds
prompt or answer text, unless the gateway was set up to show it and is asked for it.
"""

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.access import Access
from services.gateway.asgi import json_response, send_events, unless_gone
from services.gateway.board import Board
from services.gateway.dead_letters import DeadLetterDesk
from services.gateway.fields import tenants_query_id
from services.gateway.live import Live, alpha_view
from services.gateway.problems import Problem
from shared.ports import Clock

MAX_ROWS = 2_000
OUTCOMES = ("running", "completed", "failed", "rejected", "evicted", "cancelled", "late")


class MeshRoutes:
    """Handlers of the dashboard's API.

    Args:
        live: The present view.
        board: Queries.
        letters: Dead letters.
        access: Who is asking.
        clock: Mesh clock.
        shows_text: Whether message text may be shown to administrators.
    """

    def __init__(
        self,
        *,
        live: Live,
        board: Board,
        letters: DeadLetterDesk,
        access: Access,
        clock: Clock,
        shows_text: bool,
    ) -> None:
        self._live = live
        self._board = board
        self._letters = letters
        self._access = access
        self._clock = clock
        self._shows_text = shows_text

    async def mesh(self, request: Request) -> Response:
        """Answer `GET /api/mesh`: everything a dashboard begins with."""
        self._access.admin(request.headers)
        limit = _number(request, "limit", 1_000, MAX_ROWS)
        await self._live.read_lines()
        return json_response({**self._live.snapshot(limit), "shows_text": self._shows_text})

    async def events(self, request: Request) -> Response:
        """Answer `GET /api/events`: changes, once per period."""
        self._access.admin(request.headers)
        return EventResponse(self._live.events())

    async def fleet(self, request: Request) -> Response:
        """Answer `GET /api/fleet`."""
        self._access.admin(request.headers)
        await self._live.read_lines()
        return json_response({"data": self._live.fleet_view()})

    async def queries(self, request: Request) -> Response:
        """Answer `GET /api/queries?tenant=&outcome=&limit=`."""
        tenant = self._access.tenant(request.headers)
        wanted = request.query_params.get("tenant")
        outcome = request.query_params.get("outcome")
        if outcome is not None and outcome not in OUTCOMES:
            text = f"outcome: one of {', '.join(OUTCOMES)}"
            raise Problem(400, text, code="invalid_value", param="outcome")
        rows = self._board.rows(
            self._clock.now_s(),
            tenant=wanted if tenant.is_admin else tenant.name,
            outcome=outcome,
            limit=_number(request, "limit", 100, MAX_ROWS),
        )
        return json_response({"data": rows})

    async def query(self, request: Request) -> Response:
        """Answer `GET /api/queries/{query_id}`: its calls, and where its time went."""
        tenant = self._access.tenant(request.headers)
        given, now_s = request.path_params["query_id"], self._clock.now_s()
        found = self._board.query(given, now_s)
        if found is None and not tenant.is_admin:
            found = self._board.query(tenants_query_id(tenant.name, given), now_s)
        if found is None or not (tenant.is_admin or found["tenant"] == tenant.name):
            raise Problem(404, "no such query is remembered", code="not_found")
        return json_response(found)

    async def alpha(self, request: Request) -> Response:
        """Answer `GET /api/alpha`: its changes, oldest first, with the tuner's reasons."""
        self._access.admin(request.headers)
        return json_response({"data": [alpha_view(update) for update in self._board.alphas]})

    async def dead_letters(self, request: Request) -> Response:
        """Answer `GET /api/dead-letters?limit=`."""
        self._access.admin(request.headers)
        rows = self._letters.rows(_number(request, "limit", 200, MAX_ROWS))
        return json_response({"data": rows, "seen": self._letters.num_seen})

    async def dead_letter_text(self, request: Request) -> Response:
        """Answer `GET /api/dead-letters/{offset}/text`, if the gateway may show text."""
        self._access.admin(request.headers)
        if not self._shows_text:
            text = "this gateway shows no text; GATEWAY_SHOWS_TEXT=true changes that"
            raise Problem(403, text, code="text_hidden")
        return json_response(await self._letters.text(request.path_params["offset"]))

    async def replay(self, request: Request) -> Response:
        """Answer `POST /api/dead-letters/{offset}/replay?again=`."""
        self._access.admin(request.headers)
        again = request.query_params.get("again") == "true"
        return json_response(await self._letters.replay(request.path_params["offset"], again=again))


class EventResponse(Response):
    """Sends a stream of events until it or its client ends.

    Args:
        events: What to send.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        del scope
        await unless_gone(receive, send_events(send, self._events))


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isdecimal() or not 0 < int(text) <= most:
        raise Problem(400, f"{name}: 1 to {most}", code="invalid_value", param=name)
    return int(text)
