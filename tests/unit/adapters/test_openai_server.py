"""What servers tell of themselves is taken over only where it can be true."""

from typing import Any

import pytest

from shared.adapters.openai_load import MAX_KV_TOKENS, parse_load
from shared.adapters.openai_server import ServerFacts, ask, resolve
from tests.support.worker_bench import SPEC

METRICS = """\
vllm:num_requests_running 1.0
vllm:cache_config_info{{block_size="{block}",num_gpu_blocks="{blocks}"}} 1.0
"""


@pytest.mark.parametrize(
    ("block", "blocks"),
    [("99999999999", "1"), ("16", "99999999999"), ("0", "5"), ("16", "0"), ("None", "500")],
)
def test_a_cache_that_no_server_has_is_ignored(block: str, blocks: str) -> None:
    """A size beyond any memory is a mistake; the declared one stays."""
    load = parse_load(METRICS.format(block=block, blocks=blocks))
    assert load is not None
    assert (load.kv_tokens, load.block_tokens, load.num_running) == (0, 0, 1)


def test_a_large_cache_is_taken_over() -> None:
    """Ten million tokens are much, but not absurd."""
    load = parse_load(METRICS.format(block=16, blocks=625_000))
    assert load is not None
    assert (load.kv_tokens, load.block_tokens) == (10_000_000, 16)


def test_many_engines_together_stay_within_bounds() -> None:
    """Sizes of several engines add up, to no more than any server has."""
    load = parse_load(METRICS.format(block=16, blocks=60_000_000) * 5)
    assert load is not None
    assert load.kv_tokens == MAX_KV_TOKENS


def test_slots_times_context_stays_within_bounds() -> None:
    """Two numbers that may be true one by one give no cache beyond any."""
    facts = ServerFacts(models=("m",), max_context_tokens=10_000_000, num_slots=60_000)
    spec = resolve(SPEC, facts)
    assert spec.kv_tokens == MAX_KV_TOKENS
    assert spec.max_num_seqs == SPEC.max_num_seqs


class LlamaCpp:
    """Tells so many slots, and no metrics."""

    def __init__(self, slots: object) -> None:
        self._given: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]},
            "/props": {"total_slots": slots},
        }

    async def get_json(self, path: str) -> Any:
        """Return what a path gives."""
        return self._given[path]

    async def load(self) -> None:
        """Return no metrics."""


@pytest.mark.parametrize(
    ("slots", "taken"), [(4, 4), (999_999_999_999, 0), (10**30, 0), (-1, 0), (True, 0), ("4", 0)]
)
async def test_slots_that_no_server_has_are_ignored(slots: object, taken: int) -> None:
    """A number that cannot be true counts as none."""
    client: Any = LlamaCpp(slots)
    assert (await ask(client)).num_slots == taken
