"""Real vLLM on the small model, on the last core."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.adapters.local_kafka import default_cache_dir
from shared.adapters.small_model import MODEL_NAME
from shared.adapters.vllm_engine import VllmEngine
from shared.adapters.vllm_environment import converted_dir
from shared.adapters.vllm_params import VllmParams
from shared.domain.instance import InstanceSpec, LatencyModel

NUM_SEQS = 4
CONTEXT_TOKENS = 512
BLOCK_TOKENS = 32
SPEC = InstanceSpec(
    instance_id="vllm-0",
    gpu="CPU",
    model=MODEL_NAME,
    max_num_seqs=NUM_SEQS,
    max_context_tokens=CONTEXT_TOKENS,
    max_batched_tokens=256,
    kv_tokens=NUM_SEQS * CONTEXT_TOKENS,
    features=("structured_output",),
    latency=LatencyModel(prefill_s_per_token=0.003, weights_s=0.05),
)


def small_params(**changes: Any) -> VllmParams:
    """Return parameters of a quick start."""
    given: dict[str, Any] = {
        "model": str(converted_dir(default_cache_dir(os.environ))),
        "max_model_len": CONTEXT_TOKENS,
        "max_num_seqs": NUM_SEQS,
        "max_num_batched_tokens": 256,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "cpu_kv_cache_gib": 1,
        "cpu_cores": str(max(os.sched_getaffinity(0))),
        # Without statistics vLLM does not count tokens, and the tests go by its own count.
        "extra": {"disable_log_stats": False},
    }
    return VllmParams(**(given | changes))


@asynccontextmanager
async def vllm_engine(spec: InstanceSpec = SPEC, **changes: Any) -> AsyncIterator[VllmEngine]:
    """Run vLLM for as long as the block lasts."""
    async with VllmEngine.open(spec, small_params(**changes)) as engine:
        yield engine


def generated_tokens() -> int:
    """Return how many tokens vLLM has generated in this process, by its own counter."""
    from prometheus_client import REGISTRY  # noqa: PLC0415

    return round(
        sum(
            sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == "vllm:generation_tokens_total"
        )
    )
