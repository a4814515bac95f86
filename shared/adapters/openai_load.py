"""What a server's own metrics say about load that did not come through the mesh. Pure.

Names differ between servers and their releases; see `RUNNING`, `WAITING` and `KV_USED`. Where a
metric comes once per model or engine, the values add up.
"""

import math
import re
from typing import NamedTuple

RUNNING = (
    "vllm:num_requests_running",
    "llamacpp:requests_processing",
    "sglang:num_running_reqs",
    "tgi_batch_current_size",
)
WAITING = (
    "vllm:num_requests_waiting",
    "llamacpp:requests_deferred",
    "sglang:num_queue_reqs",
    "tgi_queue_size",
)
KV_USED = (
    "vllm:kv_cache_usage_perc",  # from 0.10 on
    "vllm:gpu_cache_usage_perc",  # before
    "llamacpp:kv_cache_usage_ratio",  # dropped in 2025
    "sglang:token_usage",
)
MAX_BLOCK_TOKENS = 65_536
MAX_KV_TOKENS = 1_000_000_000
"""Above what any server has: the largest caches hold some ten million tokens for each GPU."""
_CACHE_CONFIG = "vllm:cache_config_info"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ServerLoad(NamedTuple):
    """A look at a server's metrics.

    Attributes:
        num_running: Calls in its batch, everybody's.
        num_waiting: Calls in its own queue, everybody's.
        kv_used_share: Share of its KV cache in use, or None where it does not say.
        kv_tokens: Room of its KV cache, tokens; 0 where it does not say, or what cannot be true.
        block_tokens: Its KV block size, tokens; likewise.
    """

    num_running: int
    num_waiting: int
    kv_used_share: float | None = None
    kv_tokens: int = 0
    block_tokens: int = 0


def parse_load(text: str) -> ServerLoad | None:
    """Return what a server's Prometheus metrics say; None where they have none of the names."""
    sums: dict[str, list[float]] = {}
    kv_tokens = block_tokens = 0
    for name, labels, value in _SAMPLE.findall(text):
        if name == _CACHE_CONFIG:
            found = dict(_LABEL.findall(labels))
            own_block, own_kv = _cache_sizes(found)
            block_tokens = own_block or block_tokens
            kv_tokens = min(MAX_KV_TOKENS, kv_tokens + own_kv)
        number = _float(value)
        if number is not None:
            sums.setdefault(name, []).append(number)
    running, waiting = _total(sums, RUNNING), _total(sums, WAITING)
    if running is None and waiting is None:
        return None
    shares = next((sums[name] for name in KV_USED if name in sums), None)
    return ServerLoad(
        num_running=round(running or 0.0),
        num_waiting=round(waiting or 0.0),
        kv_used_share=sum(shares) / len(shares) if shares else None,
        kv_tokens=kv_tokens,
        block_tokens=block_tokens,
    )


def _cache_sizes(labels: dict[str, str]) -> tuple[int, int]:
    """Return an engine's block size and cache size, tokens; zeros where they cannot be true."""
    block_tokens = _int(labels.get("block_size"))
    kv_tokens = block_tokens * _int(labels.get("num_gpu_blocks"))
    if block_tokens > MAX_BLOCK_TOKENS or not 0 < kv_tokens <= MAX_KV_TOKENS:
        return 0, 0
    return block_tokens, kv_tokens


def _total(sums: dict[str, list[float]], names: tuple[str, ...]) -> float | None:
    return next((sum(sums[name]) for name in names if name in sums), None)


def _float(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0 <= number < 1e15 else None


def _int(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 12 else 0


class ForeignLoad:
    """Calls on a server that others sent: those it counts, less those that we gave it.

    A look at the metrics is older than what we know of ourselves, so the difference of one look
    can be off by the calls that came and went meanwhile. The smaller of the last two counts.
    """

    def __init__(self) -> None:
        self._last = 0
        self.num_calls = 0
        self.num_running = 0

    def see(self, load: ServerLoad, own_before: int, own_after: int) -> None:
        """Take a look into account.

        Args:
            load: What the server says.
            own_before: Our own calls there when it was asked.
            own_after: Our own calls there when it had answered.
        """
        own = max(own_before, own_after)
        foreign = max(0, load.num_running + load.num_waiting - own)
        self.num_calls = min(foreign, self._last)
        self.num_running = min(self.num_calls, max(0, load.num_running - own))
        self._last = foreign

    def forget(self) -> None:
        """Know nothing, because the server does not answer."""
        self._last = self.num_calls = self.num_running = 0
