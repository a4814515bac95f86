"""Around every request: its id, its place in the metrics, and errors in OpenAI's shape."""

import time
import uuid

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.asgi import ClientGoneError, send_json
from services.gateway.metrics import GatewayMetrics
from services.gateway.problems import CLIENT_CLOSED, Problem
from shared.errors import MeshError, TransientError

REQUEST_ID = b"x-request-id"
MAX_REQUEST_ID = 128
SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'"),
)
log = structlog.get_logger(__name__)


class Around:
    """Wraps the application.

    Args:
        app: What answers.
        metrics: Counts requests.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # makes starlette raise, instead of answering in a shape of its own
        answered = _Answered(scope, send)
        if _is_foreign(scope):
            text = "a page of another site may not do this"
            await answered.say(Problem(403, text, code="cross_site"))
            return
        began_s = time.perf_counter()
        try:
            await self._app(scope, receive, answered.send)
        except ClientGoneError:
            answered.status = answered.status or CLIENT_CLOSED
        except Exception as exc:
            if answered.status:  # headers are out: all that is left is to cut the connection
                log.exception("answer_broken", path=scope["path"])
                raise
            await answered.say(_problem(exc, scope))
        finally:
            self._count(scope, answered.status, time.perf_counter() - began_s)

    def _count(self, scope: Scope, status: int, took_s: float) -> None:
        route = getattr(scope.get("endpoint"), "__name__", "none")
        self._metrics.requests.add(route=route, status=str(status))
        self._metrics.request_s.observe(took_s, kind=route)


class _Answered:
    """Notes the status, and puts the request's id into the headers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._request_id = _request_id(scope)
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            known = {name for name, _ in message.get("headers", ())}
            extra = [(name, value) for name, value in SECURITY if name not in known]
            headers = [*message.get("headers", ()), (REQUEST_ID, self._request_id), *extra]
            message = {**message, "headers": headers}
        await self._send(message)

    async def say(self, problem: Problem) -> None:
        await send_json(self.send, problem.body(), status=problem.status, headers=problem.headers())


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == REQUEST_ID and 0 < len(value) <= MAX_REQUEST_ID:
            return bytes(value)
    return uuid.uuid4().hex.encode()


def _problem(exc: Exception, scope: Scope) -> Problem:
    if isinstance(exc, Problem):
        return exc
    if isinstance(exc, HTTPException):
        return Problem(exc.status_code, str(exc.detail), code="http_error")
    if isinstance(exc, TransientError):
        return Problem(503, str(exc), code=exc.reason, kind="server_error", retry_after_s=5.0)
    log.error("request_failed", path=scope["path"], exc_info=exc)
    code = exc.reason if isinstance(exc, MeshError) else "internal_error"
    return Problem(500, "an error inside the gateway", code=code, kind="server_error")


def _is_foreign(scope: Scope) -> bool:
    """Return whether a browser sends this on behalf of another site, to change something here."""
    if scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return False
    sites = [value for name, value in scope["headers"] if name == b"sec-fetch-site"]
    return any(site not in (b"same-origin", b"none") for site in sites)
