"""The state that the batching model works on, as small mutable records.

The functions in `kv_blocks` and `iteration` only read and write attributes of these records, so
the same source runs in two ways: interpreted, on lists of the slotted classes below (the live
simulated engine), and compiled, on NumPy record arrays whose fields are the same (`dtype_of`).

Links between records are indices; -1 means none.
"""

from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

import numpy as np

Int = Annotated[int, "i8"]
Real = Annotated[float, "f8"]

NOWHERE = 0
WAITING = 1
PREFILL = 2
DECODE = 3
ENDED = 4


class CallState:
    """One call, from the moment it is known.

    Attributes:
        input_tokens: Prompt length, tokens.
        output_tokens: Tokens it will generate.
        priority: Place among the waiting, smallest first; the largest is preempted first.
        order: Order of arrival at the engine; breaks ties of `priority`.
        place: NOWHERE, WAITING, PREFILL, DECODE or ENDED.
        chain: Deepest node of its prefix chain, or -1.
        target_tokens: Tokens that its (re)computation has to cover.
        computed_tokens: Tokens covered so far.
        chunk_tokens: Tokens it computes in the iteration in flight.
        generated_tokens: Tokens generated when it last left the decoding batch.
        cached_tokens: Prompt tokens found in the cache at its first admission.
        admitted: Number of its last admission; later admissions have larger ones.
        finish_step: The instance's decode step at which it ends (while decoding).
        passes: How often others were admitted before it because it did not fit.
        prev: Neighbour in its list (waiting, prefilling or decoding).
        next: Neighbour in its list.
        started_s: First admission to a batch, seconds.
        first_token_s: First token, seconds.
        end_s: End, seconds.
    """

    __slots__ = (
        "admitted",
        "cached_tokens",
        "chain",
        "chunk_tokens",
        "computed_tokens",
        "end_s",
        "finish_step",
        "first_token_s",
        "generated_tokens",
        "input_tokens",
        "next",
        "order",
        "output_tokens",
        "passes",
        "place",
        "prev",
        "priority",
        "started_s",
        "target_tokens",
    )

    priority: Real
    started_s: Real
    first_token_s: Real
    end_s: Real
    finish_step: Int
    order: Int
    admitted: Int
    input_tokens: Int
    output_tokens: Int
    place: Int
    chain: Int
    target_tokens: Int
    computed_tokens: Int
    chunk_tokens: Int
    generated_tokens: Int
    cached_tokens: Int
    passes: Int
    prev: Int
    next: Int


class NodeState:
    """One prefix part in one instance's cache, as a node of the tree of prefix chains.

    Attributes:
        parent: The part before it, or -1.
        own_blocks: Whole KV blocks that end inside this part.
        end_blocks: Whole blocks from the prompt's start to this part's end.
        resident_blocks: Of its own blocks, how many are in memory (counted from its start).
        refs: Admitted calls that use it; only unused nodes can be evicted.
        bound: Calls bound to the instance and not ended that will use it.
        prev: Neighbour in the list of unused nodes, least recently used first.
        next: Neighbour in that list.
    """

    __slots__ = (
        "bound",
        "end_blocks",
        "next",
        "own_blocks",
        "parent",
        "prev",
        "refs",
        "resident_blocks",
    )

    parent: Int
    own_blocks: Int
    end_blocks: Int
    resident_blocks: Int
    refs: Int
    bound: Int
    prev: Int
    next: Int


class EngineState:
    """One instance: its constants, its KV blocks, its batch and the segment in flight.

    A *segment* is a run of identical iterations: iteration i of it (1, 2, ...) ends
    `i * linear_s + quadratic_s * i * (i + 1) / 2` after the segment's start.

    Attributes:
        overhead_s: See `LatencyModel`; likewise the next five.
        max_num_seqs: Most calls in the batch.
        max_batched_tokens: Token budget of one iteration.
        block_tokens: KV block size, tokens.
        total_blocks: KV blocks.
        free_blocks: Blocks that hold nothing.
        evictable_blocks: Blocks that hold unused prefix parts.
        lru_head: Least recently used node without users.
        lru_tail: Most recently used one.
        residue_base: Where its residue histogram starts (see `kv_blocks`).
        decode_head: Decoding calls, soonest end first.
        decode_tail: Last of them.
        num_decode: How many.
        kv_tokens: KV tokens of the decoding calls.
        step: Decode steps done so far.
        prefill_head: Calls in prefill, in order of admission.
        prefill_tail: Last of them.
        num_prefill: How many.
        wait_head: Calls inside the engine but not in the batch, in order.
        wait_tail: Last of them.
        num_waiting: How many.
        waiting_tokens: Tokens they have to compute.
        waiting_blocks: Blocks they need at most.
        num_admissions: Admissions so far.
        num_preemptions: Preemptions so far.
        clock_s: Last iteration boundary: where the next segment starts.
        start_s: Start of the segment in flight.
        linear_s: See above.
        quadratic_s: See above.
        iterations: Iterations of the segment in flight; 0 when there is none.
        end_s: End of the segment in flight; infinite when there is none.
        busy_s: Time spent in iterations.
        num_events: Entries of the event buffer written by the last completion.
    """

    __slots__ = (
        "attention_s_per_pair",
        "batched_s",
        "block_tokens",
        "busy_s",
        "chunk_waste_tokens",
        "clock_s",
        "decode_head",
        "decode_tail",
        "end_s",
        "evictable_blocks",
        "free_blocks",
        "iterations",
        "joined_s",
        "kv_s_per_token",
        "kv_tokens",
        "linear_s",
        "lru_head",
        "lru_tail",
        "max_batched_tokens",
        "max_num_seqs",
        "num_admissions",
        "num_decode",
        "num_events",
        "num_preemptions",
        "num_prefill",
        "num_waiting",
        "overhead_s",
        "pair_s",
        "prefill_head",
        "prefill_s_per_token",
        "prefill_tail",
        "quadratic_s",
        "residue_base",
        "seq_s",
        "start_s",
        "step",
        "total_blocks",
        "trio_s",
        "wait_head",
        "wait_tail",
        "waiting_blocks",
        "waiting_tokens",
        "weights_s",
    )

    overhead_s: Real
    weights_s: Real
    prefill_s_per_token: Real
    seq_s: Real
    kv_s_per_token: Real
    attention_s_per_pair: Real
    pair_s: Real
    trio_s: Real
    batched_s: Real
    joined_s: Real
    chunk_waste_tokens: Real
    clock_s: Real
    start_s: Real
    linear_s: Real
    quadratic_s: Real
    end_s: Real
    busy_s: Real
    max_num_seqs: Int
    max_batched_tokens: Int
    block_tokens: Int
    total_blocks: Int
    free_blocks: Int
    evictable_blocks: Int
    lru_head: Int
    lru_tail: Int
    residue_base: Int
    decode_head: Int
    decode_tail: Int
    num_decode: Int
    kv_tokens: Int
    step: Int
    prefill_head: Int
    prefill_tail: Int
    num_prefill: Int
    wait_head: Int
    wait_tail: Int
    num_waiting: Int
    waiting_tokens: Int
    waiting_blocks: Int
    num_admissions: Int
    num_preemptions: Int
    iterations: Int
    num_events: Int


@cache
def dtype_of(record: type) -> np.dtype[Any]:
    """Return the NumPy record type with the same fields as a state class."""
    hints = get_type_hints(record, include_extras=True)
    return np.dtype([(name, get_args(hint)[1]) for name, hint in hints.items()], align=True)
