"""Iterations of one instance: continuous batching with chunked prefill, as vLLM V1 does it.

An iteration is planned at its start and never changes while it is in flight:

1. Every decoding call computes one token. Where KV memory lacks for their growth, the call of the
   largest priority (the latest admitted among equals) gives up all its memory, waits inside the
   engine and later computes everything again, what it had generated included.
2. What is left of the token budget goes to prompts: first the one that is partly computed, then
   waiting calls in order (`priority`, then arrival), none in an iteration that preempted. A prompt
   enters when a place in the batch is free and its whole prompt fits in memory. A waiting call
   that does not fit lets later ones pass, `MAX_PASSES` times in all; then it blocks them.
3. The iteration takes `LatencyModel`'s time. The iteration that computes a prompt's last token
   also brings the first output token; each decode step brings one more.

A run of iterations in which nothing else happens is one *segment*, computed in closed form.

At equal instants an iteration's end comes first, then calls are added or aborted, then the next
iteration starts.
"""

import math

from shared.simulation.batch_lists import (
    join_decode,
    join_prefill,
    join_waiting,
    leave_decode,
    leave_prefill,
    leave_waiting,
)
from shared.simulation.kernel_state import DECODE, ENDED, WAITING, CallState, EngineState
from shared.simulation.kv_blocks import (
    blocks_of,
    growth_blocks,
    missing_blocks,
    release_blocks,
    take_blocks,
    take_prompt,
)
from shared.simulation.tables import Tables

MAX_PASSES = 16
FIRST_TOKEN = 0
FINISHED = 1


def enter_engine(tables: Tables, engine: EngineState, index: int, now_s: float) -> None:
    """Put a call among the waiting inside the engine; the segment in flight must be synced."""
    join_waiting(tables, engine, index)
    if engine.iterations > 0:
        cut_segment(engine)
    else:
        engine.clock_s = max(engine.clock_s, now_s)


def start_segment(
    tables: Tables,
    engine: EngineState,
) -> None:
    """Plan the iterations that start at the clock; leaves no segment when there is no work."""
    if engine.num_decode + engine.num_prefill + engine.num_waiting == 0:
        engine.end_s = math.inf
        return
    preempted = _grow_or_preempt(tables, engine)
    budget = engine.max_batched_tokens - engine.num_decode
    tokens = 0
    chunks = 0
    repeats = 1
    index = engine.prefill_head
    if index >= 0:
        call = tables.calls[index]
        rest = call.target_tokens - call.computed_tokens
        call.chunk_tokens = min(rest, budget)
        repeats = (rest - 1) // call.chunk_tokens
        tokens = call.chunk_tokens
        chunks = 1
    if not preempted and tokens < budget:
        admitted = _admit_waiting(tables, engine, budget - tokens)
        tokens += admitted
        chunks = engine.num_prefill
    _set_segment(tables, engine, tokens, chunks, repeats, preempted)


def _grow_or_preempt(
    tables: Tables,
    engine: EngineState,
) -> bool:
    """Take the blocks of the next decode step, preempting calls until they suffice."""
    preempted = False
    need = growth_blocks(tables, engine, 0, 1)
    while need > engine.free_blocks + engine.evictable_blocks:
        _preempt(tables, engine, _victim(tables, engine))
        preempted = True
        need = growth_blocks(tables, engine, 0, 1)
    take_blocks(tables, engine, need)
    return preempted


def _victim(tables: Tables, engine: EngineState) -> int:
    worst = engine.prefill_head
    for head in (engine.prefill_head, engine.decode_head):
        index = head
        while index >= 0:
            if worst < 0 or _is_worse(tables.calls[index], tables.calls[worst]):
                worst = index
            index = tables.calls[index].next
    return worst


def _is_worse(call: CallState, other: CallState) -> bool:
    if call.priority != other.priority:
        return call.priority > other.priority
    return call.admitted > other.admitted


def _preempt(
    tables: Tables,
    engine: EngineState,
    index: int,
) -> None:
    _give_up_memory(tables, engine, index, grown=False)
    engine.num_preemptions += 1
    join_waiting(tables, engine, index)


def _give_up_memory(
    tables: Tables,
    engine: EngineState,
    index: int,
    grown: bool,
) -> None:
    """Take a call out of the batch and free its blocks.

    `grown`: the blocks of the decode step in flight have been taken already.
    """
    call = tables.calls[index]
    if call.place == DECODE:
        leave_decode(tables, engine, index)
        computed = call.input_tokens + call.generated_tokens - 1
        held = blocks_of(computed + (1 if grown else 0), engine.block_tokens)
    else:
        leave_prefill(tables, engine, index)
        computed = call.computed_tokens
        held = blocks_of(call.target_tokens, engine.block_tokens)
    release_blocks(tables, engine, call.chain, held, computed)


def _admit_waiting(tables: Tables, engine: EngineState, budget: int) -> int:
    """Admit waiting calls while places, memory and budget last; returns their chunk tokens."""
    left = budget
    index = engine.wait_head
    while index >= 0 and left > 0:
        if engine.num_decode + engine.num_prefill >= engine.max_num_seqs:
            break
        call = tables.calls[index]
        following = call.next
        if missing_blocks(tables, engine, call.chain, call.target_tokens) <= 0:
            _admit(tables, engine, index)
            call.chunk_tokens = min(left, call.target_tokens - call.computed_tokens)
            left -= call.chunk_tokens
            _count_passes(tables, engine.wait_head, following)
        elif call.passes >= MAX_PASSES:
            break
        index = following
    return budget - left


def _count_passes(tables: Tables, first: int, end: int) -> None:
    """Note that every waiting call before `end` was passed once."""
    index = first
    while index != end:
        tables.calls[index].passes += 1
        index = tables.calls[index].next


def _admit(tables: Tables, engine: EngineState, index: int) -> None:
    call = tables.calls[index]
    leave_waiting(tables, engine, index)
    call.computed_tokens = take_prompt(tables, engine, call)
    call.admitted = engine.num_admissions
    engine.num_admissions += 1
    if math.isnan(call.started_s):
        call.started_s = engine.clock_s
        call.cached_tokens = call.computed_tokens
    join_prefill(tables, engine, index)


def _set_segment(
    tables: Tables,
    engine: EngineState,
    tokens: int,
    chunks: int,
    repeats: int,
    preempted: bool,
) -> None:
    """Fix length and duration of the segment that starts at the clock."""
    compute_s = (tokens + chunks * engine.chunk_waste_tokens) * engine.prefill_s_per_token
    engine.linear_s = (
        engine.overhead_s
        + max(engine.weights_s, compute_s)
        + engine.num_decode * engine.seq_s
        + engine.kv_tokens * engine.kv_s_per_token
    )
    engine.linear_s += _batch_extra_s(engine, chunks)
    engine.quadratic_s = engine.num_decode * engine.kv_s_per_token
    if engine.attention_s_per_pair > 0.0:
        _add_attention(tables, engine)
    engine.start_s = engine.clock_s
    engine.iterations = 1
    if not preempted:
        longest = _longest_run(tables, engine, chunks, repeats)
        if longest > 1:
            engine.iterations = _run_that_fits(tables, engine, longest)
    engine.end_s = engine.start_s + elapsed_s(engine, engine.iterations)


def _batch_extra_s(engine: EngineState, chunks: int) -> float:
    """Return what the iteration takes more because several sequences share it, seconds."""
    if chunks > 0:
        return engine.batched_s + (engine.num_decode + chunks - 1) * engine.joined_s
    if engine.num_decode == 2:
        return engine.pair_s
    if engine.num_decode == 3:
        return engine.trio_s
    return engine.batched_s if engine.num_decode > 3 else 0.0


def _add_attention(tables: Tables, engine: EngineState) -> None:
    """Add the time in which prompt tokens attend to those before them.

    The n-th equal chunk of p tokens after m others makes p (m - p / 2) + n p^2 pairs.
    """
    index = engine.prefill_head
    while index >= 0:
        call = tables.calls[index]
        chunk = float(call.chunk_tokens)
        before = float(call.computed_tokens)
        engine.linear_s += chunk * (before - chunk / 2.0) * engine.attention_s_per_pair
        engine.quadratic_s += chunk * chunk * engine.attention_s_per_pair
        index = call.next


def _longest_run(tables: Tables, engine: EngineState, chunks: int, repeats: int) -> int:
    """Return how many equal iterations could follow each other if memory sufficed."""
    if chunks > 1 or engine.prefill_head != engine.prefill_tail:
        return 1
    steps = (
        tables.calls[engine.decode_head].finish_step - engine.step if engine.num_decode else repeats
    )
    return steps if chunks == 0 else min(repeats, steps)


def _run_that_fits(tables: Tables, engine: EngineState, longest: int) -> int:
    """Return how many iterations, at most `longest`, fit without preemption (at least one)."""
    room = engine.free_blocks + engine.evictable_blocks
    if (longest // engine.block_tokens + 1) * engine.num_decode <= room:
        return longest
    low = 1
    high = longest + 1
    while high - low > 1:
        middle = (low + high) // 2
        if growth_blocks(tables, engine, 1, middle - 1) <= room:
            low = middle
        else:
            high = middle
    return low


def elapsed_s(engine: EngineState, iterations: int) -> float:
    """Return the duration of the first so many iterations of the segment, seconds."""
    return iterations * engine.linear_s + engine.quadratic_s * (iterations * (iterations + 1) // 2)


def cut_segment(engine: EngineState) -> None:
    """Let the segment end with the iteration in flight."""
    if engine.iterations > 1:
        engine.iterations = 1
        engine.end_s = engine.start_s + elapsed_s(engine, 1)


def complete_segment(
    tables: Tables,
    engine: EngineState,
) -> None:
    """Do everything that the segment in flight brings; there is none in flight afterwards.

    Writes `num_events` pairs (call index, FIRST_TOKEN or FINISHED) to `events`: ends of decoding
    calls in order of admission, then first tokens in order of admission.
    """
    advance_iterations(tables, engine, engine.iterations)
    engine.busy_s += engine.end_s - engine.start_s
    engine.clock_s = engine.end_s
    engine.iterations = 0
    engine.end_s = math.inf
    engine.num_events = 0
    index = engine.decode_head
    while index >= 0 and tables.calls[index].finish_step <= engine.step:
        following = tables.calls[index].next
        _give_up_memory(tables, engine, index, grown=False)
        _emit_finished(tables, engine, index)
        index = following
    index = engine.prefill_head
    while index >= 0 and tables.calls[index].computed_tokens >= tables.calls[index].target_tokens:
        following = tables.calls[index].next
        _finish_prefill(tables, engine, index)
        index = following


def advance_iterations(
    tables: Tables,
    engine: EngineState,
    count: int,
) -> None:
    """Account for the first `count` iterations of the segment in flight."""
    if count > 1:
        take_blocks(tables, engine, growth_blocks(tables, engine, 1, count - 1))
    engine.step += count
    engine.kv_tokens += count * engine.num_decode
    index = engine.prefill_head
    while index >= 0:
        call = tables.calls[index]
        call.computed_tokens += count * call.chunk_tokens
        index = call.next


def _emit_finished(tables: Tables, engine: EngineState, index: int) -> None:
    call = tables.calls[index]
    call.place = ENDED
    call.end_s = engine.clock_s
    tables.events[2 * engine.num_events] = index
    tables.events[2 * engine.num_events + 1] = FINISHED
    engine.num_events += 1


def _finish_prefill(
    tables: Tables,
    engine: EngineState,
    index: int,
) -> None:
    call = tables.calls[index]
    call.generated_tokens += 1
    if call.generated_tokens == 1:
        call.first_token_s = engine.clock_s
        tables.events[2 * engine.num_events] = index
        tables.events[2 * engine.num_events + 1] = FIRST_TOKEN
        engine.num_events += 1
    if call.generated_tokens < call.output_tokens:
        leave_prefill(tables, engine, index)
        join_decode(tables, engine, index)
    else:
        _give_up_memory(tables, engine, index, grown=False)
        _emit_finished(tables, engine, index)


def remove_call(
    tables: Tables,
    engine: EngineState,
    index: int,
) -> None:
    """Abort a call inside the engine; the state must be synced to the present.

    Its memory is free at once; the iteration in flight keeps its duration.
    """
    call = tables.calls[index]
    if call.place == WAITING:
        leave_waiting(tables, engine, index)
    else:
        in_flight = engine.iterations > 0
        if in_flight:
            cut_segment(engine)
            engine.linear_s = engine.end_s - engine.start_s
            engine.quadratic_s = 0.0
        _give_up_memory(tables, engine, index, grown=in_flight)
    call.place = ENDED
