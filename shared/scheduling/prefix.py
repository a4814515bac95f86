"""Which prompt prefixes an instance probably holds in its cache.

A model, not a measurement: prefixes sent to an instance stay until newer ones need their room.
"""

from collections import OrderedDict
from collections.abc import Sequence

from shared.domain.trace import PrefixPart


class PrefixCacheModel:
    """Least-recently-used model of one instance's prefix cache.

    Args:
        capacity_tokens: Tokens of KV cache that prefixes may occupy, >= 0; 0 switches it off.
        block_tokens: Cache block size: only whole blocks hit, tokens.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int = 16) -> None:
        self._capacity_tokens = capacity_tokens
        self._block_tokens = max(1, block_tokens)
        self._held: OrderedDict[str, int] = OrderedDict()
        self._used_tokens = 0

    def expected_cached_tokens(self, chain: Sequence[PrefixPart], input_tokens: int) -> int:
        """Return how many prompt tokens are expected in the cache.

        Parts count from the start of the prompt up to the first one that is not held; at least
        one token is always computed.
        """
        held = 0
        for part in chain:
            if part.prefix_id not in self._held:
                break
            held += part.tokens
        held = min(held, input_tokens - 1)
        return max(0, held - held % self._block_tokens)

    def touch(self, chain: Sequence[PrefixPart]) -> None:
        """Record that a call with this chain was sent to the instance.

        The head of a chain counts as used after its tail, so that room is made from the tail: a
        tail without its head can never hit. vLLM frees a sequence's blocks in that order too.
        """
        for part in reversed(chain):
            if part.prefix_id in self._held:
                self._held.move_to_end(part.prefix_id)
            elif part.tokens <= self._capacity_tokens:
                self._held[part.prefix_id] = part.tokens
                self._used_tokens += part.tokens
        while self._used_tokens > self._capacity_tokens:
            _, tokens = self._held.popitem(last=False)
            self._used_tokens -= tokens

    def clear(self) -> None:
        """Forget everything: the instance began a new life."""
        self._held.clear()
        self._used_tokens = 0
