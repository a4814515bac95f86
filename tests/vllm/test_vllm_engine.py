"""Real vLLM in the worker's process keeps the engine contract, and what the mesh relies on."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from shared.adapters.vllm_engine import VllmEngine
from shared.contracts.messages import BoundCall
from shared.errors import CallRefused, ConfigError
from shared.ports import Chunk, Engine, Finished, FirstToken
from tests.contract.engine_contract import EngineContract, events_of
from tests.support.engines import real_call
from tests.vllm.support import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    NUM_SEQS,
    generated_tokens,
    small_params,
    vllm_engine,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    """Return one engine for all tests: it takes a while to start."""
    async with vllm_engine() as engine:
        yield engine


class TestVllmEngine(EngineContract):
    """The contract."""

    def call(self, request_id: str, **fields: Any) -> BoundCall:
        """Return a call with a real prompt."""
        return real_call(request_id, **fields)


async def test_resolved_flags_are_reported(engine: VllmEngine):
    """Context, batch, blocks and KV cache are what vLLM settled on."""
    spec = engine.spec
    assert (spec.max_context_tokens, spec.max_num_seqs) == (CONTEXT_TOKENS, NUM_SEQS)
    assert (spec.block_tokens, spec.prefix_caching) == (BLOCK_TOKENS, True)
    assert spec.kv_tokens > 10_000
    assert spec.kv_tokens % BLOCK_TOKENS == 0


async def test_a_chat_call_is_rendered_by_the_models_template(engine: VllmEngine):
    """The worker renders messages; the answer comes as a message too."""
    messages = ({"role": "user", "content": "What is 2+2?"},)
    call = real_call("q", prompt=None, messages=messages, max_tokens=None, extra={})
    *_, last = await events_of(engine, call)
    assert isinstance(last, Finished)
    assert "4" in last.text
    assert last.message == {"role": "assistant", "content": last.text}
    assert last.usage.input_tokens > 30  # the template has a system prompt
    assert last.finish_reason == "stop"


async def test_without_a_limit_an_answer_is_not_cut_at_sixteen(engine: VllmEngine):
    """The default of 16 tokens of vLLM does not apply."""
    call = real_call("long", input_tokens=CONTEXT_TOKENS - 60, max_tokens=None)
    *_, last = await events_of(engine, call)
    assert isinstance(last, Finished)
    assert last.usage.output_tokens == CONTEXT_TOKENS - last.usage.input_tokens > 16
    assert last.finish_reason == "length"


async def test_a_repeated_prompt_is_found_in_whole_blocks(engine: VllmEngine):
    """Prefix caching is on, and hits come in blocks."""
    call = real_call("cached", input_tokens=150, output_tokens=1)
    await events_of(engine, call)
    *_, last = await events_of(engine, call)
    assert isinstance(last, Finished)
    assert last.usage.cached_tokens > 100
    assert last.usage.cached_tokens % BLOCK_TOKENS == 0


@pytest.mark.parametrize(
    "extra",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "schema": {
                        "type": "object",
                        "properties": {"n": {"type": "integer", "maximum": 9}},
                        "required": ["n"],
                        "additionalProperties": False,
                    }
                },
            }
        },
        {"structured_outputs": {"grammar": 'root ::= "{" "\\"n\\": " [0-9] "}"'}},
        {"guided_regex": r'\{"n": [0-9]\}'},
    ],
    ids=["schema", "grammar", "regex"],
)
async def test_structured_output_binds(engine: VllmEngine, extra: dict[str, Any]):
    """JSON schema, grammar and regex each force the form."""
    messages = ({"role": "user", "content": "Give me a number."},)
    call = real_call("s", prompt=None, messages=messages, max_tokens=40, extra=extra)
    *_, last = await events_of(engine, call)
    assert isinstance(last, Finished)
    assert isinstance(json.loads(last.text)["n"], int)


async def test_stop_sequences_end_the_answer(engine: VllmEngine):
    """A stop sequence cuts the text before it and is told as a reason."""
    whole = real_call("stop", output_tokens=40)
    *_, last = await events_of(engine, whole)
    assert isinstance(last, Finished)
    word = last.text.split()[3]
    *_, cut = await events_of(
        engine, real_call("stop", output_tokens=40, sampling={"temperature": 0.0, "stop": [word]})
    )
    assert isinstance(cut, Finished)
    assert cut.text == last.text[: last.text.index(word)]
    assert cut.finish_reason == "stop"


async def test_wrong_values_are_refused(engine: VllmEngine):
    """A value or field that vLLM does not take fails its call alone, and for good."""
    for fields in (
        {"sampling": {"temperature": -3.0}},
        {"extra": {"frobnicate": 1}},
        {"extra": {"guided_regex": "(("}},
    ):
        with pytest.raises(CallRefused):
            await events_of(engine, real_call("w", **fields))
    *_, last = await events_of(engine, real_call("ok"))
    assert isinstance(last, Finished)


async def test_the_more_urgent_call_starts_first(engine: VllmEngine):
    """Among calls that wait inside, one with an earlier latest start that came later goes first."""
    order: list[str] = []

    async def run(name: str, score: float, output_tokens: int) -> None:
        call = real_call(name, score=score, output_tokens=output_tokens)
        async with aclosing(engine.generate(call, f"{name}:0")) as events:
            assert isinstance(await anext(events), FirstToken)
            order.append(name)
            async for _ in events:
                pass

    async with asyncio.TaskGroup() as group:
        for index in range(NUM_SEQS):
            group.create_task(run(f"busy{index}", 0.0, 60), name=f"busy{index}")
        await _until(lambda: len(order) == NUM_SEQS)
        for index in range(3):
            group.create_task(run(f"later{index}", 2_000.0 + index, 3), name=f"later{index}")
        await _until(lambda: waiting_inside(engine) == 3)
        group.create_task(run("urgent", 1_000.0, 3), name="urgent")
    assert order[NUM_SEQS:] == ["urgent", "later0", "later1", "later2"]


async def test_a_cancelled_call_stops_within_two_steps(engine: VllmEngine):
    """By the engine's own counter, at most two more tokens are generated after the abort."""
    call = real_call("a", stream=True, output_tokens=400)
    num_seen = 0
    async with aclosing(engine.generate(call, "a:0")) as events:
        async for event in events:
            num_seen += isinstance(event, Chunk)
            if num_seen == 10:
                break
    at_abort = generated_tokens()
    assert engine.kv_used_tokens() == 0
    *_, last = await events_of(engine, real_call("after", output_tokens=20))
    assert isinstance(last, Finished)
    assert generated_tokens() - at_abort <= 20 + 2


async def test_twenty_streams_keep_order_and_lose_nothing(engine: VllmEngine):
    """Streams side by side, more than a batch holds, each bring their own whole text."""

    async def stream(name: str) -> tuple[str, str, int]:
        events = await events_of(engine, real_call(name, stream=True, output_tokens=12))
        last = events[-1]
        assert isinstance(last, Finished)
        text = "".join(event.text for event in events if isinstance(event, Chunk))
        return text, last.text, last.usage.output_tokens

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(f"c{n}"), name=f"c{n}") for n in range(20)]
    for text, whole, num_tokens in (task.result() for task in tasks):
        assert text == whole
        assert num_tokens == 12


async def test_what_admission_lets_in_is_batched(engine: VllmEngine):
    """Calls given only while there is room never wait inside: P99 of vLLM's own count is <= 1."""
    seen: list[int] = []
    gate = asyncio.Condition()

    async def admitted(index: int) -> None:
        call = real_call(f"g{index}", output_tokens=8)
        async with gate:
            await gate.wait_for(lambda: engine.has_room_for(call))
            running = asyncio.ensure_future(events_of(engine, call))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await running
        async with gate:
            gate.notify_all()

    async def look() -> None:
        while True:
            seen.append(waiting_inside(engine))
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        looking = group.create_task(look(), name="look")
        await asyncio.gather(*(admitted(index) for index in range(24)))
        looking.cancel()
    assert sorted(seen)[int(0.99 * len(seen))] <= 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "/nowhere/model"}, "nowhere"),
        ({"dtype": "float99"}, "float99"),
        ({"extra": {"no_such_flag": 1}}, "no_such_flag"),
    ],
)
async def test_what_cannot_start_is_told(changes: dict[str, Any], said: str):
    """A missing model, a wrong dtype or an unknown flag is a configuration error with its name."""
    with pytest.raises(ConfigError, match=said):
        async with vllm_engine(**changes):
            pass
    assert small_params().model


async def test_another_engine_was_not_disturbed(engine: Engine):
    """The engine of this module still serves after others failed to start beside it."""
    *_, last = await events_of(engine, real_call("still"))
    assert isinstance(last, Finished)


def waiting_inside(engine: VllmEngine) -> int:
    """Return how many calls wait inside vLLM, by its own gauge."""
    load = engine.load()
    assert load is not None
    return load.num_waiting


async def _until(is_so: Any) -> None:
    async with asyncio.timeout(120):
        while not is_so():
            await asyncio.sleep(0.005)
