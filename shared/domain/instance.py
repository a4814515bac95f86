"""Instances: what is known of an engine replica before it runs, and how fast it is.

An *instance* is one engine replica serving one model. `LatencyModel` is its speed in numbers;
`InstanceSpec` is its static description, as a fleet file or a worker's settings declare it.

Source of the linear form: one vLLM iteration reads the weights once (memory bound), reads the KV
cache of every running sequence, and does arithmetic for every token it processes; attention over a
prompt grows with the square of its length. See Vidur (arXiv 2405.05465) and Sarathi-Serve (arXiv
2403.02310) for the same decomposition.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

Coefficient = Annotated[float, Meta(ge=0, le=1e6)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Linear iteration-time model of one instance. All coefficients >= 0, in seconds.

    One iteration that processes `p` prompt tokens in `c` chunks (one chunk per prompt) and `b`
    decoding sequences, which hold `k` KV tokens when it ends, takes
    `overhead_s + max(weights_s, (p + c * chunk_waste_tokens) * prefill_s_per_token)
    + a * attention_s_per_pair + b * seq_s + k * kv_s_per_token`, where `a` counts the pairs of a
    prompt token and one before it: `n * (m + n / 2)` for a chunk of `n` tokens after `m` others.
    Where it computes no prompt it takes more by its size: nothing for one sequence, `pair_s` for
    two, `trio_s` for three, `batched_s` for four and more. Where it computes prompts it takes
    `batched_s + (b + c - 1) * joined_s` more: `joined_s` for each sequence beyond the first.

    Prompts in prefill count neither in `b` nor in `k`. The iteration that computes a prompt's last
    token also brings its first output token; `shared.scheduling.latency` sums this up for a call
    that runs alone.

    Attributes:
        overhead_s: Fixed cost of an iteration outside the model, seconds.
        weights_s: Time to stream the weights once: the floor of any iteration, seconds.
        prefill_s_per_token: Compute time of one prompt token, seconds.
        seq_s: Extra time for each decoding sequence in the batch, seconds.
        kv_s_per_token: Extra time for each KV token read, seconds.
        chunk_waste_tokens: Prompt tokens' worth of time lost at each prefill chunk, tokens.
        attention_s_per_pair: Extra time for each pair of a prompt token and a token before it,
            cached ones too, seconds.
        pair_s: Extra time of an iteration that computes the next tokens of two sequences and
            nothing else, seconds: multiplying by one vector has a quicker way on CPUs, and a few
            vectors have others.
        trio_s: Extra time of an iteration that computes the next tokens of three sequences and
            nothing else, seconds.
        batched_s: Extra time of every other iteration that computes more than the next token of
            one sequence, seconds.
        joined_s: Extra time of an iteration that computes prompts for each sequence beyond its
            first, decoding ones included, seconds: sequences of unequal lengths are computed one
            after another, or padded.
    """

    prefill_s_per_token: Coefficient
    weights_s: Coefficient
    overhead_s: Coefficient = 0.0
    seq_s: Coefficient = 0.0
    kv_s_per_token: Coefficient = 0.0
    chunk_waste_tokens: Annotated[int, Meta(ge=0, le=2**40)] = 0
    attention_s_per_pair: Coefficient = 0.0
    pair_s: Coefficient = 0.0
    trio_s: Coefficient = 0.0
    batched_s: Coefficient = 0.0
    joined_s: Coefficient = 0.0


TIMES = tuple(name for name in LatencyModel.__struct_fields__ if name != "chunk_waste_tokens")
"""The coefficients that are times: what a slower instance has more of."""


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a fleet, as declared.

    Attributes:
        instance_id: Unique name; letters, digits, `.`, `_`, `-`; at most 64 characters.
        gpu: Hardware label for people and reports (A100, L40S, ...).
        model: Name of the model it serves; calls name it too. The pool of equal models is the
            set that α and β are computed over.
        adapters: LoRA adapters it offers besides the base model.
        features: Optional abilities (`tools`, `structured_output`).
        max_context_tokens: Longest prompt plus output it accepts, tokens.
        max_num_seqs: Most sequences the engine batches, calls.
        max_batched_tokens: Token budget of one iteration (vLLM's `max_num_batched_tokens`), tokens.
        kv_tokens: KV-cache capacity, tokens.
        block_tokens: KV block size, tokens.
        prefix_caching: Whether the engine reuses cached prefixes.
        latency: Its speed.
    """

    instance_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    gpu: str
    model: str = "default"
    adapters: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    max_context_tokens: Positive = 32_768
    max_num_seqs: Positive = 64
    max_batched_tokens: Positive = 2_048
    kv_tokens: Positive = 95_000
    block_tokens: Positive = 16
    prefix_caching: bool = True
    latency: LatencyModel
