"""What is tried again, what is not, and what people are told, when a server fails a call."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web

from shared.adapters.clock import SystemClock
from shared.adapters.openai_engine import OpenAIEngine
from shared.adapters.openai_params import OpenAIParams
from shared.errors import ConfigError, GenerationFailed, TransientError
from shared.ports import Finished
from tests.contract.engine_contract import events_of
from tests.support.openai_engines import opened
from tests.support.openai_server import (
    FakeServer,
    answers_status,
    begin,
    breaks_off,
    choice,
    fake_server,
    send,
    sends,
)
from tests.support.worker_bench import SPEC, bound_call

NO_API = "answered with HTML, not with an API's JSON"
CALL = bound_call("a", prompt="word", max_tokens=3)
PAGE = "<!DOCTYPE html><html><body>Welcome</body></html>"
ENDS_S = 30.0
"""Far above what anything here takes, far below the silences that the engine would bear."""


async def refuses_connection(_: FakeServer, request: web.Request) -> web.StreamResponse:
    """Close the connection before the answer's head."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def shows_page(*_: object) -> web.Response:
    """Answer with a page for people."""
    return web.Response(text=PAGE, content_type="text/html")


@pytest.mark.parametrize(
    "fault", [answers_status(s) for s in (408, 429, 500, 502, 503, 504, 529)] + [refuses_connection]
)
async def test_what_may_pass_is_tried_again(server: FakeServer, fault: Any):
    """A failed connection, 408, 429 and 5xx."""
    server.faults = [fault, fault]
    async with opened(server, retries=2) as engine:
        *_, last = await events_of(engine, CALL)
    assert isinstance(last, Finished)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    "fault",
    [
        *(answers_status(status) for status in (302, 401, 403, 404, 409)),
        sends(b"data: {garbage\n\n"),
        sends(b'data: {"error": {"message": "out of memory"}}\n\n'),
        sends(b"data: [DONE]\n\n"),
        breaks_off(after=0),
        shows_page,
    ],
)
async def test_anything_else_is_asked_once(server: FakeServer, fault: Any):
    """Garbage, a refused key, a broken answer: the mesh tries elsewhere, the adapter does not."""
    server.faults = [fault] * 3
    async with opened(server, retries=2) as engine:
        with pytest.raises(GenerationFailed):
            await events_of(engine, CALL)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("pings", [False, True])
async def test_a_whole_answer_without_counts_or_end_is_finished(server: FakeServer, pings: bool):
    """The reason came, then nothing but pings on an open connection: the answer counts."""

    async def stays(_: FakeServer, request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await send(response, choice(is_chat=False, text="all", finish_reason="stop"))
        while True:
            await asyncio.sleep(0.1)
            if pings:
                await response.write(b": ping\n\n")

    server.faults = [stays]
    async with opened(server, idle_s=500.0, retries=0) as engine, asyncio.timeout(ENDS_S):
        *_, last = await events_of(engine, CALL)
    assert isinstance(last, Finished)
    assert (last.text, last.finish_reason) == ("all", "stop")
    assert (last.usage.input_tokens, last.usage.output_tokens) == (0, 0)


async def test_a_page_instead_of_an_answer_is_told_as_one(server: FakeServer):
    """A person who gave a wrong address learns what came, not what a parser thinks of it."""
    server.faults = [shows_page]
    async with opened(server) as engine:
        with pytest.raises(GenerationFailed, match=NO_API):
            await events_of(engine, CALL)


async def test_a_page_instead_of_models_ends_the_start():
    """It does not become an API by waiting."""

    class Site(FakeServer):
        async def tell_models(self, _: web.Request) -> web.Response:
            return await shows_page()

    async with fake_server(Site()) as site, asyncio.timeout(ENDS_S):
        with pytest.raises(ConfigError, match=NO_API):
            async with opened(site, startup_s=600.0):
                pass


async def test_a_broken_connection_is_told_in_words(server: FakeServer):
    """No name out of the client library."""
    server.faults = [breaks_off(after=2)]
    async with opened(server) as engine:
        with pytest.raises(GenerationFailed) as told:
            await events_of(engine, CALL)
    assert str(told.value) == "the connection broke in the middle of the answer"


async def test_a_long_error_is_told_to_its_end(server: FakeServer):
    """Servers explain first and name the point last."""
    server.faults = [answers_status(404, "because " * 40 + "the adapter is not loaded")]
    async with opened(server) as engine:
        with pytest.raises(GenerationFailed, match="the adapter is not loaded"):
            await events_of(engine, CALL)


@pytest.mark.parametrize("length", [10**12, 10**30, -1])
async def test_a_context_that_no_model_has_is_ignored(server: FakeServer, length: int):
    """The declared context stays."""
    server.models = [{"id": "small", "max_model_len": length}]
    async with opened(server) as engine:
        assert engine.spec.max_context_tokens == SPEC.max_context_tokens


async def test_tls_with_a_server_that_has_none_is_told_as_such(server: FakeServer):
    """The address is named once, and the reason is TLS's own."""
    address = server.url.removeprefix("http://")
    with pytest.raises(TransientError, match="no secure connection") as told:
        async with OpenAIEngine.open(
            SPEC, OpenAIParams(url=f"https://{address}", startup_s=0.0), SystemClock()
        ):
            pass
    assert str(told.value).count("https://") == 1
    assert "_ssl" not in str(told.value)


async def test_answers_between_failures_count_though_nobody_waits_for_their_end(server: FakeServer):
    """Whoever has the result leaves the generator; failures that are not in a row open nothing."""
    async with opened(server, retries=0, failure_threshold=2, failure_pause_s=ENDS_S) as engine:
        for number in range(4):
            server.faults = [answers_status(500)]
            with pytest.raises(GenerationFailed):
                await events_of(engine, bound_call(f"bad-{number}", prompt="word"))
            assert engine.has_room_for(CALL)
            async with aclosing(engine.generate(CALL, f"good-{number}")) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        break
