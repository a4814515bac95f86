"""An engine without a GPU: the simulator's own batching model on the mesh's clock.

One driver task sleeps until the model's next event and wakes when a call comes or goes. True
lengths come from `request.simulated`, else they are derived from the call, so a call takes the
same time and gives the same text in every run. Faults can be injected while it runs.
"""

import asyncio
import hashlib
import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from shared.contracts.messages import BoundCall, SimulatedLengths, StageRequest, Usage
from shared.domain.instance import InstanceSpec
from shared.errors import CallRefused, EngineDead, EngineError, GenerationFailed, InvalidCall
from shared.ports import Chunk, Clock, EngineEvent, Finished, FirstToken
from shared.simulation.batching import BatchEvent, BatchingInstance

CHUNK_TOKENS = 8
BYTES_PER_TOKEN = 4
LONGEST_DERIVED_OUTPUT = 256
_WORDS = (
    *("select", "name", "from", "orders", "where", "total", "over", "limit", "join", "city", "on"),
    *("group", "by", "year", "having", "count", "above", "mean", "order", "price", "desc", "and"),
)


@dataclass(eq=False, slots=True)
class _Generation:
    handle: int
    inbox: "asyncio.Queue[BatchEvent | EngineError]" = field(default_factory=asyncio.Queue)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, event: BatchEvent | EngineError) -> None:
        self.inbox.put_nowait(event)
        # The first event of a call is its first token; pacing waits for the second.
        if isinstance(event, EngineError) or event.kind == "finished":
            self.arrived.set()


class SimulatedEngine:
    """Implements `Engine`; made by `open`.

    Args:
        spec: The instance to simulate.
        clock: Mesh clock it runs on.

    Raises:
        ConfigError: The description makes no running instance.
    """

    def __init__(self, spec: InstanceSpec, clock: Clock) -> None:
        self._spec = spec
        self._clock = clock
        self._instance = BatchingInstance(spec)
        self._handles = itertools.count()
        self._running: dict[int, _Generation] = {}
        self._changed = asyncio.Event()
        self._batch_changed = asyncio.Event()
        self._dead = asyncio.Event()
        self._is_hanging = False
        self._num_failures = 0
        self._fails_late = False
        self._slowdown = 1.0
        self._slowed_at_s = self._slowed_from_s = 0.0
        self._caches = True

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: InstanceSpec, clock: Clock) -> AsyncIterator[Self]:
        """Run an engine for as long as the block lasts."""
        engine = cls(spec, clock)
        async with asyncio.TaskGroup() as group:
            driver = group.create_task(engine._drive(), name=f"engine-{spec.instance_id}")
            try:
                yield engine
            finally:
                driver.cancel()

    @property
    def spec(self) -> InstanceSpec:
        """Return the instance's description."""
        return self._spec

    async def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Run one call; see `Engine.generate`."""
        if self._dead.is_set():
            raise EngineDead(f"the simulated engine of {self._spec.instance_id} is dead")
        fails, fails_late = self._next_failure()
        if fails and not fails_late:
            raise GenerationFailed(f"{engine_id}: injected failure")
        lengths = true_lengths(call)
        generation = self._admit(call, lengths)
        try:
            first = await self._next_event(generation)
            yield FirstToken()
            words = filler_words(call.request.request_id, lengths.output_tokens)
            if fails:
                if call.request.stream:
                    yield Chunk(words[0])
                raise GenerationFailed(f"{engine_id}: injected failure after the first token")
            if call.request.stream:
                async with aclosing(self._paced_chunks(generation, words)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            else:
                await self._next_event(generation)
            yield _finished(call.request, lengths, words, first.cached_tokens)
        finally:
            self._drop(generation)

    def has_room_for(self, call: BoundCall) -> bool:
        """Return whether the call would be batched now instead of waiting inside the engine."""
        if self._dead.is_set():
            return False
        lengths = true_lengths(call)
        predicted = max(1, round(call.predicted_output_tokens))
        return self._instance.fits_now(lengths.input_tokens, predicted, call.request.prefix)

    async def room_changed(self) -> None:
        """Return when the batch has changed; see `Engine.room_changed`."""
        await self._batch_changed.wait()

    def kv_used_tokens(self) -> int:
        """Return the KV cache in use, tokens."""
        return self._instance.kv_used_tokens

    def foreign_s(self) -> float:
        """Return 0: nobody else uses it."""
        return 0.0

    async def wait_dead(self) -> None:
        """Return when the engine has died."""
        await self._dead.wait()

    # Faults.

    def die(self) -> None:
        """Lose everything, for good."""
        self._dead.set()
        for generation in self._running.values():
            generation.put(EngineDead(f"{self._spec.instance_id} died"))

    def hang(self) -> None:
        """Make no progress until `recover`."""
        self._is_hanging = True
        self._changed.set()

    def fail_next(self, count: int, *, after_first_token: bool = False) -> None:
        """Fail the next `count` generations at their start, or after the first token."""
        self._num_failures = count
        self._fails_late = after_first_token

    def slow_down(self, factor: float) -> None:
        """Take `factor` times as long for everything from now on; what it says of itself stays.

        Args:
            factor: Compared with the latency model, > 0; 1 ends it.
        """
        now_s = self._clock.now_s()
        self._slowed_from_s = self._model_s(now_s)
        self._slowed_at_s = now_s
        self._slowdown = factor
        self._changed.set()

    def lose_cache(self, *, is_lost: bool = True) -> None:
        """Find no prompt prefix in the cache from now on; what it says of itself stays.

        Args:
            is_lost: False ends it.
        """
        self._caches = not is_lost

    def recover(self) -> None:
        """End hanging and failing."""
        self._is_hanging = False
        self._num_failures = 0
        self._changed.set()

    # Inside.

    def _next_failure(self) -> tuple[bool, bool]:
        if self._num_failures == 0:
            return False, False
        self._num_failures -= 1
        return True, self._fails_late

    def _admit(self, call: BoundCall, lengths: SimulatedLengths) -> _Generation:
        generation = _Generation(next(self._handles))
        try:
            self._instance.add(
                generation.handle,
                now_s=self._model_s(self._clock.now_s()),
                input_tokens=lengths.input_tokens,
                output_tokens=lengths.output_tokens,
                prefix=call.request.prefix if self._caches else (),
                priority=call.queue_score,
            )
        except InvalidCall as exc:
            raise CallRefused(str(exc)) from exc
        self._running[generation.handle] = generation
        self._changed.set()
        return generation

    def _drop(self, generation: _Generation) -> None:
        del self._running[generation.handle]
        self._instance.abort(generation.handle, now_s=self._model_s(self._clock.now_s()))
        self._changed.set()

    async def _next_event(self, generation: _Generation) -> BatchEvent:
        event = await generation.inbox.get()
        if isinstance(event, EngineError):
            raise event
        return event

    async def _paced_chunks(
        self, generation: _Generation, words: list[str]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the text at the pace of an idle instance, the rest when the model has finished."""
        model = self._spec.latency
        pace_s = CHUNK_TOKENS * (model.overhead_s + model.weights_s)
        yield Chunk(words[0])
        sent = 1
        while sent + CHUNK_TOKENS < len(words):
            if await self._has_event_within(pace_s, generation):
                break
            yield Chunk(_piece(words, sent, sent + CHUNK_TOKENS))
            sent += CHUNK_TOKENS
        await self._next_event(generation)
        if sent < len(words):
            yield Chunk(_piece(words, sent, len(words)))

    async def _has_event_within(self, mesh_seconds: float, generation: _Generation) -> bool:
        await self._sleep_unless(mesh_seconds, generation.arrived)
        return not generation.inbox.empty()

    async def _drive(self) -> None:
        while True:
            self._changed.clear()
            due_s = self._deliver()
            if math.isinf(due_s):
                await self._changed.wait()
            else:
                await self._sleep_until(due_s)

    def _deliver(self) -> float:
        if self._is_hanging or self._dead.is_set():
            return math.inf
        for event in self._instance.advance(self._model_s(self._clock.now_s())):
            generation = self._running.get(event.handle)
            if generation is not None:
                generation.put(event)
        due_s = self._mesh_s(self._instance.next_event_s())  # fixes the next batch
        self._batch_changed.set()
        self._batch_changed = asyncio.Event()
        return due_s

    # A slow engine is a quick one on a slow clock.

    def _model_s(self, mesh_s: float) -> float:
        """Return the batching model's time at an instant of the mesh."""
        return self._slowed_from_s + (mesh_s - self._slowed_at_s) / self._slowdown

    def _mesh_s(self, model_s: float) -> float:
        return self._slowed_at_s + (model_s - self._slowed_from_s) * self._slowdown

    async def _sleep_until(self, due_s: float) -> None:
        delay_s = due_s - self._clock.now_s()
        if delay_s > 0:
            await self._sleep_unless(delay_s, self._changed)
        else:
            await asyncio.sleep(0)

    async def _sleep_unless(self, mesh_seconds: float, event: asyncio.Event) -> None:
        """Sleep on the mesh clock, but no longer than until `event` is set."""
        async with asyncio.TaskGroup() as group:
            sleep = group.create_task(self._clock.sleep(mesh_seconds), name="engine-sleep")
            change = group.create_task(event.wait(), name="engine-change")
            await asyncio.wait({sleep, change}, return_when=asyncio.FIRST_COMPLETED)
            sleep.cancel()
            change.cancel()


def true_lengths(call: BoundCall) -> SimulatedLengths:
    """Return how long a call's prompt and output really are, tokens.

    Without `request.simulated` the prompt counts a token per four bytes of text, and the output
    length follows from the request id, at most `max_tokens` (or 256).
    """
    request = call.request
    if request.simulated is not None:
        return request.simulated
    num_bytes = sum(
        len(str(message.get("content") or "").encode()) for message in request.messages or ()
    ) + len((request.prompt or "").encode())
    longest = min(request.max_tokens or LONGEST_DERIVED_OUTPUT, LONGEST_DERIVED_OUTPUT)
    return SimulatedLengths(
        input_tokens=max(1, num_bytes // BYTES_PER_TOKEN),
        output_tokens=1 + _seed(request.request_id) % longest,
    )


def filler_words(request_id: str, num_tokens: int) -> list[str]:
    """Return one word per token; the same id gives the same words."""
    start = _seed(request_id) % len(_WORDS)
    repeated = _WORDS * (num_tokens // len(_WORDS) + 2)
    return list(repeated[start : start + num_tokens])


def _seed(request_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest())


def _piece(words: list[str], start: int, stop: int) -> str:
    return "".join(f" {word}" for word in words[start:stop])


def _finished(
    request: StageRequest, lengths: SimulatedLengths, words: list[str], cached_tokens: int
) -> Finished:
    is_cut = request.max_tokens is not None and lengths.output_tokens >= request.max_tokens
    return Finished(
        text=" ".join(words),
        usage=Usage(
            input_tokens=lengths.input_tokens,
            output_tokens=lengths.output_tokens,
            cached_tokens=cached_tokens,
        ),
        finish_reason="length" if is_cut else "stop",
    )
