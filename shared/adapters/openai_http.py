"""HTTP to an OpenAI-compatible server; the only module that knows aiohttp.

Errors of the client library and the server's own become `GenerationFailed`, `ServerBusy` or
`CallRefused` here. No time limit is held while a caller has the stream: each read has its own.
"""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp

from shared.adapters.openai_load import ServerLoad, parse_load
from shared.adapters.openai_params import OpenAIParams
from shared.adapters.openai_request import UpstreamRequest
from shared.adapters.openai_stream import DONE, EventLines, error_text
from shared.errors import CallRefused, EngineUnavailable, GenerationFailed, WrongServer

METRICS_S = 2.0
REFUSED = frozenset({400, 405, 413, 415, 422, 501})
WRONG = frozenset({401, 403, 404})
BUSY = frozenset({408, 425, 429})
"""Besides every 5xx that is no refusal."""
NEVER = "not supported"
"""In llama.cpp's answer, a 500, to what its model can never do, such as looking at images."""
HTML = frozenset({"text/html", "application/xhtml+xml"})
_IS_HTML = "the server answered with HTML, not with an API's JSON; is this the API's address?"
_BROKE = "the connection broke in the middle of the answer"
_TEXTS: tuple[tuple[type[BaseException], str], ...] = (
    (aiohttp.ServerDisconnectedError, "it closed the connection without an answer"),
    (TimeoutError, "no answer in time"),
    (aiohttp.ClientPayloadError, _BROKE),
    (aiohttp.ClientResponseError, "what came is not what a web server sends"),
)
_READ_ERROR_BYTES = 65_536
_READ_METRICS_BYTES = 8 * 1024 * 1024


class ServerBusy(EngineUnavailable):
    """The server could not take the request now: the only failure after which it is sent again.

    Args:
        detail: What it said.
        retry_after_s: When it wants to be asked again, seconds.
    """

    def __init__(self, detail: str, retry_after_s: float = 0.0) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class UpstreamStream:
    """The answer to one request, while it comes.

    Args:
        response: Whose head has come.
        params: Bounds.
    """

    def __init__(self, response: aiohttp.ClientResponse, params: OpenAIParams) -> None:
        self._response = response
        self._lines = EventLines(params.max_line_bytes, params.max_answer_bytes)
        self._limit_bytes = params.max_answer_bytes
        self._is_over = False

    async def read(self, limit_s: float) -> list[str] | None:
        """Return the data of the events that came next, or None at the end.

        Args:
            limit_s: Longest time to wait, wall seconds.

        Raises:
            GenerationFailed: Nothing came in time, or the connection broke.
        """
        if self._is_over:
            return None
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                if self._response.content_type == "application/json":  # it does not stream
                    self._is_over = True
                    return [(await _read_some(self._response, self._limit_bytes)).decode()]
                data = await self._response.content.readany()
        except TimeoutError as exc:
            raise GenerationFailed("the server fell silent in the middle of its answer") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise GenerationFailed(_BROKE) from exc
        except UnicodeDecodeError as exc:
            raise GenerationFailed("the server's answer is no text") from exc
        except ValueError as exc:
            raise GenerationFailed(f"the server's answer cannot be read: {exc}") from exc
        events = self._lines.feed(data) if data else self._lines.rest()
        self._is_over = not data or DONE in events
        return [event for event in events if event != DONE]


class UpstreamClient:
    """Connections to one server; made by `open`.

    Args:
        session: The client library's.
        params: Where the server is and how long to wait.
    """

    def __init__(self, session: aiohttp.ClientSession, params: OpenAIParams) -> None:
        self._session = session
        self._params = params

    @classmethod
    @asynccontextmanager
    async def open(cls, params: OpenAIParams) -> AsyncIterator[Self]:
        """Keep connections for as long as the block lasts."""
        headers = {"Authorization": f"Bearer {params.api_key}"} if params.api_key else {}
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=params.connect_s),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        async with session:
            yield cls(session, params)

    @asynccontextmanager
    async def stream(
        self, request: UpstreamRequest, limit_s: float
    ) -> AsyncIterator[UpstreamStream]:
        """Send a request; its answer can be read while the block lasts.

        Leaving the block early closes the connection, which makes the server stop.

        Args:
            request: What to ask.
            limit_s: Longest time until the answer's head, wall seconds.

        Raises:
            CallRefused: The server will never do it.
            GenerationFailed: It cannot be reached, or did not do it.
        """
        response = await self._send(request, limit_s)
        try:
            if response.content_type in HTML:
                raise GenerationFailed(_IS_HTML)
            yield UpstreamStream(response, self._params)
        finally:
            response.close()

    async def get_json(self, path: str) -> Any:
        """Return what a path gives.

        Raises:
            CallRefused: The server refuses this, whenever it is asked.
            GenerationFailed: It does not answer, or not with JSON.
        """
        try:
            async with asyncio.timeout(self._params.connect_s):
                text = await self._get(path, self._params.max_line_bytes)
                return json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise GenerationFailed(f"{path} gives no JSON") from exc
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise GenerationFailed(_name(exc)) from exc

    async def load(self) -> ServerLoad | None:
        """Return what its metrics say; None where it has none, or does not answer."""
        try:
            async with asyncio.timeout(METRICS_S):
                text = await self._get("/metrics", _READ_METRICS_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, GenerationFailed):
            return None
        return parse_load(text)

    async def _get(self, path: str, limit_bytes: int) -> str:
        url = self._params.endpoint(path)
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                await _raise_for(response)
            if response.content_type in HTML:
                raise CallRefused(_IS_HTML)
            return (await _read_some(response, limit_bytes)).decode(errors="replace")

    async def _send(self, request: UpstreamRequest, limit_s: float) -> aiohttp.ClientResponse:
        url = self._params.endpoint(request.path)
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                response = await self._session.post(url, json=request.body, allow_redirects=False)
                if response.status != 200:
                    async with response:
                        await _raise_for(response)
                return response
        except aiohttp.ClientConnectionError as exc:  # one of them is a TimeoutError as well
            raise ServerBusy(f"the server cannot be reached: {_name(exc)}") from exc
        except TimeoutError as exc:
            raise GenerationFailed("the server gave no answer in time") from exc
        except OSError as exc:
            raise ServerBusy(f"the server cannot be reached: {_name(exc)}") from exc
        except aiohttp.ClientError as exc:
            raise GenerationFailed(f"the server's answer is none: {_name(exc)}") from exc


async def _raise_for(response: aiohttp.ClientResponse) -> None:
    """Raise what an answer other than 200 means."""
    status = response.status
    try:
        said = error_text(_error_in(json.loads(await _read_some(response, _READ_ERROR_BYTES))))
    except (aiohttp.ClientError, ValueError, RecursionError):
        said = response.reason or ""
    detail = f"HTTP {status}: {said}"
    if status in REFUSED or (status == 500 and NEVER in said):
        raise CallRefused(detail)
    if status in BUSY or status >= 500:
        raise ServerBusy(detail, _retry_after_s(response.headers.get("Retry-After")))
    if status in WRONG:
        raise WrongServer(f"HTTP {status} at {response.url.path}: {said}")
    raise GenerationFailed(detail)


def _error_in(body: object) -> object:
    if isinstance(body, dict):
        return body.get("error") or body.get("detail") or body.get("message") or body
    return body


def _retry_after_s(value: str | None) -> float:
    """Return a `Retry-After` in seconds; one that is a date, or no number, is ignored."""
    try:
        seconds = float(value or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


async def _read_some(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Return a body.

    Raises:
        ValueError: It is longer than the limit.
    """
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            msg = f"more than {limit_bytes} bytes"
            raise ValueError(msg)
    return b"".join(parts)


def _name(exc: BaseException) -> str:
    """Return what went wrong, in words that do not name the client library's internals."""
    if isinstance(exc, aiohttp.ClientSSLError):  # less the line of the C file it adds
        reason = str(exc.os_error).partition(" (_ssl")[0]
        return f"no secure connection to {exc.host}:{exc.port}: {reason}"
    if isinstance(exc, aiohttp.ClientConnectorError):  # its own text is about its internals
        number = exc.errno or 0  # a name that is not found has a negative one
        why = os.strerror(number) if number > 0 else exc.strerror
        return f"cannot connect to {exc.host}:{exc.port}: {why}"
    for kind, text in _TEXTS:
        if isinstance(exc, kind):
            return text
    if isinstance(exc, OSError) and exc.errno:
        return os.strerror(exc.errno)
    return str(exc) or type(exc).__name__
