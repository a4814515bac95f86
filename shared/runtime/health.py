"""Probes that mean progress: `/live`, `/ready`, `/metrics`.

A loop that must not stall registers a *pulse* and beats it on every turn. `/live` fails when a
pulse is overdue, so a consumer that hangs is restarted although its process lives.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared.errors import ConfigError
from shared.ports import Clock
from shared.runtime.metrics import Metrics

CLOSE_S = 2.0


class Health:
    """Progress of one service.

    Args:
        clock: Monotonic time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pulses: dict[str, tuple[float, float]] = {}  # name -> (last beat, longest silence)
        self._not_ready: dict[str, str] = {"start": "starting"}

    def beat(self, name: str, max_silence_s: float = 30.0) -> None:
        """Note that a loop made a turn; wall seconds."""
        self._pulses[name] = (self._clock.monotonic_s(), max_silence_s)

    def retire(self, name: str) -> None:
        """Forget a loop that ended on purpose."""
        self._pulses.pop(name, None)

    def block(self, cause: str, detail: str) -> None:
        """Make the service unready for a cause until `clear(cause)`."""
        self._not_ready[cause] = detail

    def clear(self, cause: str = "start") -> None:
        """Remove a cause of unreadiness."""
        self._not_ready.pop(cause, None)

    def overdue(self) -> list[str]:
        """Return the loops that made no progress within their bound."""
        return [name for name, ratio in self.silences().items() if ratio > 1.0]

    def silences(self) -> dict[str, float]:
        """Return each loop's time since its last turn as a share of its bound."""
        now_s = self._clock.monotonic_s()
        return {name: (now_s - at_s) / bound_s for name, (at_s, bound_s) in self._pulses.items()}

    def unready_causes(self) -> dict[str, str]:
        """Return why the service is not ready; empty when it is."""
        return dict(self._not_ready)


def _app(health: Health, metrics: Metrics) -> Starlette:
    async def live(_: Request) -> Response:
        overdue = health.overdue()
        return JSONResponse({"overdue": overdue}, status_code=503 if overdue else 200)

    async def ready(_: Request) -> Response:
        causes = health.unready_causes()
        return JSONResponse({"causes": causes}, status_code=503 if causes else 200)

    async def expose(_: Request) -> Response:
        metrics.ready.set(0 if health.unready_causes() else 1)
        metrics.silence.clear()
        for loop, ratio in health.silences().items():
            metrics.silence.set(ratio, loop=loop)
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[Route("/live", live), Route("/ready", ready), Route("/metrics", expose)]
    )


@asynccontextmanager
async def probes(
    health: Health, metrics: Metrics, *, host: str, port: int | None
) -> AsyncIterator[None]:
    """Serve the probes while the context is open; `port=None` serves nothing.

    Args:
        health: What `/live` and `/ready` report.
        metrics: What `/metrics` reports.
        host: Address to listen on.
        port: TCP port, or None.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    if port is None:
        yield
        return
    listener = _listener(host, port)
    config = uvicorn.Config(_app(health, metrics), log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]  # signals are ours
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]), name="probes")
        try:
            yield
        finally:
            # A server that is cancelled keeps its port, which the next try of a service needs.
            server.should_exit = True
            await asyncio.wait({serving}, timeout=CLOSE_S)


def _listener(host: str, port: int) -> socket.socket:
    # Bound here, because uvicorn ends the whole process when it cannot bind.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        raise ConfigError(f"cannot serve probes on {host} port {port}: {exc.strerror}") from exc
