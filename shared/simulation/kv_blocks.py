"""KV memory of one instance: blocks, growth of decoding calls, and the prefix cache.

Memory is counted in blocks. A call holds the blocks of its prefix chain together with every other
call that uses the chain, and the rest for itself. When nobody uses a prefix part any more its
blocks stay, as vLLM's do, until memory is short; then the least recently used part loses blocks
from its end. A call computes at least one token, and only whole blocks hit.

The blocks that decoding calls need as they grow are known in closed form: a call needs a new block
whenever its KV length is a multiple of the block size, so calls are counted by
`(kv_tokens - step) mod block_tokens`, which does not change while they decode (the *residue
histogram*).

Source: vLLM V1's block pool and prefix caching. Different from vLLM: a prompt's blocks are taken
as a whole when it is admitted, and text outside a prefix chain is never found again.
"""

from shared.simulation.kernel_state import CallState, EngineState
from shared.simulation.tables import Tables


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold so many tokens."""
    return (tokens + block_tokens - 1) // block_tokens


def growth_blocks(tables: Tables, engine: EngineState, skip: int, steps: int) -> int:
    """Return the new blocks that decode steps `skip + 1 ... skip + steps` from now need."""
    size = engine.block_tokens
    cycles = steps // size
    total = cycles * engine.num_decode
    slot = -(engine.step + skip) % size
    for _ in range(steps - cycles * size):
        total += tables.residues[engine.residue_base + slot]
        slot = slot - 1 if slot > 0 else size - 1
    return total


def take_blocks(tables: Tables, engine: EngineState, count: int) -> None:
    """Take free blocks, evicting unused prefix parts when there are too few."""
    while engine.free_blocks < count:
        index = engine.lru_head
        node = tables.nodes[index]
        taken = min(node.resident_blocks, count - engine.free_blocks)
        node.resident_blocks -= taken
        engine.evictable_blocks -= taken
        engine.free_blocks += taken
        if node.resident_blocks == 0:
            unlink_unused(tables, engine, index)
    engine.free_blocks -= count


def link_unused(tables: Tables, engine: EngineState, index: int) -> None:
    """Append a node to the list of unused ones as the most recently used."""
    node = tables.nodes[index]
    node.prev = engine.lru_tail
    node.next = -1
    if engine.lru_tail >= 0:
        tables.nodes[engine.lru_tail].next = index
    else:
        engine.lru_head = index
    engine.lru_tail = index


def unlink_unused(tables: Tables, engine: EngineState, index: int) -> None:
    """Take a node out of the list of unused ones."""
    node = tables.nodes[index]
    if node.prev >= 0:
        tables.nodes[node.prev].next = node.next
    else:
        engine.lru_head = node.next
    if node.next >= 0:
        tables.nodes[node.next].prev = node.prev
    else:
        engine.lru_tail = node.prev
    node.prev = -1
    node.next = -1


def resident_chain_blocks(tables: Tables, chain: int) -> int:
    """Return how many whole blocks of a chain are in memory, from the prompt's start.

    A node in memory has all its ancestors in memory: a chain is filled from its start, and
    released from its end, so that its end is evicted first.
    """
    index = chain
    while index >= 0:
        node = tables.nodes[index]
        if node.resident_blocks > 0:
            return node.end_blocks - node.own_blocks + node.resident_blocks
        index = node.parent
    return 0


def missing_blocks(tables: Tables, engine: EngineState, chain: int, tokens: int) -> int:
    """Return how many blocks are lacking to admit a prompt now; 0 or less means that it fits.

    Blocks of the chain that are in memory but unused will be used, so they cannot be evicted.
    """
    need = blocks_of(tokens, engine.block_tokens) - engine.free_blocks - engine.evictable_blocks
    index = chain
    while index >= 0:
        node = tables.nodes[index]
        if node.refs > 0:
            need -= node.end_blocks
            break
        index = node.parent
    return need


def take_prompt(tables: Tables, engine: EngineState, call: CallState) -> int:
    """Give a call the blocks of its whole prompt; returns the tokens found in the cache.

    The caller has made sure with `missing_blocks` that they fit.
    """
    size = engine.block_tokens
    held = resident_chain_blocks(tables, call.chain)
    need = blocks_of(call.target_tokens, size) - held
    index = call.chain
    while index >= 0:
        node = tables.nodes[index]
        if node.refs == 0 and node.resident_blocks > 0:
            unlink_unused(tables, engine, index)
            engine.evictable_blocks -= node.resident_blocks
        node.refs += 1
        node.resident_blocks = node.own_blocks
        index = node.parent
    take_blocks(tables, engine, need)
    return min(held, (call.target_tokens - 1) // size) * size


def release_blocks(
    tables: Tables,
    engine: EngineState,
    chain: int,
    held_blocks: int,
    computed_tokens: int,
) -> None:
    """Give back what a call holds: its own blocks at once, its prefix chain to the cache.

    Args:
        tables: Where the records are.
        engine: The instance.
        chain: The call's chain.
        held_blocks: All blocks the call uses, the chain's included.
        computed_tokens: Tokens really computed; parts beyond them hold nothing of use.
    """
    shared = tables.nodes[chain].end_blocks if chain >= 0 else 0
    engine.free_blocks += held_blocks - shared
    computed_blocks = computed_tokens // engine.block_tokens
    index = chain
    while index >= 0:
        node = tables.nodes[index]
        node.refs -= 1
        if node.refs == 0:
            useful = computed_blocks - (node.end_blocks - node.own_blocks)
            useful = max(0, min(useful, node.resident_blocks))
            engine.free_blocks += node.resident_blocks - useful
            node.resident_blocks = useful
            if useful > 0:
                engine.evictable_blocks += useful
                link_unused(tables, engine, index)
        index = node.parent
