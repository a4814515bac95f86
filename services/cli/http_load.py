"""An open-loop HTTP load from a process of its own, so that sending costs the server nothing.

Requests are due at even intervals and are sent when they are due, whether or not earlier ones have
been answered; latency counts from the due time, so a server that stalls shows.
"""

import asyncio
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec

from shared.runtime.lifecycle import loop_factory

MAX_CONNECTIONS = 1_000


class HttpLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What to send.

    Attributes:
        host: Where to.
        port: Where to.
        path: Path of every request.
        body: Body of every request, JSON.
        rate: Requests per second.
        duration_s: How long, wall seconds.
        warmup_s: Requests due before this are not counted.
    """

    host: str
    port: int
    path: str
    body: bytes
    rate: float
    duration_s: float
    warmup_s: float = 1.0


class HttpTimes(msgspec.Struct, kw_only=True):
    """What came back.

    Attributes:
        took_s: From due to answered, per counted request.
        to_engine_s: From sent to the engine's start, where the answer tells.
        from_engine_s: From the engine's end to answered, where the answer tells.
        sent: Requests sent.
        failed: Requests without a 200.
        elapsed_s: From the first due time to the last answer.
    """

    took_s: list[float] = []
    to_engine_s: list[float] = []
    from_engine_s: list[float] = []
    sent: int = 0
    failed: int = 0
    elapsed_s: float = 0.0


async def send_http_load(load: HttpLoad) -> HttpTimes:
    """Send a load from another process and return what came back."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        raw = await loop.run_in_executor(executor, _in_process, msgspec.json.encode(load))
    return msgspec.json.decode(raw, type=HttpTimes)


def _in_process(raw: bytes) -> bytes:
    load = msgspec.json.decode(raw, type=HttpLoad)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return msgspec.json.encode(runner.run(_Sender(load).run()))


class _Sender:
    def __init__(self, load: HttpLoad) -> None:
        self._load = load
        self._free: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._times = HttpTimes(took_s=[], to_engine_s=[], from_engine_s=[])
        self._request = (
            f"POST {load.path} HTTP/1.1\r\nhost: {load.host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(load.body)}\r\n\r\n"
        ).encode() + load.body

    async def run(self) -> HttpTimes:
        load = self._load
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(int(load.rate * load.duration_s)):
                due_s = start_s + number / load.rate
                wait_s = due_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                is_counted = due_s - start_s >= load.warmup_s
                group.create_task(self._one(due_s, is_counted=is_counted), name="request")
        self._times.elapsed_s = time.perf_counter() - start_s
        for _, writer in self._free:
            writer.close()
        return self._times

    async def _one(self, due_s: float, *, is_counted: bool) -> None:
        self._times.sent += 1
        async with self._slots:
            connection = self._free.pop() if self._free else await self._connect()
            sent_unix_s = time.time()
            status, body = await self._exchange(*connection)
            answered_s, answered_unix_s = time.perf_counter(), time.time()
            self._free.append(connection)
        if status != 200:
            self._times.failed += 1
        elif is_counted:
            self._times.took_s.append(answered_s - due_s)
            self._note(body, sent_unix_s, answered_unix_s)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._load.host, self._load.port)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, bytes]:
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return int(head.split(b" ", 2)[1]), await reader.readexactly(length)

    def _note(self, body: bytes, sent_unix_s: float, answered_unix_s: float) -> None:
        times = msgspec.json.decode(body).get("hexflow", {}).get("times", {})
        if times.get("started_at_s") and times.get("finished_at_s"):
            self._times.to_engine_s.append(times["started_at_s"] - sent_unix_s)
            self._times.from_engine_s.append(answered_unix_s - times["finished_at_s"])
