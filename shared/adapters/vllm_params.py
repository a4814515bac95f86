"""How to run vLLM inside a worker; no vllm import."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shared.errors import ConfigError

OWN = frozenset({"model", "scheduling_policy"})
QUIET: Mapping[str, str] = MappingProxyType(
    {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
)
"""Environment variables that keep remarks of vLLM and its libraries off a command's screen."""


@dataclass(frozen=True, kw_only=True)
class VllmParams:
    """One engine. What is None is vLLM's own choice.

    Raises:
        ConfigError: `extra` sets what the adapter has to set itself.
    """

    model: str
    """Folder (or name) of the model."""
    dtype: str = "auto"
    """Number format of the weights in use."""
    max_model_len: int | None = None
    """Longest prompt plus output, tokens."""
    max_num_seqs: int | None = None
    """Most calls in a batch."""
    max_num_batched_tokens: int | None = None
    """Token budget of an iteration."""
    block_size: int | None = None
    """KV block size, tokens."""
    enforce_eager: bool = False
    """Whether to start at once, without compiling graphs."""
    cpu_kv_cache_gib: int | None = None
    """On CPUs: room of the KV cache, GiB; by itself it claims most of the memory."""
    cpu_cores: str | None = None
    """On CPUs: cores its threads are bound to, such as `1` or `0-3`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`."""

    def __post_init__(self) -> None:
        wrong = sorted(OWN & set(self.extra))
        if wrong:
            raise ConfigError(f"vLLM's {', '.join(wrong)} cannot be set: hexflow does")

    def engine_args(self) -> dict[str, Any]:
        """Return the arguments of `AsyncEngineArgs`."""
        chosen = {
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
        }
        return {
            "model": self.model,
            "dtype": self.dtype,
            "enforce_eager": self.enforce_eager,
            "enable_prefix_caching": True,
            "scheduling_policy": "priority",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **{name: value for name, value in chosen.items() if value is not None},
            **self.extra,
        }

    def defaults(self) -> dict[str, str]:
        """Return environment variables for where the user has set no others."""
        return {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is a command's data
        }

    def variables(self) -> dict[str, str]:
        """Return the environment variables that vLLM reads when it is imported."""
        found: dict[str, str] = {}
        if self.cpu_kv_cache_gib is not None:
            found["VLLM_CPU_KVCACHE_SPACE"] = str(self.cpu_kv_cache_gib)
        if self.cpu_cores is not None:
            found["VLLM_CPU_OMP_THREADS_BIND"] = self.cpu_cores
        return found
