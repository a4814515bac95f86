"""The HTTP server: uvicorn, with a bound on how long a request's head may take to arrive.

uvicorn closes a connection that idles between requests, but waits for ever for the rest of a head
that began: a few thousand clients that send a byte now and then would hold all connections.

At the end it closes at once every connection that it has not read a head from, and clients that
keep theirs alive send requests into closed ones. So a server that is to end goes on for a while and
asks its clients to come back elsewhere (`connection: close`), and reads what has been begun.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.open_requests import OpenRequests
from shared.errors import ConfigError

BACKLOG = 4_096
KEEP_ALIVE_S = 30
CUT_OFF_WITHIN_S = 5
LAST_HEAD_S = 1.0
MAX_HEAD_BYTES = 64 * 1024


class PatientProtocol(HttpToolsProtocol):
    """Reads requests; closes a connection whose next head is not complete in time."""

    header_timeout_s = 10.0
    last_head_s = LAST_HEAD_S
    is_leaving = False
    """Whether every answer is the last one of its connection."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._is_in_message = False
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the time for a head runs from its first byte, or from the connection."""
        super().data_received(data)
        if self._is_answering():
            self._stop_expecting()
            return
        if not self._is_in_message:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.close()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """Take a complete head."""
        self._is_in_message = True
        self._stop_expecting()
        super().on_headers_complete()
        if self.is_leaving:
            self.ask_to_leave()

    def on_message_complete(self) -> None:
        """Take the end of a body."""
        self._is_in_message = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_expecting()
        super().connection_lost(exc)

    def ask_to_leave(self) -> None:
        """Make the answer under way the last one, where its head can still say so."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """End after the answer under way; a first or begun head is waited for a little."""
        if self.cycle is None or self._num_head_bytes:
            self.loop.call_later(self.last_head_s, self._give_up)
        else:
            super().shutdown()

    def _is_answering(self) -> bool:
        """Return whether a request is being answered: its handler bounds the time then."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _stop_expecting(self) -> None:
        self._num_head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self._is_answering() and not self.transport.is_closing():
            self.transport.close()


def listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise ConfigError(
            f"cannot serve the gateway on {host} port {port}: {exc.strerror}"
        ) from exc


@asynccontextmanager
async def serving(
    app: ASGIApp,
    sock: socket.socket,
    requests: OpenRequests,
    *,
    header_timeout_s: float,
    drain_s: float,
    linger_s: float = 0.0,
    last_head_s: float = LAST_HEAD_S,
) -> AsyncIterator[None]:
    """Serve an application while the block runs; then finish what is open, within a bound.

    Args:
        app: What answers.
        sock: Where to listen.
        requests: Ends what is open then; at once when the block ends with an error.
        header_timeout_s: Longest time for a request's head, wall seconds.
        drain_s: Longest time for open requests at the end, wall seconds.
        linger_s: How much of it new requests are still taken, wall seconds; at most half.
        last_head_s: How long a head is waited for after that, wall seconds.
    """

    class Protocol(PatientProtocol):
        """The connections of this server."""

    Protocol.header_timeout_s, Protocol.last_head_s = header_timeout_s, last_head_s
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="off",
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(drain_s) + CUT_OFF_WITHIN_S,
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]  # signals are ours
    async with _closing(server), asyncio.TaskGroup() as group:
        http = group.create_task(server.serve(sockets=[sock]), name="http")
        try:
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.005)
            yield
            linger_s = min(linger_s, drain_s / 2)
            Protocol.is_leaving = True
            for connection in server.server_state.connections:
                if isinstance(connection, Protocol):
                    connection.ask_to_leave()
            await asyncio.sleep(linger_s)
            server.should_exit = True
            await asyncio.wait([http], timeout=drain_s - linger_s)
        finally:
            server.should_exit = True
            requests.end()


@asynccontextmanager
async def _closing(server: uvicorn.Server) -> AsyncIterator[None]:
    """Listen no more after the block: a server that is cut off leaves that to the loop's end."""
    try:
        yield
    finally:
        for one in getattr(server, "servers", ()):
            one.close()
