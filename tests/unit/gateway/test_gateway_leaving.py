"""What a server that is to end does with connections that clients keep, or have just opened."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from services.gateway.open_requests import OpenRequests
from services.gateway.server import listener, serving

LONG_S = 600.0
HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass
class Server:
    """A server that answers `ok` and ends when it is told to."""

    port: int
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def is_closed(self) -> bool:
        """Return whether it takes no more connections."""
        try:
            _, writer = await self.connect()
        except ConnectionRefusedError:
            return True
        writer.close()
        return False


async def say_ok(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request."""
    del scope, receive
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serve(*, linger_s: float) -> AsyncIterator[Server]:
    """Run a server that waits long for what it waits for; cut off with the block."""
    with listener("127.0.0.1", 0) as sock:
        server = Server(port=sock.getsockname()[1])
        is_serving = asyncio.Event()

        async def run() -> None:
            async with serving(
                say_ok,
                sock,
                OpenRequests(),
                header_timeout_s=LONG_S,
                drain_s=2 * LONG_S,
                linger_s=linger_s,
                last_head_s=LONG_S,
            ):
                is_serving.set()
                await server.leave.wait()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(run(), name="server")
            await is_serving.wait()
            yield server
            task.cancel()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Read the head of an answer, and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(2) == b"ok"
    return head


async def test_requests_are_answered_for_a_while_and_clients_asked_to_leave():
    """On a connection that is kept as on a new one; each then ends, and no answer is lost."""
    async with serve(linger_s=LONG_S) as server:
        reader, writer = await server.connect()
        writer.write(HEAD)
        assert b"connection: close" not in await answer(reader)
        server.leave.set()
        await asyncio.sleep(0)  # the server hears of it first
        new_reader, new_writer = await server.connect()
        for one, into in ((reader, writer), (new_reader, new_writer)):
            into.write(HEAD)
            assert b"connection: close" in await answer(one)
            assert await one.read() == b""
            into.close()


async def test_what_has_been_begun_is_answered_after_the_last_connection_was_taken():
    """On a connection just opened, and on one with half a head: neither client knows of an end."""
    async with serve(linger_s=0.0) as server:
        fresh, half, idle = [await server.connect() for _ in range(3)]
        half[1].write(HEAD[:10])
        idle[1].write(HEAD)
        await answer(idle[0])  # connections are taken in order
        server.leave.set()
        async with asyncio.timeout(60):
            while not await server.is_closed():
                await asyncio.sleep(0.01)
        fresh[1].write(HEAD)
        half[1].write(HEAD[10:])
        for reader, writer in (fresh, half):
            assert b"connection: close" in await answer(reader)
            assert await reader.read() == b""
            writer.close()
        assert await idle[0].read() == b""
        idle[1].close()


async def test_who_has_nothing_to_ask_holds_no_server_up():
    """A server with an idle connection, and one that was never used, ends by itself."""
    with listener("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        requests = OpenRequests()
        limits = {"header_timeout_s": LONG_S, "drain_s": LONG_S, "last_head_s": 0.01}
        async with serving(say_ok, sock, requests, linger_s=0.01, **limits):
            _, unused = await asyncio.open_connection("127.0.0.1", port)
            reader, idle = await asyncio.open_connection("127.0.0.1", port)
            idle.write(HEAD)
            await answer(reader)
        assert await reader.read() == b""
        unused.close()
        idle.close()
