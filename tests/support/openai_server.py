"""A small OpenAI-compatible server on loopback that misbehaves as it is told.

A prompt of `n` words has `n` tokens; it answers `max_tokens` words (5 without), one event each.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from shared.adapters.local_process import LOOPBACK

MODEL = "small"
CONTEXT_TOKENS = 1_000
VLLM_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="small"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="small"}} {waiting}.0
vllm:kv_cache_usage_perc{{engine="0",model_name="small"}} 0.25
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="500"}} 1.0
"""

Misbehave = Callable[["FakeServer", web.Request], Any]


@dataclass
class FakeServer:
    """What it is told, and what it has seen.

    Attributes:
        url: Where it listens.
        pace_s: Seconds between two tokens.
        faults: What each next request meets instead of an answer; None: an answer.
        metrics: Its `/metrics`; None: it has none.
        models: What `/v1/models` lists.
        foreign_running: Calls of others in its batch.
        foreign_waiting: Calls of others in its queue.
        bodies: Every request's body.
        active: Answers under way.
        num_cut: Answers whose reader went away.
        sends_usage: Whether its last event tells token counts.
        context_tokens: Longest prompt.
        is_chat_only: Whether it has no plain completions.
    """

    url: str = ""
    pace_s: float = 0.001
    faults: list[Misbehave | None] = field(default_factory=list)
    metrics: str | None = VLLM_METRICS
    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": MODEL, "max_model_len": CONTEXT_TOKENS}]
    )
    foreign_running: int = 0
    foreign_waiting: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    active: int = 0
    num_cut: int = 0
    sends_usage: bool = True
    context_tokens: int = CONTEXT_TOKENS
    is_chat_only: bool = False

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion, or misbehave."""
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.is_chat_only and "messages" not in body:
            return error(404, "Not Found")
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            answer: web.StreamResponse = await fault(self, request)
            return answer
        num_input = len(_prompt(body).split())
        if num_input >= self.context_tokens:
            return error(400, f"{num_input} tokens exceed the context of {self.context_tokens}")
        return await self._stream(request, body, num_input)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], num_input: int
    ) -> web.StreamResponse:
        response = await begin(request)
        self.active += 1
        is_chat = "messages" in body
        count = body.get("max_tokens") or 5
        try:
            for index in range(count):
                await asyncio.sleep(self.pace_s)
                await send(response, choice(is_chat, f"{' ' if index else ''}w{index}"))
            await send(response, choice(is_chat, "", finish_reason="length"))
            if self.sends_usage:
                await send(response, usage(num_input, count))
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_cut += 1
            raise
        finally:
            self.active -= 1
        return response

    async def tell_metrics(self, _: web.Request) -> web.Response:
        """Answer `/metrics`."""
        if self.metrics is None:
            return web.Response(status=404)
        running = self.active + self.foreign_running
        return web.Response(text=self.metrics.format(running=running, waiting=self.foreign_waiting))

    async def tell_models(self, _: web.Request) -> web.Response:
        """Answer `/v1/models`."""
        return web.json_response({"object": "list", "data": self.models})


@asynccontextmanager
async def fake_server(server: FakeServer | None = None) -> AsyncIterator[FakeServer]:
    """Run a server for as long as the block lasts."""
    server = server or FakeServer()
    app = web.Application(client_max_size=16 * 1024 * 1024)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", server.tell_models)
    app.router.add_get("/metrics", server.tell_metrics)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, LOOPBACK, 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()


async def begin(request: web.Request) -> web.StreamResponse:
    """Begin a stream of events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, event: object) -> None:
    """Send one event."""
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def choice(is_chat: bool, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """Return an event with a piece of text."""
    one: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    one |= {"delta": {"content": text}} if is_chat else {"text": text}
    return {"object": "chunk", "choices": [one], "usage": None}


def usage(num_input: int, num_output: int, cached: int = 0) -> dict[str, Any]:
    """Return the event that tells token counts."""
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": num_input,
            "completion_tokens": num_output,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def error(status: int, message: str, **headers: str) -> web.Response:
    """Return an error as such servers write it."""
    body = {"error": {"message": message, "type": "error", "code": status}}
    return web.json_response(body, status=status, headers=headers)


# Faults.


def answers_status(status: int, says: str = "not now", **headers: str) -> Misbehave:
    """Answer with a status."""

    async def fault(_: FakeServer, __: web.Request) -> web.Response:
        return error(status, says, **headers)

    return fault


def sends(*parts: bytes, content_type: str = "text/event-stream") -> Misbehave:
    """Send bytes and end."""

    async def fault(_: FakeServer, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return fault


def hangs(after: int) -> Misbehave:
    """Send so many words, then nothing, for ever; -1: not even the head."""

    async def fault(_: FakeServer, request: web.Request) -> web.StreamResponse:
        if after < 0:
            await asyncio.Event().wait()
        response = await begin(request)
        is_chat = request.path.endswith("chat/completions")
        for index in range(after):
            await send(response, choice(is_chat, f"w{index} "))
        await asyncio.Event().wait()
        return response

    return fault


def breaks_off(after: int) -> Misbehave:
    """Send so many words, then close the connection."""

    async def fault(_: FakeServer, request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        is_chat = request.path.endswith("chat/completions")
        for index in range(after):
            await send(response, choice(is_chat, f"w{index} "))
        if request.transport is not None:
            request.transport.abort()
        return response

    return fault


def _prompt(body: dict[str, Any]) -> str:
    if "prompt" in body:
        return str(body["prompt"])
    return " ".join(str(message.get("content") or "") for message in body["messages"])
