"""Any server that speaks the OpenAI API, as an engine: vLLM, SGLang, llama.cpp, ...

Every request streams, so that the first token is seen and silence is noticed; the text goes on in
chunks only where the call asked for them. A request that the server could not take now is sent
again; one that brought a token never is. Closing the iterator closes the connection, and with it
the server stops.

A request the server itself refuses (too long, a wrong value) is `CallRefused`; everything else that
goes wrong is `GenerationFailed`, within its timeout, and counts against the server's circuit.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Self

import structlog

from shared.adapters.openai_circuit import Circuit
from shared.adapters.openai_http import ServerBusy, UpstreamClient, UpstreamStream
from shared.adapters.openai_load import ForeignLoad
from shared.adapters.openai_params import OpenAIParams
from shared.adapters.openai_request import CHAT, UpstreamRequest, upstream_request
from shared.adapters.openai_server import resolve, wait_for_server
from shared.adapters.openai_stream import Answer
from shared.contracts.messages import BoundCall
from shared.domain.instance import InstanceSpec
from shared.errors import GenerationFailed
from shared.ports import Chunk, Clock, EngineEvent, Finished, FirstToken
from shared.scheduling.latency import service_s

TYPICAL_INPUT_TOKENS = 512
TYPICAL_OUTPUT_TOKENS = 128
MEAN_WEIGHT = 0.05
LAST_WORD_S = 1.0
"""How long a server may still say its token counts, or goodbye, after a whole answer, wall seconds.

Some keep the connection open and say neither.
"""
log = structlog.get_logger(__name__)


class OpenAIEngine:
    """Implements `Engine`; made by `open`.

    Args:
        spec: The instance, with what the server tells of itself filled in.
        params: Where the server is and how long to wait for it.
        client: Talks to it.
        clock: For its monotonic time.
        model: The server's name for the instance's base model.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        params: OpenAIParams,
        client: UpstreamClient,
        clock: Clock,
        model: str,
    ) -> None:
        self._spec = spec
        self._params = params
        self._client = client
        self._clock = clock
        self._model = model
        self._circuit = Circuit(
            params.failure_threshold,
            params.failure_pause_s,
            params.longest_failure_pause_s,
            clock,
            spec.instance_id,
        )
        self._foreign = ForeignLoad()
        self._held_tokens: dict[str, int] = {}
        self._mean_t_comp_s = service_s(
            spec,
            input_tokens=TYPICAL_INPUT_TOKENS,
            cached_tokens=0,
            output_tokens=TYPICAL_OUTPUT_TOKENS,
        )
        self._changed = asyncio.Event()
        self._has_told_no_usage = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, spec: InstanceSpec, params: OpenAIParams, clock: Clock
    ) -> AsyncIterator[Self]:
        """Use a server for as long as the block lasts.

        Raises:
            ConfigError: It does not serve the model, or refuses the key.
            TransientError: It does not answer within `startup_s`.
        """
        async with UpstreamClient.open(params) as client:
            facts = await wait_for_server(client, params, clock)
            model = facts.name_of(params.model, spec.model)
            engine = cls(resolve(spec, facts), params, client, clock, model)
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(engine._watch_load(), name=f"load-{spec.instance_id}")
                try:
                    yield engine
                finally:
                    watching.cancel()

    @property
    def spec(self) -> InstanceSpec:
        """Return the instance's description with what the server told filled in."""
        return self._spec

    @property
    def model(self) -> str:
        """Return the server's name of the instance's model."""
        return self._model

    async def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Run one call; see `Engine.generate`."""
        request = upstream_request(
            call, self._spec, self._model, sends_priority=self._params.sends_priority
        )
        # Held while it waits for its turn too: it is on its way into the server's batch.
        self._hold(engine_id, call.predicted_input_tokens)
        self._mean_t_comp_s += MEAN_WEIGHT * (call.t_comp_s - self._mean_t_comp_s)
        try:
            async with (
                self._circuit.turn() as turn,
                aclosing(self._attempts(request, engine_id)) as events,
            ):
                async for event in events:
                    if isinstance(event, Finished):
                        self._circuit.answered()
                    elif isinstance(event, FirstToken):
                        self._circuit.token_seen(turn)
                    if call.request.stream or not isinstance(event, Chunk):
                        yield event
        finally:
            self._release(engine_id)

    def has_room_for(self, call: BoundCall) -> bool:
        """Return whether the server would batch the call now, as far as can be known."""
        if not self._circuit.allows():
            return False
        num_running = len(self._held_tokens) + self._foreign.num_running
        if num_running >= self._spec.max_num_seqs:
            return False
        needed = call.predicted_input_tokens + math.ceil(call.predicted_output_tokens)
        return self.kv_used_tokens() + min(needed, self._spec.kv_tokens) <= self._spec.kv_tokens

    async def room_changed(self) -> None:
        """Return when a call has come or gone, or the metrics were read."""
        await self._changed.wait()

    def kv_used_tokens(self) -> int:
        """Return the KV cache in use by our calls, tokens: as predicted and as generated."""
        return sum(self._held_tokens.values())

    def foreign_s(self) -> float:
        """Return the load from outside the mesh, mesh seconds of work."""
        return self._foreign.num_calls * self._mean_t_comp_s

    async def wait_dead(self) -> None:
        """Wait for ever: a server that is gone may come back."""
        await asyncio.Event().wait()

    # Inside.

    async def _attempts(
        self, request: UpstreamRequest, engine_id: str
    ) -> AsyncGenerator[EngineEvent, None]:
        """Send a request until the server takes it, or it has had its tries."""
        give_up_at_s = self._clock.monotonic_s() + self._params.total_s
        for attempt in range(self._params.retries + 1):
            has_begun = False
            try:
                async with aclosing(self._once(request, engine_id, give_up_at_s)) as events:
                    async for event in events:
                        has_begun = True
                        yield event
            except ServerBusy as exc:
                pause_s = self._pause_s(attempt, exc.retry_after_s)
                is_late = self._clock.monotonic_s() + pause_s >= give_up_at_s
                if has_begun or is_late or attempt == self._params.retries:
                    raise
                log.info("engine_request_retried", engine_id=engine_id, cause=str(exc))
            else:
                return
            await self._clock.sleep_wall(pause_s)

    def _pause_s(self, attempt: int, retry_after_s: float) -> float:
        pause_s = max(retry_after_s, self._params.retry_pause_s * float(2**attempt))
        return min(pause_s, self._params.longest_retry_pause_s)

    async def _once(
        self, request: UpstreamRequest, engine_id: str, give_up_at_s: float
    ) -> AsyncGenerator[EngineEvent, None]:
        answer = Answer(is_chat=request.path == CHAT)
        has_begun = is_whole = False
        now_s = self._clock.monotonic_s
        wait_until_s = min(give_up_at_s, now_s() + self._params.first_token_s)
        async with self._client.stream(request, wait_until_s - now_s()) as stream:
            while (events := await self._more(stream, answer, wait_until_s - now_s())) is not None:
                is_news = False
                for data in events:
                    brings_any, text = answer.take(data)
                    if not brings_any:
                        continue
                    is_news = True
                    self._held_tokens[engine_id] += 1
                    if not has_begun:
                        has_begun = True
                        yield FirstToken()
                    if text:
                        yield Chunk(text)
                if answer.is_complete and (is_news or not is_whole):
                    is_whole = True  # what is no news from here on (a ping) buys no more time
                    wait_until_s = min(give_up_at_s, now_s() + LAST_WORD_S)
                elif has_begun and not is_whole:
                    wait_until_s = min(give_up_at_s, now_s() + self._params.idle_s)
        finished = answer.finished()
        if not answer.has_usage:
            self._tell_no_usage()
        if not has_begun:
            yield FirstToken()
        yield finished

    async def _more(
        self, stream: UpstreamStream, answer: Answer, limit_s: float
    ) -> list[str] | None:
        """Return the next events; a whole answer is not waited on for its formal end."""
        try:
            return await stream.read(limit_s)
        except GenerationFailed:
            if answer.is_complete:
                return None
            raise

    def _hold(self, engine_id: str, input_tokens: int) -> None:
        # A guess of a prompt's length may be longer than what any call can hold.
        self._held_tokens[engine_id] = max(1, min(input_tokens, self._spec.max_context_tokens))
        self._ring()

    def _release(self, engine_id: str) -> None:
        self._held_tokens.pop(engine_id, None)
        self._ring()

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell_no_usage(self) -> None:
        if not self._has_told_no_usage:
            self._has_told_no_usage = True
            log.warning("engine_tells_no_usage", instance_id=self._spec.instance_id)

    async def _watch_load(self) -> None:
        """Look at the server's metrics again and again; runs until cancelled."""
        while True:
            before = len(self._held_tokens)
            load = await self._client.load()
            if load is None:
                self._foreign.forget()
            else:
                self._foreign.see(load, before, len(self._held_tokens))
            self._ring()
            await self._clock.sleep_wall(self._params.load_s)
