"""`prefix-queue`: weighted scorers of queue, KV memory and prefix, as llm-d's router runs them.

Source: llm-d/llm-d-router, the default profile of its chart (config/charts/routerlib/templates/
_config.yaml): `queue-scorer` weight 2, `kv-cache-utilization-scorer` weight 2,
`prefix-cache-scorer` weight 3; the highest sum is picked. Each scorer is in [0, 1]:

- queue: (longest - own) / (longest - shortest) over the candidates' waiting calls; 1 for all when
  they are equal (kubernetes-sigs/gateway-api-inference-extension, scorer/queue.go);
- KV memory: 1 - share in use (scorer/kvcache_utilization.go);
- prefix: whole prompt blocks expected in the instance's cache / whole prompt blocks
  (llm-d-router, scorer/prefix/plugin.go, with its default of no weight on absolute length).

Differences: llm-d sees its engines' own queues and memory as last scraped and breaks ties in turn;
here the mesh's view is used and ties are broken per call, without herding. Its cap on prefixes
(131,072 tokens) is above every prompt of the workloads at hand and left out.
"""

from collections.abc import Mapping, Sequence

from shared.scheduling.dispatch import highest
from shared.scheduling.policies.first_come import FirstCome, choice_of
from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall


def queue_share(num_waiting: int, shortest: int, longest: int) -> float:
    """Return the queue score in [0, 1], highest is best (leaf).

    Args:
        num_waiting: Calls waiting at this candidate.
        shortest: Fewest waiting at any candidate.
        longest: Most waiting at any candidate.
    """
    if longest == shortest:
        return 1.0
    return (longest - num_waiting) / (longest - shortest)


def kv_share(used_tokens: int, total_tokens: int) -> float:
    """Return the share of KV memory that is free, in [0, 1] (leaf)."""
    if used_tokens >= total_tokens:
        return 0.0
    return 1.0 - used_tokens / total_tokens


def prefix_share(cached_tokens: int, input_tokens: int, block_tokens: int) -> float:
    """Return the share of a prompt's whole blocks that are cached, in [0, 1] (leaf).

    Args:
        cached_tokens: Prompt tokens expected in the cache.
        input_tokens: Prompt length, tokens.
        block_tokens: Cache block size, tokens, >= 1.
    """
    blocks = input_tokens // block_tokens
    if blocks <= 0:
        return 0.0
    return (cached_tokens // block_tokens) / blocks


def scorer_sum(queue: float, kv: float, prefix: float) -> float:
    """Return the weighted sum of the three scores with llm-d's default weights (leaf)."""
    return 2.0 * queue + 2.0 * kv + 3.0 * prefix


class PrefixQueue(FirstCome):
    """Sends a call where its prefix lies, unless that instance is much busier."""

    name = "prefix-queue"

    def choose(
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],
        now_s: float,  # noqa: ARG002
    ) -> Choice | None:
        """Return the instance with the highest weighted sum."""
        shortest = min(view.num_waiting for view in views)
        longest = max(view.num_waiting for view in views)

        def score(view: InstanceView) -> float:
            cached = costs[view.spec.instance_id].cached_tokens
            return scorer_sum(
                queue_share(view.num_waiting, shortest, longest),
                kv_share(view.kv_used_tokens, view.spec.kv_tokens),
                prefix_share(cached, call.input_tokens, view.spec.block_tokens),
            )

        return choice_of(*highest(call, views, score))
