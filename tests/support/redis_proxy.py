"""A TCP proxy before a Redis server that delays, loses and counts on command."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from shared.adapters.local_process import LOOPBACK


class RedisProxy:
    """Forwards both ways.

    Attributes:
        url: Where it listens.
        delay_s: Each reply is late by up to this, wall seconds.
        losses_left: So many requests that contain `lossy` reach the server, but their
            connection is cut before the reply.
        lossy: Bytes that mark such a request.
        num_requests: Requests that contained `lossy`.
        num_connections: Connections accepted so far.
    """

    def __init__(self, port: int, rng: random.Random) -> None:
        self.url = ""
        self.delay_s = 0.0
        self.losses_left = 0
        self.lossy = b"EVALSHA"
        self.num_requests = 0
        self.num_connections = 0
        self._port = port
        self._rng = rng

    @classmethod
    @asynccontextmanager
    async def open(cls, port: int, seed: int = 0) -> AsyncIterator[Self]:
        """Listen before the server at a loopback port."""
        proxy = cls(port, random.Random(seed))
        server = await asyncio.start_server(proxy._serve, LOOPBACK, 0)
        proxy.url = f"redis://{LOOPBACK}:{server.sockets[0].getsockname()[1]}/0"
        async with server:
            yield proxy

    async def _serve(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        answers, request = await asyncio.open_connection(LOOPBACK, self._port)
        lost = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                back = group.create_task(self._back(answers, reply, lost), name="back")
                await self._forth(client, request, lost)
                back.cancel()
        except* OSError:
            pass
        finally:
            for writer in (request, reply):
                writer.close()

    async def _forth(
        self, client: asyncio.StreamReader, request: asyncio.StreamWriter, lost: asyncio.Event
    ) -> None:
        while data := await client.read(65_536):
            self.num_requests += data.count(self.lossy)
            if self.losses_left and self.lossy in data:
                self.losses_left -= 1
                lost.set()
            request.write(data)
            await request.drain()

    async def _back(
        self, answers: asyncio.StreamReader, reply: asyncio.StreamWriter, lost: asyncio.Event
    ) -> None:
        while data := await answers.read(65_536):
            if lost.is_set():
                reply.transport.abort()
                return
            if self.delay_s:
                await asyncio.sleep(self._rng.uniform(0, self.delay_s))
            reply.write(data)
            await reply.drain()
