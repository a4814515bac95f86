"""The places of a call inside an engine: waiting, in prefill, decoding; each an ordered list.

Waiting calls are ordered by priority, then arrival; prompts in prefill by admission; decoding calls
by the decode step at which they end, so that the first is the next to end.
"""

from shared.simulation.kernel_state import DECODE, PREFILL, WAITING, CallState, EngineState
from shared.simulation.kv_blocks import blocks_of
from shared.simulation.tables import Tables


def join_waiting(tables: Tables, engine: EngineState, index: int) -> None:
    """Put a call among the waiting; it will have to compute everything it knows so far."""
    call = tables.calls[index]
    call.place = WAITING
    call.target_tokens = call.input_tokens + call.generated_tokens
    call.computed_tokens = 0
    call.chunk_tokens = 0
    call.passes = 0
    before = engine.wait_tail
    while before >= 0 and _comes_before(call, tables.calls[before]):
        before = tables.calls[before].prev
    after = tables.calls[before].next if before >= 0 else engine.wait_head
    call.prev = before
    call.next = after
    if before >= 0:
        tables.calls[before].next = index
    else:
        engine.wait_head = index
    if after >= 0:
        tables.calls[after].prev = index
    else:
        engine.wait_tail = index
    engine.num_waiting += 1
    engine.waiting_tokens += call.target_tokens
    engine.waiting_blocks += blocks_of(call.target_tokens, engine.block_tokens)


def _comes_before(call: CallState, other: CallState) -> bool:
    if call.priority != other.priority:
        return call.priority < other.priority
    return call.order < other.order


def leave_waiting(tables: Tables, engine: EngineState, index: int) -> None:
    """Take a call out of the waiting."""
    call = tables.calls[index]
    if call.prev >= 0:
        tables.calls[call.prev].next = call.next
    else:
        engine.wait_head = call.next
    if call.next >= 0:
        tables.calls[call.next].prev = call.prev
    else:
        engine.wait_tail = call.prev
    engine.num_waiting -= 1
    engine.waiting_tokens -= call.target_tokens
    engine.waiting_blocks -= blocks_of(call.target_tokens, engine.block_tokens)


def join_prefill(tables: Tables, engine: EngineState, index: int) -> None:
    """Put a call at the end of those whose prompt is being computed."""
    call = tables.calls[index]
    call.place = PREFILL
    call.prev = engine.prefill_tail
    call.next = -1
    if engine.prefill_tail >= 0:
        tables.calls[engine.prefill_tail].next = index
    else:
        engine.prefill_head = index
    engine.prefill_tail = index
    engine.num_prefill += 1


def leave_prefill(tables: Tables, engine: EngineState, index: int) -> None:
    """Take a call out of prefill."""
    call = tables.calls[index]
    if call.prev >= 0:
        tables.calls[call.prev].next = call.next
    else:
        engine.prefill_head = call.next
    if call.next >= 0:
        tables.calls[call.next].prev = call.prev
    else:
        engine.prefill_tail = call.prev
    engine.num_prefill -= 1


def join_decode(
    tables: Tables,
    engine: EngineState,
    index: int,
) -> None:
    """Put a call whose prompt is computed among the decoding ones."""
    call = tables.calls[index]
    call.place = DECODE
    call.finish_step = engine.step + call.output_tokens - call.generated_tokens
    before = engine.decode_tail
    while before >= 0 and _ends_before(call, tables.calls[before]):
        before = tables.calls[before].prev
    after = tables.calls[before].next if before >= 0 else engine.decode_head
    call.prev = before
    call.next = after
    if before >= 0:
        tables.calls[before].next = index
    else:
        engine.decode_head = index
    if after >= 0:
        tables.calls[after].prev = index
    else:
        engine.decode_tail = index
    engine.num_decode += 1
    engine.kv_tokens += call.target_tokens
    residue = (call.target_tokens - engine.step) % engine.block_tokens
    tables.residues[engine.residue_base + residue] += 1


def _ends_before(call: CallState, other: CallState) -> bool:
    if call.finish_step != other.finish_step:
        return call.finish_step < other.finish_step
    return call.admitted < other.admitted


def leave_decode(
    tables: Tables,
    engine: EngineState,
    index: int,
) -> None:
    """Take a call out of the decoding ones; notes how much it has generated."""
    call = tables.calls[index]
    if call.prev >= 0:
        tables.calls[call.prev].next = call.next
    else:
        engine.decode_head = call.next
    if call.next >= 0:
        tables.calls[call.next].prev = call.prev
    else:
        engine.decode_tail = call.prev
    engine.num_decode -= 1
    call.generated_tokens = call.output_tokens - (call.finish_step - engine.step)
    kv_tokens = call.input_tokens + call.generated_tokens - 1
    engine.kv_tokens -= kv_tokens
    residue = (kv_tokens - engine.step) % engine.block_tokens
    tables.residues[engine.residue_base + residue] -= 1
