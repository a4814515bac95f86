"""Which engine runs the calls: chosen by `WORKER_ENGINE`, its own settings in a group."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr

from shared.adapters.engine_faults import faults_from
from shared.adapters.openai_engine import OpenAIEngine
from shared.adapters.openai_params import OpenAIParams
from shared.adapters.replayed_prompts import ReplayedPrompts
from shared.adapters.simulated_engine import SimulatedEngine
from shared.adapters.vllm_engine import VllmEngine
from shared.adapters.vllm_params import VllmParams
from shared.domain.instance import InstanceSpec
from shared.errors import ConfigError
from shared.ports import Clock, Engine
from shared.runtime.settings import Group

EngineKind = Literal["simulated", "openai", "vllm"]


class OpenAISettings(Group):
    """An OpenAI-compatible server in front of which the worker stands (`engine=openai`)."""

    url: str = "http://127.0.0.1:8000"
    """Its address, with or without `/v1`."""
    model: str = ""
    """Its name for the instance's model; empty: the instance's, or the only one it serves."""
    api_key: SecretStr = SecretStr("")
    """Sent as bearer token; never printed or logged."""
    connect_s: float = Field(default=5.0, gt=0, le=300)
    """Longest time to connect, wall seconds."""
    first_token_s: float = Field(default=300.0, gt=0, le=86_400)
    """Longest time from a request to its first token, wall seconds."""
    idle_s: float = Field(default=60.0, gt=0, le=86_400)
    """Longest silence between two tokens, wall seconds."""
    total_s: float = Field(default=3_600.0, gt=0, le=86_400)
    """Longest time for a call, wall seconds."""
    retries: int = Field(default=2, ge=0, le=100)
    """Further tries of a request that brought no token."""
    startup_s: float = Field(default=60.0, ge=0, le=86_400)
    """How long to wait at the start for a server that does not answer yet, wall seconds."""
    load_s: float = Field(default=1.0, ge=0.01, le=3_600)
    """Time between two looks at its `/metrics`, wall seconds."""
    sends_priority: bool = False
    """Whether it is told priorities; vLLM needs `--scheduling-policy priority` for that."""

    def params(self) -> OpenAIParams:
        """Return these settings as the adapter takes them.

        Raises:
            ConfigError: The address is none.
        """
        own = self.model_dump(exclude={"api_key"})
        return OpenAIParams(**own, api_key=self.api_key.get_secret_value() or None)


class VllmSettings(Group):
    """vLLM inside the worker (`engine=vllm`); what is unset is vLLM's own choice."""

    model: str = ""
    """Folder or name of the model; empty: the instance's model."""
    dtype: str = "auto"
    """Number format in use."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus output, tokens; unset: the model's."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Most calls in a batch; unset: the instance's."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Token budget of an iteration; unset: the instance's."""
    block_size: int | None = Field(default=None, ge=1)
    """KV block size, tokens."""
    enforce_eager: bool = False
    """Start at once, without compiling graphs; slower later."""
    cpu_kv_cache_gib: int | None = Field(default=None, ge=1, le=4_096)
    """On CPUs: room of the KV cache, GiB; by itself vLLM claims most of the memory."""
    cpu_cores: str | None = None
    """On CPUs: cores its threads are bound to, such as `0-3`."""
    extra: dict[str, Any] = Field(default={})
    """Further arguments of vLLM's `AsyncEngineArgs`, as a JSON object."""

    def params(self, spec: InstanceSpec) -> VllmParams:
        """Return these settings as the adapter takes them.

        Args:
            spec: The instance, for what is unset.

        Raises:
            ConfigError: `extra` sets what is hexflow's to set.
        """
        own = self.model_dump()
        own["model"] = self.model or spec.model
        own["max_num_seqs"] = self.max_num_seqs or spec.max_num_seqs
        own["max_num_batched_tokens"] = self.max_num_batched_tokens or spec.max_batched_tokens
        return VllmParams(**own)


@asynccontextmanager
async def open_engine(
    kind: EngineKind,
    spec: InstanceSpec,
    clock: Clock,
    *,
    openai: OpenAISettings,
    vllm: VllmSettings,
    fault_file: Path | None = None,
) -> AsyncIterator[Engine]:
    """Run an engine for as long as the block lasts.

    Raises:
        ConfigError: A setting is wrong, or the server does not serve the model.
        TransientError: The server does not answer.
    """
    if kind == "simulated":
        async with (
            SimulatedEngine.open(spec, clock) as simulated,
            faults_from(fault_file, simulated, clock),
        ):
            yield simulated
        return
    if clock.time_scale != 1:
        raise ConfigError("real engines run in real time: HEXFLOW_TIME_SCALE must be 1")
    if kind == "vllm":
        async with VllmEngine.open(spec, vllm.params(spec)) as inner:
            yield ReplayedPrompts(inner)
        return
    async with OpenAIEngine.open(spec, openai.params(), clock) as server:
        yield ReplayedPrompts(server)
