"""An `openai` engine on a fake server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.adapters.clock import SystemClock
from shared.adapters.openai_engine import OpenAIEngine
from shared.adapters.openai_params import OpenAIParams
from tests.support.openai_server import FakeServer
from tests.support.worker_bench import SPEC

QUICK: dict[str, Any] = {
    "retry_pause_s": 0.01,
    "load_s": 0.02,
    "failure_threshold": 1_000,
    "startup_s": 0.2,
}


@asynccontextmanager
async def opened(server: FakeServer, **params: Any) -> AsyncIterator[OpenAIEngine]:
    """Open an engine on a server, with short times unless others are given."""
    chosen = OpenAIParams(url=server.url, **(QUICK | params))
    async with OpenAIEngine.open(SPEC, chosen, SystemClock()) as engine:
        yield engine
