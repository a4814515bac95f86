"""The few things that HTTP handlers here share: bodies with bounds, clients that leave, streams.

A handler returns a Response object whose `__call__` does the work, because only there is `send` at
hand: the status of a stream is decided by its first event.
"""

import asyncio
from collections.abc import AsyncIterable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Send

from services.gateway.problems import Problem

T = TypeVar("T")
Headers = Iterable[tuple[str, str]]
MAX_DRAINED_BYTES = 64 * 1024 * 1024
SEND_TIMEOUT_S = 30.0
EVENT_STREAM: tuple[tuple[str, str], ...] = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),
)


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading."""


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return a request's body.

    A body above the bound is read to its end and dropped (within another bound), because most
    clients look for the answer only after they have sent everything.

    Raises:
        Problem: It is too large (413), or did not arrive in time (408).
        ClientGoneError: The client left.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > MAX_DRAINED_BYTES:
                    break
                if size <= max_bytes:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError as exc:
        text = f"the body did not arrive within {timeout_s:g} s"
        raise Problem(408, text, code="request_timeout", retries=False) from exc
    except ClientDisconnect as exc:
        raise ClientGoneError from exc
    if size > max_bytes:
        text = f"the body is above the largest size, {max_bytes} bytes"
        raise Problem(413, text, code="too_large")
    return b"".join(parts)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it when the client goes away.

    Raises:
        ClientGoneError: The client went first.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine that is awaited runs in a task
    watch = _Watch(task)
    results: list[T] = []
    errors: list[Exception] = []
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch.run(receive), name="watch-client")
        try:
            results.append(await work)
        except asyncio.CancelledError:
            if not watch.is_gone or task.uncancel() > watch.num_cancels_before:
                raise
        except Exception as exc:  # noqa: BLE001 - raised again below, outside the group
            errors.append(exc)
        finally:
            watcher.cancel()
    if errors:
        raise errors[0]
    if not results:
        raise ClientGoneError
    return results[0]


class _Watch:
    """Waits for a client to leave, and then cancels the task that works for it."""

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._task = task
        self.num_cancels_before = task.cancelling()
        self.is_gone = False

    async def run(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        self._task.cancel()


async def send_json(send: Send, value: object, *, status: int = 200, headers: Headers = ()) -> None:
    """Send a whole JSON answer."""
    body = msgspec.json.encode(value)
    head = [("content-type", "application/json"), ("content-length", str(len(body))), *headers]
    await send_start(send, status, head)
    await send({"type": "http.response.body", "body": body})


async def send_start(send: Send, status: int, headers: Headers) -> None:
    """Send status and headers."""
    raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_events(send: Send, events: AsyncIterable[bytes], headers: Headers = ()) -> None:
    """Send a stream of events; headers go with the first one.

    Raises:
        ClientGoneError: The client stopped reading.
    """
    has_started = False
    iterator: Any = aiter(events)
    async with aclosing(iterator):
        async for data in iterator:
            if not has_started:
                await send_start(send, 200, (*EVENT_STREAM, *headers))
                has_started = True
            await _send_part(send, data)
    if not has_started:
        await send_start(send, 200, (*EVENT_STREAM, *headers))
    await send({"type": "http.response.body", "body": b""})


async def _send_part(send: Send, data: bytes) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError as exc:
        raise ClientGoneError from exc


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
