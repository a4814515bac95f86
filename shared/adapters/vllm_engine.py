"""vLLM's V1 engine inside the worker process.

`open` builds it in a thread, so that probes answer meanwhile: that takes half a minute or more. The
engine renders chat templates, since there is no chat layer below an API server, and sets
`max_tokens`, whose default is 16. A call's priority is its latest start in milliseconds, fixed when
it is handed in; vLLM runs lower ones earlier. Its id inside the engine is `request_id:attempt`, so
that aborting one attempt leaves another alone; closing the iterator aborts it and frees its memory.

When the engine process dies every call raises `EngineDead`, the worker hands its calls back and
exits, and whatever the engine left behind is killed (`engine_guard.py`).
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self

import msgspec
import structlog
from prometheus_client import REGISTRY, generate_latest

from shared.adapters.engine_guard import Guard, Seen, descendants, end_all
from shared.adapters.openai_load import ServerLoad, parse_load
from shared.adapters.openai_request import priority_of
from shared.adapters.vllm_params import VllmParams
from shared.adapters.vllm_request import sampling_fields, template_fields
from shared.contracts.messages import BoundCall, Usage
from shared.domain.instance import InstanceSpec
from shared.errors import CallRefused, ConfigError, EngineDead, GenerationFailed
from shared.ports import Chunk, EngineEvent, Finished, FirstToken

HEALTH_S = 1.0
STOP_GRACE_S = 1.0
MISSING = "vLLM is not installed here: pip install vllm (GPUs), or hexflow model --vllm (CPUs)"
log = structlog.get_logger(__name__)


class _Held(msgspec.Struct):
    """A call inside the engine: tokens of its prompt, and generated."""

    input_tokens: int
    output_tokens: int = 0


class VllmEngine:
    """Implements `Engine`; made by `open`.

    Args:
        spec: The instance, with the engine's resolved flags filled in.
        engine: vLLM's `AsyncLLM`.
        native: What is needed of the vllm package.
    """

    def __init__(self, spec: InstanceSpec, engine: Any, native: "_Native") -> None:
        self._spec = spec
        self._engine = engine
        self._native = native
        self._tokenizer = engine.get_tokenizer()
        self._held: dict[str, _Held] = {}
        self._changed = asyncio.Event()
        self._dead = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: InstanceSpec, params: VllmParams) -> AsyncIterator[Self]:
        """Run an engine for as long as the block lasts; returns when it can serve.

        Raises:
            ConfigError: vLLM is missing, or refuses the model or a flag; with its words.
        """
        native = _load(params)
        guard = Guard()
        before = descendants([os.getpid()])
        parts: set[Seen] = set()
        built: Any = None
        try:
            try:
                built = await asyncio.to_thread(native.build, params)
            except Exception as exc:  # whatever vLLM raises: it has no error of its own for this
                raise ConfigError(f"vLLM does not start: {_told(exc)}") from exc
            parts = descendants([os.getpid()]) - before
            await asyncio.to_thread(guard.look)
            engine = cls(resolved(spec, built.vllm_config), built, native)
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(
                    engine._watch_health(), name=f"health-{spec.instance_id}"
                )
                try:
                    yield engine
                finally:
                    watching.cancel()
        finally:
            await asyncio.to_thread(
                _close, built, parts | (descendants([os.getpid()]) - before), guard
            )

    @property
    def spec(self) -> InstanceSpec:
        """Return the instance's description with flags resolved by the engine."""
        return self._spec

    async def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Run one call; see `Engine.generate`."""
        if self._dead.is_set():
            raise EngineDead(f"the engine of {self._spec.instance_id} is dead")
        # Counted from the first step on, so that nobody is let in for the room it will take.
        held = _Held(input_tokens=max(1, call.predicted_input_tokens))
        self._held[engine_id] = held
        self._ring()
        try:
            token_ids = await asyncio.to_thread(self._token_ids, call)
            sampling = self._sampling(call, len(token_ids))
            held.input_tokens = len(token_ids)
            outputs = self._engine.generate(
                {"prompt_token_ids": token_ids}, sampling, engine_id, priority=priority_of(call)
            )
            async with aclosing(self._events(call, outputs, held)) as events:
                async for event in events:
                    yield event
        except self._native.dead_error as exc:
            self._dead.set()
            raise EngineDead(f"vLLM's engine died: {_told(exc)}") from exc
        except GenerationFailed:
            raise
        except self._native.refusals as exc:
            raise CallRefused(_told(exc)) from exc
        except self._native.generate_error as exc:
            raise GenerationFailed(_told(exc)) from exc
        finally:
            self._held.pop(engine_id, None)
            self._ring()

    def has_room_for(self, call: BoundCall) -> bool:
        """Return whether the call would be batched now instead of waiting inside the engine."""
        if self._dead.is_set() or len(self._held) >= self._spec.max_num_seqs:
            return False
        block = self._spec.block_tokens
        needed = call.predicted_input_tokens + math.ceil(call.predicted_output_tokens)
        in_blocks = block * math.ceil(min(needed, self._spec.kv_tokens) / block)
        return self.kv_used_tokens() + in_blocks <= self._spec.kv_tokens

    async def room_changed(self) -> None:
        """Return when a call has come or gone."""
        await self._changed.wait()

    def kv_used_tokens(self) -> int:
        """Return the KV cache that the calls inside use, in whole blocks, tokens."""
        block = self._spec.block_tokens
        return sum(
            block * math.ceil((held.input_tokens + held.output_tokens) / block)
            for held in self._held.values()
        )

    def foreign_s(self) -> float:
        """Return 0: nobody else uses it."""
        return 0.0

    def load(self) -> ServerLoad | None:
        """Return what vLLM's own metrics say of it; None where they are switched off."""
        return parse_load(generate_latest(REGISTRY).decode())

    async def wait_dead(self) -> None:
        """Return when the engine has died."""
        await self._dead.wait()

    # Inside.

    async def _events(
        self, call: BoundCall, outputs: AsyncGenerator[Any, None], held: _Held
    ) -> AsyncGenerator[EngineEvent, None]:
        texts: list[str] = []
        cached_tokens = 0
        has_begun = False
        async with aclosing(outputs):
            async for output in outputs:
                part = output.outputs[0]
                held.output_tokens += len(part.token_ids)
                cached_tokens = max(cached_tokens, output.num_cached_tokens or 0)
                if part.token_ids and not has_begun:
                    has_begun = True
                    yield FirstToken()
                if part.text:
                    texts.append(part.text)
                    if call.request.stream:
                        yield Chunk(part.text)
                if output.finished:
                    if not has_begun:
                        yield FirstToken()
                    yield _finished(call, "".join(texts), held, cached_tokens, part.finish_reason)
                    return
        raise GenerationFailed("vLLM ended a call without a result")

    def _token_ids(self, call: BoundCall) -> list[int]:
        """Return the prompt in tokens; takes a while for long ones."""
        request = call.request
        try:
            if request.messages is None:
                return list(self._tokenizer.encode(request.prompt or ""))
            found = self._tokenizer.apply_chat_template(
                list(request.messages), tokenize=True, return_dict=False, **template_fields(call)
            )
            return list(found)
        except Exception as exc:  # templates raise what they like about messages they dislike
            raise CallRefused(f"the prompt cannot be rendered: {_told(exc)}") from exc

    def _sampling(self, call: BoundCall, num_input: int) -> Any:
        room_tokens = self._spec.max_context_tokens - num_input
        if num_input >= self._spec.max_context_tokens:
            raise CallRefused(
                f"the prompt has {num_input} tokens, the context {self._spec.max_context_tokens}"
            )
        fields = sampling_fields(call, room_tokens)
        try:
            return self._native.sampling(fields)
        except self._native.refusals as exc:
            raise CallRefused(_told(exc)) from exc

    async def _watch_health(self) -> None:
        """Notice the engine's death even while no call runs; runs until cancelled."""
        while not self._dead.is_set():
            await asyncio.sleep(HEALTH_S)
            if self._engine.errored:
                log.error("engine_died", instance_id=self._spec.instance_id)
                self._dead.set()

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Native(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of the vllm package, found where its releases have it."""

    build: Callable[[VllmParams], Any]
    sampling: Callable[[dict[str, Any]], Any]
    dead_error: type[Exception]
    generate_error: type[Exception]
    refusals: tuple[type[Exception], ...]


def _load(params: VllmParams) -> _Native:
    """Import vLLM with its variables set.

    Raises:
        ConfigError: It is not installed, or does not import.
    """
    os.environ.update({**params.defaults(), **os.environ, **params.variables()})
    # It speaks while it is imported, before it has set the level of its log.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    try:
        import vllm  # noqa: PLC0415 - takes ten seconds, and is there for some workers only
        from vllm.sampling_params import (  # noqa: PLC0415
            RequestOutputKind,
            StructuredOutputsParams,
        )
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(f"{MISSING} ({exc})") from exc

    def build(chosen: VllmParams) -> Any:
        try:
            args = vllm.AsyncEngineArgs(**chosen.engine_args())
        except TypeError as exc:
            msg = f"this vLLM ({vllm.__version__}) knows no such argument: {exc}"
            raise ConfigError(msg) from exc
        return AsyncLLM.from_engine_args(args)

    def sampling(fields: dict[str, Any]) -> Any:
        structure = fields.pop("structured_outputs", None)
        if structure:
            fields["structured_outputs"] = StructuredOutputsParams(**structure)
        return vllm.SamplingParams(output_kind=RequestOutputKind.DELTA, **fields)

    return _Native(
        build=build,
        sampling=sampling,
        dead_error=EngineDeadError,
        generate_error=EngineGenerateError,
        refusals=(ValueError, TypeError, *_client_errors()),
    )


def _client_errors() -> tuple[type[Exception], ...]:
    """Return what newer releases raise for a call that is wrong; older ones raise ValueError."""
    try:
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415
    except ImportError:
        return ()
    return (VLLMClientError,)


def resolved(spec: InstanceSpec, config: Any) -> InstanceSpec:
    """Return an instance's description with the flags that the engine settled on.

    Args:
        spec: The description.
        config: vLLM's `VllmConfig`, after the engine has started.
    """
    cache, scheduler = config.cache_config, config.scheduler_config
    num_blocks = cache.num_gpu_blocks or 0  # blocks of the KV cache, on CPUs too
    kv_tokens = num_blocks * cache.block_size
    changes: dict[str, Any] = {
        "max_context_tokens": config.model_config.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_batched_tokens": scheduler.max_num_batched_tokens,
        "block_tokens": cache.block_size,
        "prefix_caching": bool(cache.enable_prefix_caching),
        **({"kv_tokens": kv_tokens} if kv_tokens else {}),
    }
    log.info("engine_resolved", instance_id=spec.instance_id, **changes)
    return msgspec.structs.replace(spec, **changes)


def _finished(
    call: BoundCall, text: str, held: _Held, cached_tokens: int, finish_reason: str | None
) -> Finished:
    is_chat = call.request.messages is not None
    return Finished(
        text=text,
        usage=Usage(
            input_tokens=held.input_tokens,
            output_tokens=held.output_tokens,
            cached_tokens=min(cached_tokens, held.input_tokens),
        ),
        finish_reason=finish_reason or "stop",
        message={"role": "assistant", "content": text} if is_chat else None,
    )


def _close(engine: Any, parts: set[Seen], guard: Guard) -> None:
    """Stop the engine, and whatever of it does not stop by itself; blocks."""
    if engine is not None:
        try:
            engine.shutdown(timeout=STOP_GRACE_S)
        except TypeError:  # older releases
            engine.shutdown()
        engine.shutdown = _do_nothing  # it would do so again at the interpreter's end, and fail
    others = {one for one in parts if one.pid != guard.pid}
    if not end_all(others, STOP_GRACE_S):
        log.error("engine_left_behind", pids=[one.pid for one in others])
    guard.dismiss()


def _do_nothing(**_: object) -> None:
    pass


def _told(exc: BaseException) -> str:
    """Return what an error says, the innermost cause first; never a prompt."""
    cause = exc.__cause__ or exc
    return f"{type(cause).__name__}: {str(cause)[:300]}" if str(cause) else type(cause).__name__
