"""The OpenAI adapter keeps the engine contract, and has an answer to every fault of a server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
from aiohttp import web

from shared.adapters.clock import SystemClock
from shared.adapters.local_process import free_port
from shared.adapters.openai_engine import OpenAIEngine
from shared.adapters.openai_params import OpenAIParams
from shared.contracts.messages import BoundCall
from shared.errors import (
    CallRefused,
    ConfigError,
    EngineUnavailable,
    GenerationFailed,
    TransientError,
)
from shared.ports import Chunk, Engine, Finished, FirstToken
from tests.contract.engine_contract import WITHIN_S, EngineContract, events_of
from tests.support.openai_engines import QUICK, opened
from tests.support.openai_server import (
    CONTEXT_TOKENS,
    VLLM_METRICS,
    FakeServer,
    answers_status,
    begin,
    breaks_off,
    choice,
    fake_server,
    hangs,
    send,
    sends,
    usage,
)
from tests.support.worker_bench import SPEC, bound_call

CHAT = ({"role": "user", "content": "how many orders are there"},)
SLOW = 0.3
TOOL_CALL_PIECES: list[list[dict[str, Any]]] = [
    [
        {
            "index": 0,
            "id": "c1",
            "type": "function",
            "function": {"name": "run", "arguments": '{"q"'},
        }
    ],
    [
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": "c2", "function": {"name": "stop", "arguments": "{}"}},
    ],
]


def real_call(request_id: str, *, input_tokens: int = 50, **fields: Any) -> BoundCall:
    """Return a call whose prompt has so many words, and whose answer so many."""
    output_tokens = fields.get("output_tokens", 5)
    given = {"prompt": "word " * input_tokens, "max_tokens": output_tokens, "simulated": None}
    return bound_call(request_id, input_tokens=input_tokens, **(given | fields))


class TestOpenAIEngine(EngineContract):
    """The contract."""

    def call(self, request_id: str, **fields: Any) -> BoundCall:
        """Return a call with a real prompt."""
        return real_call(request_id, **fields)

    @pytest.fixture
    async def engine(self, server: FakeServer) -> AsyncIterator[Engine]:
        """Return an engine on the fake server."""
        async with opened(server) as engine:
            yield engine


async def test_a_chat_call_arrives_as_it_was_sent(server: FakeServer):
    """Messages, sampling and unknown fields reach the server unchanged; usage is asked for."""
    call = bound_call(
        "a",
        prompt=None,
        messages=CHAT,
        max_tokens=7,
        sampling={"temperature": 0.5, "stop": ["\n"]},
        extra={"response_format": {"type": "json_object"}, "stream_options": {"x": 1}},
    )
    async with opened(server) as engine:
        *_, last = await events_of(engine, call)
    assert isinstance(last, Finished)
    assert last.text == "w0 w1 w2 w3 w4 w5 w6"
    assert last.message == {"role": "assistant", "content": last.text}
    assert (last.usage.input_tokens, last.usage.output_tokens) == (5, 7)
    assert server.bodies == [
        {
            "model": "small",
            "messages": [dict(CHAT[0])],
            "max_tokens": 7,
            "temperature": 0.5,
            "stop": ["\n"],
            "response_format": {"type": "json_object"},
            "stream": True,
            "stream_options": {"x": 1, "include_usage": True},
        }
    ]


async def test_a_prompt_without_a_limit_gets_the_rest_of_the_context(server: FakeServer):
    """Servers stop a plain completion after 16 tokens unless they are told otherwise."""
    server.pace_s = 0.0
    async with opened(server) as engine:
        await events_of(engine, real_call("a", prompt="x" * 100, max_tokens=None))
        await events_of(engine, real_call("b", prompt="x" * 100_000, max_tokens=None))
        too_long = {"prompt": "x" * 100_000, "input_tokens": CONTEXT_TOKENS, "max_tokens": None}
        await events_of(engine, real_call("c", **too_long))
    first, second, third = (body["max_tokens"] for body in server.bodies)
    assert CONTEXT_TOKENS - 150 < first <= CONTEXT_TOKENS - 100
    assert 16 <= second < CONTEXT_TOKENS
    assert third is None, "the guess may be wrong: the server counts, and takes what is left"


async def test_a_guess_takes_no_more_room_than_a_call_can(server: FakeServer):
    """A prompt of predicted 10,000 tokens that a server accepts holds at most its context."""
    server.pace_s = SLOW
    async with opened(server) as engine:
        given = real_call("a", prompt="word", input_tokens=10 * CONTEXT_TOKENS)
        async with aclosing(engine.generate(given, "a")) as events:
            await anext(events)
            assert engine.kv_used_tokens() == CONTEXT_TOKENS + 1


async def test_priority_is_the_latest_start(server: FakeServer):
    """A server with priority scheduling is told milliseconds of the queue score, others nothing."""
    async with opened(server, sends_priority=True) as engine:
        await events_of(engine, real_call("a", score=1_700_000_000.25))
    async with opened(server) as engine:
        await events_of(engine, real_call("b"))
    assert server.bodies[0]["priority"] == 1_700_000_000_250
    assert "priority" not in server.bodies[1]


async def test_the_key_is_sent(server: FakeServer):
    """The API key travels as a bearer token."""
    async with opened(server, api_key="secret") as engine:
        await events_of(engine, real_call("a"))
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_tool_calls_come_whole(server: FakeServer):
    """Pieces of a tool call are put together in the outcome's message."""
    parts = [
        '{"choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}',
        *(
            json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": calls}}]})
            for calls in TOOL_CALL_PIECES
        ),
        '{"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}',
        '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}',
        "[DONE]",
    ]
    server.faults = [sends(*(f"data: {part}\r\n\r\n".encode() for part in parts))]
    async with opened(server) as engine:
        first, last = await events_of(engine, bound_call("a", prompt=None, messages=CHAT))
    assert isinstance(first, FirstToken)
    assert isinstance(last, Finished)
    assert last.finish_reason == "tool_calls"
    assert last.message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "run", "arguments": '{"q": 1}'},
            },
            {"id": "c2", "function": {"name": "stop", "arguments": "{}"}},
        ],
    }


async def test_closing_early_stops_the_server(server: FakeServer):
    """A call given up after its first token is no longer generated."""
    server.pace_s = 0.01
    async with opened(server) as engine:
        async with aclosing(engine.generate(real_call("a", output_tokens=900), "a:0")) as events:
            await anext(events)
        await _until(lambda: server.active == 0)
    assert server.num_cut == 1


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_server_is_asked_again(server: FakeServer, status: int):
    """A failure that may pass is retried, and the call ends well."""
    server.faults = [answers_status(status)] * 2
    async with opened(server) as engine:
        *_, last = await events_of(engine, real_call("a"))
    assert isinstance(last, Finished)
    assert len(server.bodies) == 3


@pytest.mark.parametrize("status", [429, 500])
async def test_retries_are_bounded(server: FakeServer, status: int):
    """A server that keeps failing fails the call, saying how."""
    server.faults = [answers_status(status)] * 10
    async with opened(server, retries=2) as engine:
        with pytest.raises(GenerationFailed, match=f"HTTP {status}: not now"):
            await events_of(engine, real_call("a"))
    assert len(server.bodies) == 3


@pytest.mark.parametrize("status", [500, 501])
async def test_what_the_server_can_never_do_is_refused_at_once(server: FakeServer, status: int):
    """An image for a model without eyes: llama.cpp answers 500, and would do so for ever."""
    server.faults = [answers_status(status, "image input is not supported")] * 10
    async with opened(server) as engine:
        with pytest.raises(CallRefused, match="image input is not supported"):
            await events_of(engine, real_call("a"))
    assert len(server.bodies) == 1


async def test_retry_after_is_heeded_within_bounds(server: FakeServer):
    """A server that asks for an hour is asked again after the longest pause."""
    server.faults = [answers_status(429, **{"Retry-After": "3600"})]
    async with opened(server, longest_retry_pause_s=0.05) as engine:
        *_, last = await events_of(engine, real_call("a"))
    assert isinstance(last, Finished)


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refused_call_is_not_repeated(server: FakeServer, status: int):
    """What the server will never do is asked once, and is no fault of the server."""
    server.faults = [answers_status(status)] * 3
    async with opened(server, failure_threshold=1) as engine:
        with pytest.raises(CallRefused, match=f"HTTP {status}"):
            await events_of(engine, real_call("a"))
        assert engine.has_room_for(real_call("b"))
    assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [302, 401, 404])
async def test_other_answers_fail_the_call_at_once(server: FakeServer, status: int):
    """A redirect, a refused key or an unknown model fails the call; another instance may try."""
    server.faults = [answers_status(status)]
    async with opened(server, retries=0) as engine:
        with pytest.raises(GenerationFailed, match=f"HTTP {status}") as caught:
            await events_of(engine, real_call("a"))
    assert not isinstance(caught.value, CallRefused)


@pytest.mark.parametrize(
    "parts",
    [
        [b"data: {not json\n\n"],
        [b"data: [1, 2]\n\n"],
        [b"data: \xff\xfe\n\n"],
        [b"<html>welcome</html>"],
        [b'data: {"hello": "world"}\n\n'],
        [b'data: {"error": {"message": "out of memory"}}\n\n'],
        [b"data: [DONE]\n\n"],
        [b"data: " + b"x" * 200_000],
    ],
)
async def test_garbage_fails_the_call(server: FakeServer, parts: list[bytes]):
    """What is no stream of completions is a failed generation, not a result."""
    server.faults = [sends(*parts)]
    async with opened(server, retries=0, max_line_bytes=100_000) as engine:
        with pytest.raises(GenerationFailed):
            await events_of(engine, real_call("a"))
        *_, last = await events_of(engine, real_call("b"))
    assert isinstance(last, Finished)


async def test_an_answer_in_one_piece_will_do(server: FakeServer):
    """A server that does not stream is understood too."""
    body = (
        b'{"choices": [{"index": 0, "text": "all of it", "finish_reason": "stop"}],'
        b' "usage": {"prompt_tokens": 3, "completion_tokens": 3}}'
    )
    server.faults = [sends(body, content_type="application/json")]
    async with opened(server) as engine:
        first, chunk, last = await events_of(engine, real_call("a", stream=True))
    assert (first, chunk) == (FirstToken(), Chunk("all of it"))
    assert isinstance(last, Finished)
    assert (last.text, last.usage.output_tokens) == ("all of it", 3)


@pytest.mark.parametrize("fault", [hangs(after=-1), hangs(after=0)])
async def test_silence_before_the_first_token_ends(server: FakeServer, fault: Any):
    """A server that accepts and says nothing fails the call after its time, and only once."""
    server.faults = [fault]
    async with opened(server, first_token_s=SLOW, retries=2) as engine:
        with pytest.raises(GenerationFailed, match="answer"):
            await events_of(engine, real_call("a"))
    assert len(server.bodies) == 1


@pytest.mark.parametrize("fault", [hangs(after=2), breaks_off(after=2)])
async def test_trouble_after_the_first_token_is_final(server: FakeServer, fault: Any):
    """A stream that hangs or breaks off fails the call; nothing is sent a second time."""
    server.faults = [fault]
    async with opened(server, idle_s=SLOW) as engine:
        texts = []
        with pytest.raises(GenerationFailed):
            async with aclosing(engine.generate(real_call("a", stream=True), "a:0")) as events:
                texts += [event.text async for event in events if isinstance(event, Chunk)]
    assert len(server.bodies) == 1


async def test_a_call_has_a_longest_time(server: FakeServer):
    """A server that trickles for ever is cut off."""
    server.pace_s = 0.05
    async with opened(server, total_s=SLOW) as engine:
        with pytest.raises(GenerationFailed):
            await events_of(engine, real_call("a", output_tokens=900))
        await _until(lambda: server.active == 0)


async def test_an_unreachable_server_fails_the_call():
    """A server that went away fails the call, after its tries."""
    running = AsyncExitStack()
    server = await running.enter_async_context(fake_server())
    async with opened(server) as engine:
        await running.aclose()
        with pytest.raises(EngineUnavailable, match="cannot be reached"):
            await events_of(engine, real_call("a"))


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_server_that_takes_nothing_is_told_as_unavailable(server: FakeServer, status: int):
    """The outcome says that another time may do, unlike an answer that went wrong."""
    server.faults = [answers_status(status)]
    async with opened(server, retries=0) as engine:
        with pytest.raises(EngineUnavailable, match=f"HTTP {status}"):
            await events_of(engine, real_call("a"))


async def test_a_failing_server_is_left_alone_and_found_again(server: FakeServer):
    """After failures in a row there is no room; calls that come all the same wait, and end well."""
    server.faults = [answers_status(500)] * 2
    params: dict[str, Any] = {"retries": 0, "failure_threshold": 2, "failure_pause_s": 0.2}
    async with opened(server, **params) as engine:
        for name in ("a", "b"):
            with pytest.raises(GenerationFailed, match="HTTP 500"):
                await events_of(engine, real_call(name))
        assert not engine.has_room_for(real_call("c"))
        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(events_of(engine, real_call(f"c{n}")), name=f"c{n}")
                for n in range(10)
            ]
        assert engine.has_room_for(real_call("d"))
    assert all(isinstance(task.result()[-1], Finished) for task in tasks)
    assert len(server.bodies) == 12


async def test_others_begin_with_the_first_token_of_the_call_that_tries(server: FakeServer):
    """A server that was left alone runs calls beside each other again while the first goes on."""
    server.faults = [answers_status(500)]
    params: dict[str, Any] = {"retries": 0, "failure_threshold": 1, "failure_pause_s": 0.05}
    async with opened(server, **params) as engine:
        with pytest.raises(GenerationFailed, match="HTTP 500"):
            await events_of(engine, real_call("a"))
        server.pace_s = SLOW
        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
            for name in ("b", "c"):
                group.create_task(events_of(engine, real_call(name)), name=name)
            while server.active < 2:
                await asyncio.sleep(0.01)


async def test_one_of_several_models_is_chosen_by_name(server: FakeServer):
    """Without a choice the start says which there are, and how one is named."""
    server.models = [{"id": name, "max_model_len": CONTEXT_TOKENS} for name in ("one", "two")]
    with pytest.raises(ConfigError, match="several models, one, two: name one of them: --model"):
        async with opened(server):
            pass
    async with opened(server, model="two") as engine:
        await events_of(engine, real_call("a"))
    assert server.bodies[0]["model"] == "two"


async def test_the_server_resolves_the_description(server: FakeServer):
    """Context and KV cache are what the server says, whatever the fleet file said."""
    async with opened(server) as engine:
        spec = engine.spec
    assert spec.max_context_tokens == CONTEXT_TOKENS
    assert (spec.kv_tokens, spec.block_tokens) == (8_000, 16)
    assert spec.latency == SPEC.latency


async def test_a_missing_model_is_a_configuration_error(server: FakeServer):
    """A model that the server does not have is told at the start, with what it has."""
    with pytest.raises(ConfigError, match=r"'large'; it has small; .* WORKER_OPENAI__MODEL"):
        async with opened(server, model="large"):
            pass


async def test_an_address_with_v1_is_told_as_it_is_asked():
    """The error names the very address that was asked, whatever form the user gave."""
    address = f"http://127.0.0.1:{free_port()}"
    for url in (address, f"{address}/v1", f"{address}/v1/"):
        params = OpenAIParams(url=url, **QUICK)
        with pytest.raises(TransientError) as told:
            async with OpenAIEngine.open(SPEC, params, SystemClock()):
                pass
        assert str(told.value).startswith(f"{address}/v1/models did not answer within 0.2 s: ")
        assert str(told.value).count("http://") == 1
        assert str(told.value).endswith("Connection refused")
        assert "/v1/v1" not in str(told.value)


async def test_a_server_that_never_answers_is_told_at_the_start():
    """An address where nobody listens is given up after its time."""
    async with fake_server() as server:
        url = server.url
    params = OpenAIParams(url=url, startup_s=0.1)
    with pytest.raises(TransientError, match="did not answer within"):
        async with OpenAIEngine.open(SPEC, params, SystemClock()):
            pass


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "nonsense",
        "http://user:word@host:1",
        "http://[::1",
        "http://host:99999",
        "http://host:abc",
    ],
)
def test_a_wrong_address_is_refused(url: str):
    """An address that is none, or holds credentials, is a configuration error."""
    with pytest.raises(ConfigError):
        OpenAIParams(url=url)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions/", "/v1/models"])
@pytest.mark.parametrize("base", ["http://host:1", "https://host/behind"])
def test_an_address_of_one_path_is_refused_with_the_right_one(base: str, path: str):
    """Many have the whole path at hand; they are told what to give."""
    with pytest.raises(ConfigError, match=f"give {base}$"):
        OpenAIParams(url=base + path)


OLD_VLLM = VLLM_METRICS.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
LLAMA_CPP = "llamacpp:requests_processing {running}\nllamacpp:requests_deferred {waiting}\n"


@pytest.mark.parametrize("metrics", [VLLM_METRICS, OLD_VLLM, LLAMA_CPP])
async def test_foreign_load_counts(server: FakeServer, metrics: str):
    """Calls that others sent are work on the instance, and take room in its batch."""
    server.metrics, server.pace_s = metrics, 0.01
    async with opened(server) as engine, asyncio.TaskGroup() as group:
        own = group.create_task(events_of(engine, real_call("a", output_tokens=900)), name="own")
        await _until(lambda: server.active == 1)
        assert engine.foreign_s() == 0
        assert engine.has_room_for(real_call("b"))
        server.foreign_running, server.foreign_waiting = 6, 4
        await _until(lambda: engine.foreign_s() > 0)
        alone_s = engine.foreign_s() / 10
        assert 0 < alone_s < 60
        assert engine.has_room_for(real_call("b"))
        server.foreign_running = 7
        await _until(lambda: not engine.has_room_for(real_call("b")))
        server.foreign_running = server.foreign_waiting = 0
        await _until(lambda: engine.foreign_s() == 0)
        own.cancel()


async def test_a_server_without_metrics_has_no_foreign_load(server: FakeServer):
    """Where there is nothing to read, nothing is counted, and calls run."""
    server.metrics = None
    async with opened(server) as engine:
        *_, last = await events_of(engine, real_call("a"))
        assert engine.foreign_s() == 0
    assert isinstance(last, Finished)


async def test_usage_is_never_guessed(server: FakeServer):
    """A server that tells no token counts leaves them at zero."""
    server.sends_usage = False
    async with opened(server) as engine:
        *_, last = await events_of(engine, real_call("a"))
    assert isinstance(last, Finished)
    assert (last.usage.input_tokens, last.usage.output_tokens) == (0, 0)


@pytest.mark.parametrize("count", ["1000000000000000000000000000000", "-1", "2.5", '"many"'])
async def test_counts_that_are_none_are_not_told(server: FakeServer, count: str):
    """A token count that no call can have is no count: the answer is kept, its usage is zero."""
    body = (
        '{"choices": [{"index": 0, "text": "fine", "finish_reason": "stop"}],'
        f' "usage": {{"prompt_tokens": 3, "completion_tokens": {count}}}}}'
    )
    server.faults = [sends(body.encode(), content_type="application/json")]
    async with opened(server) as engine:
        *_, last = await events_of(engine, real_call("a"))
    assert isinstance(last, Finished)
    assert last.text == "fine"
    assert (last.usage.input_tokens, last.usage.output_tokens) == (0, 0)


async def test_an_emoji_may_come_in_halves(server: FakeServer):
    """A character cut between two events is whole in chunks and text."""
    events = [
        rb'data: {"choices": [{"index": 0, "text": "so \ud83d"}]}',
        rb'data: {"choices": [{"index": 0, "text": "\ude00", "finish_reason": "st\ud83d"}]}',
        b"data: [DONE]",
    ]
    server.faults = [sends(*(event + b"\n\n" for event in events))]
    async with opened(server) as engine:
        _, *chunks, last = await events_of(engine, real_call("a", stream=True))
    assert chunks == [Chunk("so "), Chunk("😀")]
    assert isinstance(last, Finished)
    assert (last.text, last.finish_reason) == ("so 😀", "st\ufffd")


async def test_a_whole_answer_is_not_waited_on(server: FakeServer):
    """Text, reason and counts are there, the formal end never comes: the answer counts."""

    async def goes_silent(_: FakeServer, request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await send(response, choice(is_chat=False, text="all", finish_reason="stop"))
        await send(response, usage(3, 1))
        await asyncio.sleep(60)
        return response

    server.faults = [goes_silent]
    async with opened(server, idle_s=50.0) as engine, asyncio.timeout(30):
        *_, last = await events_of(engine, real_call("a"))
    assert isinstance(last, Finished)
    assert (last.text, last.usage.output_tokens) == ("all", 1)


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_nested_for_ever_is_an_error(server: FakeServer, status: int):
    """A body that no parser goes to the bottom of changes nothing about what its status means."""

    async def nests(_: FakeServer, __: web.Request) -> web.Response:
        return web.Response(status=status, text="[" * 60_000)

    server.faults = [nests] * 9
    async with opened(server, retries=0) as engine:
        with pytest.raises(GenerationFailed, match=f"HTTP {status}") as caught:
            await events_of(engine, real_call("a"))
    assert isinstance(caught.value, CallRefused) == (status == 400)


async def test_twenty_streams_keep_their_order(server: FakeServer):
    """Streams side by side lose no piece and mix none up."""

    async def stream(engine: Engine, name: str) -> str:
        call = real_call(name, stream=True, output_tokens=50)
        return "".join(e.text for e in await events_of(engine, call) if isinstance(e, Chunk))

    async with opened(server) as engine, asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(engine, f"c{n}"), name=f"c{n}") for n in range(20)]
    expected = " ".join(f"w{n}" for n in range(50))
    assert {task.result() for task in tasks} == {expected}


async def _until(is_so: Any) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not is_so():
            await asyncio.sleep(0.005)
