"""Real engines for tests marked `engine`: what they need is fetched, or the test is not run."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from shared.adapters.clock import SystemClock
from shared.adapters.llamacpp_server import LlamaCppParams, LlamaCppServer
from shared.adapters.local_kafka import default_cache_dir
from shared.adapters.openai_engine import OpenAIEngine
from shared.adapters.openai_params import OpenAIParams
from shared.adapters.small_model import MODEL_NAME, fetch_gguf
from shared.contracts.messages import BoundCall
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.errors import ConfigError
from tests.support.servers import MissingServerError, do_without
from tests.support.worker_bench import bound_call

NUM_SLOTS = 4
SLOT_TOKENS = 512
SPEC = InstanceSpec(
    instance_id="cpu-0",
    gpu="CPU",
    model=MODEL_NAME,
    max_num_seqs=NUM_SLOTS,
    max_context_tokens=SLOT_TOKENS,
    kv_tokens=NUM_SLOTS * SLOT_TOKENS,
    max_batched_tokens=512,
    latency=LatencyModel(prefill_s_per_token=0.015, weights_s=0.03),
)


def small_model() -> Path:
    """Return the small model's file; without it the test is not run, or fails where it must."""
    try:
        return fetch_gguf(default_cache_dir(os.environ))
    except ConfigError as exc:
        do_without(MissingServerError(f"the small model cannot be fetched: {exc}"))


@contextmanager
def llamacpp_server(log_path: Path, **params: Any) -> Iterator[LlamaCppServer]:
    """Run llama.cpp's server on the small model for as long as the block lasts."""
    given = {"num_slots": NUM_SLOTS, "slot_tokens": SLOT_TOKENS} | params
    chosen = LlamaCppParams(model_path=str(small_model()), model_name=MODEL_NAME, **given)
    try:
        server = LlamaCppServer(chosen, log_path)
        server.start()
    except ConfigError as exc:
        do_without(MissingServerError(str(exc)))
    try:
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def llamacpp_engine(url: str, **params: Any) -> AsyncIterator[OpenAIEngine]:
    """Open the engine of a server."""
    chosen = OpenAIParams(url=url, **({"load_s": 0.1} | params))
    async with OpenAIEngine.open(SPEC, chosen, SystemClock()) as engine:
        yield engine


def real_call(request_id: str, *, input_tokens: int = 20, **fields: Any) -> BoundCall:
    """Return a call whose prompt has so many words, and whose answer so many tokens."""
    given: dict[str, Any] = {
        "prompt": f"{request_id}:{' word' * input_tokens}",
        "max_tokens": fields.get("output_tokens", 5),
        "model": MODEL_NAME,
        "simulated": None,
        "sampling": {"temperature": 0.0},
        "extra": {"ignore_eos": True},
    }
    return bound_call(request_id, input_tokens=input_tokens, **(given | fields))
