"""Expected service time of one call on one instance.

The linear iteration model is described in `shared.domain.instance.LatencyModel`. Source of the
cost's role: HexGen-Flow (arXiv 2505.05286), the computation cost t_comp of a call on an instance.
"""

import math

from shared.domain.instance import InstanceSpec, LatencyModel


def prefill_s(
    tokens: float,
    chunk_tokens: float,
    weights_s: float,
    overhead_s: float,
    prefill_s_per_token: float,
    chunk_waste_tokens: float,
    cached_tokens: float,
    attention_s_per_pair: float,
) -> float:
    """Return the time to process a prompt alone on the instance (leaf).

    The prompt is cut into chunks of the iteration's token budget; each chunk is one iteration
    that takes at least the time to stream the weights. Every token also attends to those before
    it, however the prompt is cut.

    Args:
        tokens: Prompt tokens not found in the prefix cache, >= 0.
        chunk_tokens: Token budget of an iteration, >= 1.
        weights_s: Time to stream the weights once, seconds.
        overhead_s: Fixed time of an iteration, seconds.
        prefill_s_per_token: Compute time of a token, seconds.
        chunk_waste_tokens: Extra tokens' worth of time per chunk, tokens.
        cached_tokens: Prompt tokens found in the prefix cache, >= 0.
        attention_s_per_pair: Extra time per pair of a token and one before it, seconds.

    Returns:
        Seconds, >= 0; an entirely cached prompt still takes one iteration.
    """
    tokens = max(tokens, 1.0)
    full = math.floor(tokens / chunk_tokens)
    rest = tokens - full * chunk_tokens
    whole = overhead_s + max(weights_s, (chunk_tokens + chunk_waste_tokens) * prefill_s_per_token)
    total = full * whole + tokens * (cached_tokens + tokens / 2.0) * attention_s_per_pair
    if rest > 0.0:
        total += overhead_s + max(weights_s, (rest + chunk_waste_tokens) * prefill_s_per_token)
    return total


def decode_s(
    output_tokens: float,
    context_tokens: float,
    batch: float,
    weights_s: float,
    overhead_s: float,
    seq_s: float,
    kv_s_per_token: float,
) -> float:
    """Return the time to generate the tokens after the first in a steady batch (leaf).

    The first output token comes out of the last prefill iteration, so `output_tokens - 1`
    iterations follow. The KV term uses the mean context of a sequence over the generation and
    assumes that its `batch - 1` neighbours are of the same size.

    Args:
        output_tokens: Expected output length, tokens, >= 0.
        context_tokens: Prompt length, tokens.
        batch: Sequences decoding together, this one included, >= 1.
        weights_s: Time to stream the weights once, seconds.
        overhead_s: Fixed time of an iteration, seconds.
        seq_s: Extra time per sequence, seconds.
        kv_s_per_token: Extra time per KV token, seconds.

    Returns:
        Seconds, >= 0.
    """
    steps = output_tokens - 1.0
    if steps <= 0.0:
        return 0.0
    mean_context = context_tokens + output_tokens / 2.0
    step_s = overhead_s + weights_s + batch * (seq_s + mean_context * kv_s_per_token)
    return steps * step_s


def batch_extra_s(batch: float, pair_s: float, trio_s: float, batched_s: float) -> float:
    """Return the extra time of a decode step of so many sequences, seconds (leaf).

    None alone; a mean batch size between two whole ones lies between.

    Args:
        batch: Sequences decoding together, >= 1.
        pair_s: Extra time of a step of two, seconds.
        trio_s: Extra time of a step of three, seconds.
        batched_s: Extra time of a step of four and more, seconds.
    """
    to_pair = min(1.0, max(0.0, batch - 1.0))
    to_trio = min(1.0, max(0.0, batch - 2.0))
    to_four = min(1.0, max(0.0, batch - 3.0))
    return to_pair * pair_s + to_trio * (trio_s - pair_s) + to_four * (batched_s - trio_s)


def step_extra_s(model: LatencyModel, batch: float) -> float:
    """Return the extra time of a decode step on an instance: see `batch_extra_s`, seconds."""
    return batch_extra_s(batch, model.pair_s, model.trio_s, model.batched_s)


def service_s(
    spec: InstanceSpec,
    *,
    input_tokens: float,
    cached_tokens: float,
    output_tokens: float,
    batch: float = 1.0,
    speed_factor: float = 1.0,
) -> float:
    """Return t_comp: the expected service time of a call on an instance.

    Args:
        spec: The instance.
        input_tokens: Prompt length, tokens.
        cached_tokens: Prompt tokens expected in its prefix cache, tokens.
        output_tokens: Predicted output length, tokens.
        batch: Sequences expected to decode together, >= 1.
        speed_factor: Learned correction, observed time divided by modelled time, > 0.

    Returns:
        Seconds, > 0.
    """
    model = spec.latency
    prefill = prefill_s(
        input_tokens - cached_tokens,
        spec.max_batched_tokens,
        model.weights_s,
        model.overhead_s + model.batched_s,
        model.prefill_s_per_token,
        model.chunk_waste_tokens,
        cached_tokens,
        model.attention_s_per_pair,
    )
    decode = decode_s(
        output_tokens,
        input_tokens,
        batch,
        model.weights_s,
        model.overhead_s + step_extra_s(model, batch),
        model.seq_s,
        model.kv_s_per_token,
    )
    return speed_factor * (prefill + decode)
