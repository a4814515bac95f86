"""A TCP proxy that can be cut: what stands between a far worker and its servers in a chaos run.

While it is cut nothing passes, and nobody is told: connections stay open and new ones are taken,
as with a network that drops packets. Afterwards what was held goes on its way, late.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

from shared.adapters.local_process import LOOPBACK

CHUNK_BYTES = 65_536


class Proxy:
    """Forwards loopback connections to a port; open with `open`.

    Args:
        target_port: Where to.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls, target_port: int) -> AsyncIterator[Self]:
        """Listen on a port of its own while the block lasts."""
        proxy = cls(target_port)
        server = await asyncio.start_server(proxy._serve, LOOPBACK, 0)
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()
            for task in list(proxy._tasks):
                task.cancel()

    def cut(self) -> None:
        """Let nothing pass from now on."""
        self._passes.clear()

    def heal(self) -> None:
        """Let everything pass again, what was held first."""
        self._passes.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            await self._passes.wait()
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self.target_port)
            try:
                await self._both(reader, writer, far_reader, far_writer)
            finally:
                far_writer.close()
        except OSError:
            pass  # the server is down: the client sees its connection closed
        finally:
            writer.close()

    async def _both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        """Forward both ways until either side ends."""
        async with asyncio.TaskGroup() as group:
            ways = {
                group.create_task(self._forward(reader, far_writer), name="proxy-forth"),
                group.create_task(self._forward(far_reader, writer), name="proxy-back"),
            }
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
