"""When an engine has room for a call: what a worker asks before it hands one over.

The waiting line belongs to the mesh, where it can be reordered; the engine gets what it can batch.
"""

import math

from shared.simulation.kernel_state import CallState, EngineState
from shared.simulation.kv_blocks import missing_blocks
from shared.simulation.tables import Tables


def has_turn(engine: EngineState) -> bool:
    """Return whether a call that is added now gets its turn for prefill next.

    That is: a place in the batch is free, and nothing waits inside, or no prompt is being
    computed and those that wait leave tokens of one iteration's budget.
    """
    inside = engine.num_decode + engine.num_prefill + engine.num_waiting
    if inside >= engine.max_num_seqs:
        return False
    if engine.num_waiting == 0:
        return True
    return engine.num_prefill == 0 and engine.waiting_tokens < engine.max_batched_tokens


def lacks_memory(tables: Tables, engine: EngineState, chain: int, tokens: int) -> bool:
    """Return whether KV memory lacks for so many tokens beside the prompts waiting inside.

    The state must be synced to the present.
    """
    return missing_blocks(tables, engine, chain, tokens) + engine.waiting_blocks > 0


def reserved_tokens(engine: EngineState, call: CallState, output_tokens: float) -> int:
    """Return the memory a call should find before it is given to the engine, tokens.

    Prompt and expected output, but never more than the whole memory.
    """
    growth = max(0, math.ceil(output_tokens) - 1)
    return min(call.input_tokens + growth, engine.total_blocks * engine.block_tokens)
