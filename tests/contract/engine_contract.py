"""What every engine does, stated once; `test_<engine>_engine.py` binds it."""

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from shared.contracts.messages import BoundCall
from shared.errors import CallRefused
from shared.ports import Chunk, Engine, EngineEvent, Finished, FirstToken
from tests.support.worker_bench import bound_call

WITHIN_S = 30.0


async def events_of(engine: Engine, call: BoundCall, attempt: int = 0) -> list[EngineEvent]:
    """Return everything an engine says about a call."""
    engine_id = f"{call.request.request_id}:{attempt}"
    async with asyncio.timeout(WITHIN_S), aclosing(engine.generate(call, engine_id)) as events:
        return [event async for event in events]


class EngineContract:
    """Bind with a fixture `engine`, and with `call` where calls need more than their lengths."""

    def call(self, request_id: str, **fields: Any) -> BoundCall:
        """Return a call with the lengths wanted, tokens; `fields` as for `bound_call`."""
        return bound_call(request_id, **fields)

    async def test_first_token_then_finished(self, engine: Engine) -> None:
        """A call gives its first token once, then its result once, and nothing after."""
        first, last = await events_of(engine, self.call("a"))
        assert isinstance(first, FirstToken)
        assert isinstance(last, Finished)
        assert last.text
        assert last.finish_reason

    async def test_usage_is_counted(self, engine: Engine) -> None:
        """The result counts prompt and output tokens, both above zero."""
        *_, last = await events_of(engine, self.call("a"))
        assert isinstance(last, Finished)
        assert last.usage.input_tokens > 0
        assert last.usage.output_tokens > 0
        assert 0 <= last.usage.cached_tokens <= last.usage.input_tokens

    async def test_chunks_make_up_the_text(self, engine: Engine) -> None:
        """A streaming call gives chunks between first token and result; together they are it."""
        first, *chunks, last = await events_of(
            engine, self.call("a", stream=True, output_tokens=40)
        )
        assert isinstance(first, FirstToken)
        assert isinstance(last, Finished)
        texts = [chunk.text for chunk in chunks if isinstance(chunk, Chunk)]
        assert len(texts) == len(chunks) > 0
        assert "".join(texts) == last.text

    async def test_one_token_streams_too(self, engine: Engine) -> None:
        """The shortest output is streamed whole."""
        _, *chunks, last = await events_of(engine, self.call("a", stream=True, output_tokens=1))
        assert isinstance(last, Finished)
        assert "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk)) == last.text

    async def test_calls_run_side_by_side(self, engine: Engine) -> None:
        """Calls given together all finish, each with its own result."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(events_of(engine, self.call(f"c{index}")), name=f"c{index}")
                for index in range(6)
            ]
        assert all(isinstance(task.result()[-1], Finished) for task in tasks)

    async def test_closing_early_frees_the_engine(self, engine: Engine) -> None:
        """Closing the iterator after the first token aborts the generation."""
        async with aclosing(engine.generate(self.call("a", output_tokens=500), "a:0")) as events:
            assert isinstance(await anext(events), FirstToken)
        await _until_empty(engine)
        *_, last = await events_of(engine, self.call("b"))
        assert isinstance(last, Finished)

    async def test_cancelled_reader_frees_the_engine(self, engine: Engine) -> None:
        """Cancelling the task that reads aborts the generation."""
        call = self.call("a", output_tokens=500)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(events_of(engine, call), name="a")
            async with asyncio.timeout(WITHIN_S):
                while engine.kv_used_tokens() == 0:
                    await asyncio.sleep(0.002)
            task.cancel()
        assert task.cancelled()
        await _until_empty(engine)

    async def test_same_call_may_run_again(self, engine: Engine) -> None:
        """A second attempt of a call is a generation of its own."""
        call = self.call("a")
        await events_of(engine, call, attempt=0)
        *_, last = await events_of(engine, call, attempt=1)
        assert isinstance(last, Finished)

    async def test_impossible_call_fails_alone(self, engine: Engine) -> None:
        """A call beyond the context is refused for good; the others go on."""
        too_long = engine.spec.max_context_tokens + 1
        with pytest.raises(CallRefused):
            await events_of(engine, self.call("huge", input_tokens=too_long))
        *_, last = await events_of(engine, self.call("small"))
        assert isinstance(last, Finished)

    async def test_idle_engine_has_room(self, engine: Engine) -> None:
        """An engine without work takes a call, uses no memory, and is alive."""
        assert engine.has_room_for(self.call("a"))
        assert engine.kv_used_tokens() == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.wait_dead()

    async def test_a_call_predicted_to_fill_more_than_the_cache_finds_room(
        self, engine: Engine
    ) -> None:
        """A prediction may be too high: on an idle engine the call never waits for more."""
        call = msgspec.structs.replace(
            self.call("a"), predicted_input_tokens=9_000_000, predicted_output_tokens=9e6
        )
        assert engine.has_room_for(call)

    async def test_room_change_is_told(self, engine: Engine) -> None:
        """A reader that waits for room is woken while calls run."""
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(engine.room_changed(), name="room")
            await events_of(engine, self.call("a"))
            async with asyncio.timeout(WITHIN_S):
                await waiting


async def _until_empty(engine: Engine) -> None:
    async with asyncio.timeout(WITHIN_S):
        while engine.kv_used_tokens() > 0:
            await asyncio.sleep(0.002)
