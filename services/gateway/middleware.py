"""Around every request: its id, its place in the metrics, and errors in OpenAI's shape."""

import asyncio
import ipaddress
import re
import time
import uuid
from collections.abc import Callable

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.asgi import ClientGoneError, send_json
from services.gateway.metrics import GatewayMetrics
from services.gateway.open_requests import OpenRequests
from services.gateway.openai_answers import error_event
from services.gateway.problems import CLIENT_CLOSED, Problem
from shared.errors import MeshError, TransientError
from shared.runtime.tracing import NO_TRACES, Traces

REQUEST_ID = b"x-request-id"
PARENT = b"traceparent"
HTTP_ERROR = 500
ORDINARY = (503, 504)
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
        is_host_allowed: Whether a request may name this host; see `loopback_names`.
        requests: Ends what is under way when the gateway has to go.
        traces: Where the spans of calls and questions go.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: GatewayMetrics,
        is_host_allowed: Callable[[str], bool],
        requests: OpenRequests,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._requests = requests
        self._app = app
        self._metrics = metrics
        self._is_host_allowed = is_host_allowed
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # makes starlette raise, instead of answering in a shape of its own
        answered = _Answered(scope, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await answered.say(refusal)
            return
        began_s = time.perf_counter()
        try:
            await self._unless_ended(scope, receive, answered)
        except ClientGoneError:
            answered.status = answered.status or CLIENT_CLOSED
        except Exception as exc:
            if answered.status:  # headers are out: all that is left is to cut the connection
                log.exception("answer_broken", path=scope["path"])
                raise
            await answered.say(_problem(exc, scope))
        finally:
            self._count(scope, answered.status, time.perf_counter() - began_s)

    async def _unless_ended(self, scope: Scope, receive: Receive, answered: "_Answered") -> None:
        """Answer one request; when the gateway has to go before, say that."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine that is awaited runs in a task
        with self._requests.holding(task):
            try:
                if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
                    await self._traced(scope, receive, answered)
                else:
                    await self._app(scope, receive, answered.send)
            except asyncio.CancelledError:
                if not self._requests.is_cut_off(task):
                    raise
                await answered.cut_off()

    def _refusal(self, scope: Scope) -> Problem | None:
        """Return why a browser that was led here by another site may not do this."""
        if _is_foreign(scope):
            return Problem(403, "a page of another site may not do this", code="cross_site")
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        if self._is_host_allowed(host.decode("latin-1")):
            return None
        text = "without API keys only requests to this machine's own names are answered"
        return Problem(403, text, code="wrong_host")

    async def _traced(self, scope: Scope, receive: Receive, answered: "_Answered") -> None:
        parents = [value.decode("latin-1") for name, value in scope["headers"] if name == PARENT]
        known = {"http.request.method": scope["method"], "url.path": scope["path"]}
        with self._traces.around(
            f"{scope['method']} {scope['path']}",
            "server",
            parents[0] if parents else None,
            attributes=known,
        ) as span:
            try:
                await self._app(scope, receive, answered.send)
            finally:
                status = answered.status or None
                is_error = status is not None and status >= HTTP_ERROR
                span.end(
                    error=str(status) if is_error else None,
                    attributes={"http.response.status_code": status},
                )

    def _count(self, scope: Scope, status: int, took_s: float) -> None:
        route = getattr(scope.get("endpoint"), "__name__", "none")
        self._metrics.requests.add(route=route, status=str(status))
        if status >= HTTP_ERROR:
            # What is refused, or late, is told to the client and counted; it is no defect here.
            tell = log.info if status in ORDINARY else log.warning
            tell("request_ended", route=route, status=status, took_s=round(took_s, 3))
        self._metrics.request_s.observe(took_s, kind=route)


class _Answered:
    """Notes the status, and puts the request's id into the headers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._request_id = _request_id(scope)
        self._is_stream = False
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = dict(message.get("headers", ()))
            known = set(given)
            self._is_stream = given.get(b"content-type", b"").startswith(b"text/event-stream")
            extra = [(name, value) for name, value in SECURITY if name not in known]
            headers = [*message.get("headers", ()), (REQUEST_ID, self._request_id), *extra]
            message = {**message, "headers": headers}
        await self._send(message)

    async def say(self, problem: Problem) -> None:
        await send_json(self.send, problem.body(), status=problem.status, headers=problem.headers())

    async def cut_off(self) -> None:
        """Say that the gateway has to go: as the whole answer, or as the end of what has begun."""
        problem = Problem(
            503,
            "this gateway is stopping; ask again",
            code="stopping",
            kind="server_error",
            retry_after_s=1.0,
        )
        if not self.status:
            await self.say(problem)
            return
        last = error_event(problem) if self._is_stream else b""
        await self.send({"type": "http.response.body", "body": last})


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


def loopback_names(host: str) -> bool:
    """Return whether a Host header names this machine itself.

    A site may let its own name point here and then read what it likes, as the browser takes us for
    that site; where there are no keys, only names that cannot be pointed elsewhere are answered.
    """
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    name = name.strip("[]").lower()
    return name in ("", "localhost") or name.endswith(".localhost") or _is_loopback_address(name)


def _is_loopback_address(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
