"""Which path is answered by whom."""

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from services.gateway.call_routes import CallRoutes
from services.gateway.metrics import GatewayMetrics
from services.gateway.middleware import Around


def application(calls: CallRoutes, metrics: GatewayMetrics) -> ASGIApp:
    """Return the gateway's ASGI application.

    Args:
        calls: The OpenAI API.
        metrics: Counts requests.
    """
    router = Router(
        [
            Route("/v1/chat/completions", calls.chat, methods=["POST"]),
            Route("/v1/completions", calls.text, methods=["POST"]),
            Route("/v1/models", calls.models, methods=["GET"]),
            Route("/v1/models/{model:path}", calls.model, methods=["GET"]),
        ],
        redirect_slashes=False,
    )
    return Around(router, metrics)
