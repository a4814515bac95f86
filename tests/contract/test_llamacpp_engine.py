"""llama.cpp's real server behind the OpenAI adapter keeps the engine contract."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from shared.adapters.llamacpp_server import LlamaCppParams, LlamaCppServer
from shared.contracts.messages import BoundCall
from shared.errors import CallRefused, ConfigError, GenerationFailed
from shared.ports import Chunk, Engine, Finished
from tests.contract.engine_contract import WITHIN_S, EngineContract, events_of
from tests.support.engines import (
    NUM_SLOTS,
    SLOT_TOKENS,
    llamacpp_engine,
    llamacpp_server,
    real_call,
    small_model,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppServer]:
    """Return a server that the tests share."""
    with llamacpp_server(tmp_path_factory.mktemp("llamacpp") / "log") as server:
        yield server


@pytest.fixture
async def engine(server: LlamaCppServer) -> AsyncIterator[Engine]:
    """Return an engine on it."""
    async with llamacpp_engine(server.url) as engine:
        yield engine


class TestLlamaCppEngine(EngineContract):
    """The contract."""

    def call(self, request_id: str, **fields: Any) -> BoundCall:
        """Return a call with a real prompt."""
        return real_call(request_id, **fields)


async def test_the_server_describes_itself(engine: Engine):
    """Slots, context and KV cache are the server's own."""
    spec = engine.spec
    found = (spec.max_num_seqs, spec.max_context_tokens, spec.kv_tokens)
    assert found == (NUM_SLOTS, SLOT_TOKENS, NUM_SLOTS * SLOT_TOKENS)


async def test_a_question_is_answered(engine: Engine):
    """A chat call is rendered by the model's own template and answered in words."""
    messages = ({"role": "user", "content": "What is 2+2?"},)
    call = real_call("q", prompt=None, messages=messages, max_tokens=24, extra={})
    *_, last = await events_of(engine, call)
    assert isinstance(last, Finished)
    assert "4" in last.text
    assert last.message == {"role": "assistant", "content": last.text}


async def test_a_repeated_prompt_is_found_cached(engine: Engine):
    """The server reports what it found in its cache."""
    call = real_call("cached", input_tokens=100, output_tokens=1)
    await events_of(engine, call)
    *_, last = await events_of(engine, call)
    assert isinstance(last, Finished)
    assert last.usage.cached_tokens > last.usage.input_tokens // 2


async def test_structured_output_keeps_to_its_schema(engine: Engine):
    """A JSON schema passes through to the engine and binds it."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    messages = ({"role": "user", "content": "Give me a number."},)
    call = real_call(
        "s", prompt=None, messages=messages, max_tokens=40, extra={"response_format": form}
    )
    *_, last = await events_of(engine, call)
    assert isinstance(last, Finished)
    assert last.text.lstrip().startswith("{")
    assert '"n"' in last.text


async def test_a_wrong_value_is_refused(engine: Engine):
    """What the server cannot read fails the call, once, and says why."""
    with pytest.raises(CallRefused, match="temperature"):
        await events_of(engine, real_call("w", sampling={"temperature": "hot"}))


async def test_twenty_streams_keep_order_and_lose_nothing(engine: Engine):
    """Streams side by side, more than the server batches, each bring their own whole text."""

    async def stream(name: str) -> tuple[str, str, int]:
        events = await events_of(engine, real_call(name, stream=True, output_tokens=8))
        last = events[-1]
        assert isinstance(last, Finished)
        pieces = "".join(event.text for event in events if isinstance(event, Chunk))
        return pieces, last.text, last.usage.output_tokens

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(f"c{n}"), name=f"c{n}") for n in range(20)]
    for pieces, text, num_tokens in (task.result() for task in tasks):
        assert pieces == text
        assert num_tokens == 8


async def test_a_killed_server_fails_its_calls_and_comes_back(tmp_path: Path):
    """SIGKILL mid-generation fails the call; started again, the same engine goes on."""
    with llamacpp_server(tmp_path / "log") as server:
        async with (
            llamacpp_engine(server.url, retries=8, retry_pause_s=0.5) as engine,
            asyncio.TaskGroup() as group,
        ):
            keeping = group.create_task(server.keep_running(), name="keep")
            with pytest.raises(GenerationFailed):
                await _kill_at_first_chunk(engine, server)
            assert engine.kv_used_tokens() == 0
            async with asyncio.timeout(WITHIN_S):
                *_, last = await events_of(engine, real_call("b"))
            assert isinstance(last, Finished)
            keeping.cancel()


def test_a_missing_model_is_a_configuration_error(tmp_path: Path):
    """A path without a file is told before anything is started."""
    params = LlamaCppParams(model_path=str(tmp_path / "none.gguf"), model_name="x")
    with pytest.raises(ConfigError, match=r"none\.gguf"):
        LlamaCppServer(params, tmp_path / "log")


def test_a_file_that_is_no_model_is_told_with_the_servers_words(tmp_path: Path):
    """A broken file ends the start with the end of the server's log."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(small_model().read_bytes()[:10_000])
    server = LlamaCppServer(LlamaCppParams(model_path=str(path), model_name="x"), tmp_path / "log")
    with pytest.raises(ConfigError, match=r"llama\.cpp ended while starting"):
        server.start()
    assert server.pid is None


async def _kill_at_first_chunk(engine: Engine, server: LlamaCppServer) -> None:
    call = real_call("a", stream=True, output_tokens=400)
    async with aclosing(engine.generate(call, "a:0")) as events:
        async for event in events:
            if isinstance(event, Chunk) and server.pid is not None:
                os.kill(server.pid, signal.SIGKILL)
