"""Which path is answered by whom."""

from collections.abc import Callable

from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp

from services.gateway.call_routes import CallRoutes
from services.gateway.dashboard import description, files, health, home
from services.gateway.mesh_routes import MeshRoutes
from services.gateway.metrics import GatewayMetrics
from services.gateway.middleware import Around
from services.gateway.open_requests import OpenRequests
from services.gateway.query_routes import QueryRoutes
from shared.runtime.tracing import NO_TRACES, Traces


def application(
    calls: CallRoutes,
    queries: QueryRoutes,
    mesh: MeshRoutes,
    metrics: GatewayMetrics,
    is_host_allowed: Callable[[str], bool],
    requests: OpenRequests,
    traces: Traces = NO_TRACES,
) -> ASGIApp:
    """Return the gateway's ASGI application.

    Args:
        calls: The OpenAI API.
        queries: The query API.
        mesh: What the dashboard shows.
        metrics: Counts requests.
        is_host_allowed: Whether a request may name this host.
        requests: Ends what is under way when the gateway has to go.
        traces: Where spans go.
    """
    router = Router(
        [
            Route("/", home, methods=["GET"]),
            Route("/dashboard", home, methods=["GET"]),
            Mount("/dashboard", files(), name="dashboard"),
            Route("/v1/chat/completions", calls.chat, methods=["POST"]),
            Route("/v1/completions", calls.text, methods=["POST"]),
            Route("/v1/models", calls.models, methods=["GET"]),
            Route("/v1/models/{model:path}", calls.model, methods=["GET"]),
            Route("/v1/queries", queries.ask, methods=["POST"]),
            Route("/v1/queries/{query_id:path}", queries.look, methods=["GET"]),
            Route("/v1/queries/{query_id:path}", queries.cancel, methods=["DELETE"]),
            Route("/health", health, methods=["GET"]),
            Route("/openapi.json", description, methods=["GET"]),
            Route("/api/mesh", mesh.mesh, methods=["GET"]),
            Route("/api/events", mesh.events, methods=["GET"]),
            Route("/api/fleet", mesh.fleet, methods=["GET"]),
            Route("/api/queries", mesh.queries, methods=["GET"]),
            Route("/api/queries/{query_id:path}", mesh.query, methods=["GET"]),
            Route("/api/alpha", mesh.alpha, methods=["GET"]),
            Route("/api/dead-letters", mesh.dead_letters, methods=["GET"]),
            Route("/api/dead-letters/{offset:int}/text", mesh.dead_letter_text, methods=["GET"]),
            Route("/api/dead-letters/{offset:int}/replay", mesh.replay, methods=["POST"]),
        ],
        redirect_slashes=False,
    )
    return Around(router, metrics, is_host_allowed, requests, traces)
