"""The scripted model behind the engine port, as slow as an instance that runs one call alone."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from services.text2sql.scripted.model import ScriptedModel
from shared.contracts.messages import BoundCall, Usage
from shared.domain.instance import InstanceSpec
from shared.ports import Chunk, Clock, EngineEvent, Finished, FirstToken

BYTES_PER_TOKEN = 4
CHUNK_CHARS = 32


class ScriptedEngine:
    """Implements `Engine`; made by `open`.

    Args:
        spec: The instance that it stands for.
        clock: Mesh clock.
        model: What answers.
    """

    def __init__(self, spec: InstanceSpec, clock: Clock, model: ScriptedModel) -> None:
        self._spec = spec
        self._clock = clock
        self._model = model
        self._running = 0
        self._changed = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, spec: InstanceSpec, clock: Clock, model: ScriptedModel
    ) -> AsyncIterator[Self]:
        """Run an engine for as long as the block lasts."""
        yield cls(spec, clock, model)

    @property
    def spec(self) -> InstanceSpec:
        """Return the instance's description."""
        return self._spec

    async def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Answer one call; see `Engine.generate`."""
        del engine_id
        messages = call.request.messages or ({"role": "user", "content": call.request.prompt},)
        text = self._model.answer(messages)
        usage = Usage(
            input_tokens=max(1, (call.request.prompt_bytes or 0) // BYTES_PER_TOKEN),
            output_tokens=max(1, len(text.encode()) // BYTES_PER_TOKEN),
        )
        latency = self._spec.latency
        self._running += 1
        try:
            await self._clock.sleep(usage.input_tokens * latency.prefill_s_per_token)
            yield FirstToken()
            await self._clock.sleep(usage.output_tokens * (latency.weights_s + latency.overhead_s))
            if call.request.stream:
                for start in range(0, len(text), CHUNK_CHARS):
                    yield Chunk(text[start : start + CHUNK_CHARS])
            yield Finished(text=text, usage=usage)
        finally:
            self._running -= 1
            self._changed.set()
            self._changed = asyncio.Event()

    def has_room_for(self, call: BoundCall) -> bool:
        """Return whether another call fits."""
        del call
        return self._running < self._spec.max_num_seqs

    async def room_changed(self) -> None:
        """Return when a call has ended."""
        await self._changed.wait()

    def kv_used_tokens(self) -> int:
        """Return 0: there is no cache."""
        return 0

    def foreign_s(self) -> float:
        """Return 0: it serves nobody else."""
        return 0.0

    async def wait_dead(self) -> None:
        """Never return: it does not die."""
        await asyncio.Event().wait()
