"""How many calls an engine should be given at a time: the knee of throughput against latency.

A batch shares one pass over the weights, so throughput grows with it, ever more slowly once the
time per call outweighs what is shared; every call in the batch waits for all of them. Beyond the
knee a further call costs all others time and brings next to no throughput: it waits better where
it can be reordered, moved and cancelled.
"""

from shared.domain.instance import InstanceSpec
from shared.scheduling.latency import step_extra_s

ENOUGH_SHARE = 0.97
TYPICAL_TOKENS = 512


def knee_calls(
    spec: InstanceSpec, *, context_tokens: int = TYPICAL_TOKENS, share: float = ENOUGH_SHARE
) -> int:
    """Return the smallest batch with nearly the throughput of the largest.

    Args:
        spec: The instance, with a measured latency model.
        context_tokens: Context of a typical call, tokens.
        share: What counts as nearly, in (0, 1].

    Returns:
        Calls, from 1 to what batch size and KV cache allow.

    Example:
        40 ms shared and 10 ms per call: 1 call makes 20 tokens/s, 64 make 94; 97% of that needs
        42 calls.
    """
    context = min(context_tokens, spec.max_context_tokens)
    most = max(1, min(spec.max_num_seqs, spec.kv_tokens // max(1, context)))
    enough = share * decode_rate(spec, most, context)
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if decode_rate(spec, middle, context) >= enough:
            high = middle
        else:
            low = middle + 1
    return low


def decode_rate(spec: InstanceSpec, batch: int, context_tokens: int) -> float:
    """Return the tokens per second that a steady batch generates.

    Args:
        spec: The instance.
        batch: Calls in it, >= 1.
        context_tokens: Context of each, tokens.
    """
    model = spec.latency
    shared_s = model.overhead_s + model.weights_s + step_extra_s(model, batch)
    return batch / (shared_s + batch * (model.seq_s + context_tokens * model.kv_s_per_token))
