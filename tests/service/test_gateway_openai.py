"""The official OpenAI client against the gateway of an embedded mesh."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from services.cli.embedded import EmbeddedMesh
from tests.support.gateway import gateway_mesh, gateway_of, quick_fleet, until

HELLO = [{"role": "user", "content": "how many orders were late?"}]


@pytest.fixture
async def mesh() -> AsyncIterator[EmbeddedMesh]:
    """Return a mesh with a gateway."""
    async with gateway_mesh() as opened:
        yield opened


@pytest.fixture
async def client(mesh: EmbeddedMesh) -> AsyncIterator[AsyncOpenAI]:
    """Return the official client, as a user makes it."""
    async with AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none") as opened:
        yield opened


async def test_a_chat_completion(client: AsyncOpenAI):
    """An unmodified client gets an answer with text, finish reason, counts and its call's story."""
    found = await client.chat.completions.create(model="default", messages=HELLO, max_tokens=20)
    assert found.object == "chat.completion"
    (choice,) = found.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert found.usage is not None
    assert found.usage.completion_tokens == len(choice.message.content.split())
    assert found.model_extra is not None
    story = found.model_extra["hexflow"]
    assert story["kind"] == "completed"
    assert story["instance_id"].startswith("quick-")


async def test_a_text_completion(client: AsyncOpenAI):
    """The older endpoint answers, whole and streamed, with the same text for one call."""
    found = await client.completions.create(model="default", prompt="select", max_tokens=20)
    assert found.object == "text_completion"
    assert found.choices[0].text
    parts = [
        part.choices[0].text
        async for part in await client.completions.create(
            model="default", prompt="select", max_tokens=20, stream=True
        )
    ]
    assert "".join(parts)


async def test_a_stream(client: AsyncOpenAI):
    """A stream begins with the role, ends with a finish reason, and counts its tokens if asked."""
    stream = await client.chat.completions.create(
        model="default",
        messages=HELLO,
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(text.split())
    assert len({chunk.id for chunk in chunks}) == 1


async def test_tokens_are_forwarded_while_the_call_runs():
    """A client sees text before its call has ended."""
    async with gateway_mesh(quick_fleet(1)) as mesh:
        engine = mesh.engines["quick-0"]
        async with AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="default",
                messages=HELLO,
                max_tokens=256,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            engine.hang()  # whatever comes now was generated before
            desk = gateway_of(mesh).desk
            assert desk is not None
            assert desk.num_open == 1
            engine.recover()
            rest = [chunk async for chunk in stream]
            assert rest[-1].choices[0].finish_reason


async def test_raw_responses_and_request_ids(client: AsyncOpenAI):
    """`with_raw_response` shows the headers; a request id is echoed, or made up."""
    raw = await client.chat.completions.with_raw_response.create(
        model="default", messages=HELLO, max_tokens=3, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-hexflow-instance"].startswith("quick-")
    assert raw.parse().choices
    other = await client.models.with_raw_response.list()
    assert len(other.headers["x-request-id"]) == 32


async def test_the_synchronous_client(mesh: EmbeddedMesh):
    """The synchronous client works, whole and streamed."""

    def ask() -> tuple[str, str]:
        with OpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none") as client:
            whole = client.chat.completions.create(model="default", messages=HELLO, max_tokens=9)
            stream = client.chat.completions.create(
                model="default", messages=HELLO, max_tokens=9, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content or "", text

    whole, streamed = await asyncio.to_thread(ask)
    assert whole
    assert streamed


async def test_models(client: AsyncOpenAI):
    """The models are those of the live instances."""
    found = await client.models.list()
    assert [model.id for model in found.data] == ["default"]
    assert (await client.models.retrieve("default")).id == "default"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("absent")


async def test_an_unknown_model(client: AsyncOpenAI):
    """A model that nobody offers is OpenAI's 404, at once."""
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="absent", messages=HELLO)
    assert caught.value.code == "model_not_found"


async def test_unknown_fields_reach_the_engine_unchanged():
    """Tools, response_format and fields nobody knows travel to the instance as they were sent."""
    async with gateway_mesh(quick_fleet(1)) as mesh:
        seen = []
        engine = mesh.engines["quick-0"]
        generate = engine.generate

        def spy(call, engine_id):
            seen.append(call.request)
            return generate(call, engine_id)

        engine.generate = spy
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        async with AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none") as client:
            await client.chat.completions.create(
                model="default",
                messages=HELLO,
                max_completion_tokens=5,
                temperature=0.25,
                tools=tools,
                response_format={"type": "json_object"},
                extra_body={"chat_template_kwargs": {"thinking": False}},
            )
    (request,) = seen
    assert request.messages == tuple(HELLO)
    assert request.max_tokens == 5
    assert request.sampling == {"temperature": 0.25}
    assert request.extra == {
        "tools": tools,
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"thinking": False},
        "max_completion_tokens": 5,
    }


async def test_a_deadline_that_passes_is_a_504_with_the_outcome():
    """A call that cannot be answered in time ends 504, is not retried, and is cancelled."""
    async with gateway_mesh(quick_fleet(1)) as mesh:
        mesh.engines["quick-0"].hang()
        async with AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none") as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    model="default",
                    messages=HELLO,
                    extra_headers={"x-hexflow-slo-s": "0.3", "x-hexflow-late-s": "0"},
                )
        assert caught.value.status_code == 504
        assert caught.value.code == "deadline_passed"
        outcome = caught.value.body["outcome"]
        assert (outcome["kind"], outcome["reason"]) == ("evicted", "deadline_passed")
        desk = gateway_of(mesh).desk
        assert desk is not None
        await until(lambda: desk.counts["abandoned_ended"] == 1, "the call was not cancelled")
        assert desk.counts["submitted"] == 1  # no retry


async def test_a_client_that_times_out_cancels_its_call_in_the_engine():
    """The client's own time-out closes the connection; the engine stops and its memory is free."""
    async with gateway_mesh(quick_fleet(1)) as mesh:
        engine = mesh.engines["quick-0"]
        engine.hang()
        async with AsyncOpenAI(
            base_url=f"{mesh.gateway_url}/v1", api_key="none", timeout=0.5, max_retries=0
        ) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="default", messages=HELLO)
        desk = gateway_of(mesh).desk
        assert desk is not None
        await until(lambda: desk.counts["abandoned_ended"] == 1, "the call was not cancelled")
        await until(lambda: engine.kv_used_tokens() == 0, "the engine still holds memory")
        assert desk.num_open == 0


async def test_a_second_attempt_is_never_spliced_onto_the_first():
    """After a forwarded token, a call that fails ends its stream with an error event."""
    async with gateway_mesh(quick_fleet(1)) as mesh:
        mesh.engines["quick-0"].fail_next(1, after_first_token=True)
        async with AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="default", messages=HELLO, max_tokens=50, stream=True
            )
            with pytest.raises(openai.APIError) as caught:
                _ = [chunk async for chunk in stream]
        assert caught.value.code == "generation_failed"


async def test_calls_of_one_query_share_deadline_parents_and_rounds(mesh: EmbeddedMesh):
    """With only a query id, stages' rounds, parents and arrival are worked out by the gateway."""
    seen = {}
    for engine in mesh.engines.values():

        def spy(call, engine_id, generate=engine.generate):
            seen[call.request.request_id] = call
            return generate(call, engine_id)

        engine.generate = spy
    async with AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none") as client:

        async def ask(stage: str) -> str:
            found = await client.chat.completions.create(
                model="default",
                messages=HELLO,
                max_tokens=3,
                extra_body={"hexflow": {"query_id": "q1", "stage": stage, "slo_s": 60}},
            )
            return found.id.removeprefix("chatcmpl-")

        first = await ask("draft")
        pair = await asyncio.gather(ask("judge"), ask("judge"))
        last = await ask("draft")
    calls = [seen[one] for one in (first, *pair, last)]
    assert [call.request.iteration for call in calls] == [0, 0, 0, 1]
    assert [set(call.request.parents) for call in calls] == [set(), {first}, {first}, set(pair)]
    assert len({call.deadline_s for call in calls}) == 1


async def test_plain_http(mesh: EmbeddedMesh):
    """A bare HTTP client, as curl is one, gets an answer and OpenAI-shaped errors."""
    async with httpx.AsyncClient(base_url=mesh.gateway_url) as http:
        found = await http.post(
            "/v1/chat/completions", json={"model": "default", "messages": HELLO, "max_tokens": 2}
        )
        assert found.status_code == 200
        assert found.json()["choices"][0]["message"]["content"]
        assert (await http.get("/health")).status_code == 200
        for path, method, status in (
            ("/nowhere", "GET", 404),
            ("/v1/chat/completions", "GET", 405),
            ("/v1/chat/completions", "POST", 400),
        ):
            wrong = await http.request(method, path)
            assert wrong.status_code == status
            assert set(wrong.json()["error"]) == {"message", "type", "param", "code"}


async def test_default_is_the_only_model_there_is():
    """A fleet of one model that has a name answers calls for `default`, under its name."""
    (spec,) = quick_fleet(1)
    named = msgspec.structs.replace(spec, model="llama")
    async with (
        gateway_mesh((named,)) as mesh,
        AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none") as client,
    ):
        found = await client.chat.completions.create(model="default", messages=HELLO)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="absent", messages=HELLO)
    assert found.model == "llama"


async def test_a_prompt_that_the_engine_finds_too_long_is_a_bad_request():
    """The mesh only guesses the length of a text; the engine's count is told, at once."""
    async with (
        gateway_mesh(quick_fleet(1, max_context_tokens=1_000)) as mesh,
        AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none", max_retries=0) as client,
    ):
        for num_bytes, code, said in (
            (8_000, "call_refused", "never fit"),
            (32_000, "no_eligible_instance", "at least 2005 tokens"),
        ):
            with pytest.raises(openai.BadRequestError, match=said) as caught:
                await client.completions.create(
                    model="default", prompt="x" * num_bytes, max_tokens=5
                )
            assert caught.value.code == code
