"""Which engine runs the calls: chosen by `WORKER_ENGINE`, its own settings in a group."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from shared.adapters.engine_faults import faults_from
from shared.adapters.openai_engine import OpenAIEngine
from shared.adapters.openai_params import OpenAIParams
from shared.adapters.replayed_prompts import ReplayedPrompts
from shared.adapters.simulated_engine import SimulatedEngine
from shared.domain.instance import InstanceSpec
from shared.errors import ConfigError
from shared.ports import Clock, Engine
from shared.runtime.settings import Group

EngineKind = Literal["simulated", "openai"]


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


@asynccontextmanager
async def open_engine(
    kind: EngineKind,
    spec: InstanceSpec,
    clock: Clock,
    *,
    openai: OpenAISettings,
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
    async with OpenAIEngine.open(spec, openai.params(), clock) as server:
        yield ReplayedPrompts(server)
