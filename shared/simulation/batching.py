"""One instance's continuous batching, driven by events: the live simulated engine uses it.

The model itself is in `iteration` (what an iteration does) and `kv_blocks` (memory and prefix
cache); the compiled simulator runs the very same functions over a whole fleet.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from shared.domain.instance import InstanceSpec
from shared.domain.trace import PrefixPart
from shared.errors import InvalidCall
from shared.simulation.engine_states import check_call, new_call_state, new_engine_state
from shared.simulation.gate import has_turn, lacks_memory
from shared.simulation.iteration import (
    FINISHED,
    complete_segment,
    enter_engine,
    remove_call,
    start_segment,
)
from shared.simulation.kernel_state import CallState, NodeState
from shared.simulation.segments import sync_segment
from shared.simulation.tables import Tables

_NODES_BEFORE_SWEEP = 4_096


class BatchEvent(NamedTuple):
    """Something that happened to a call.

    Attributes:
        handle: The call's handle as given to `add`.
        kind: What happened; a one-token call brings both at the same instant.
        at_s: When, mesh seconds.
        cached_tokens: Prompt tokens found in the prefix cache when it first entered the batch.
    """

    handle: int
    kind: Literal["first_token", "finished"]
    at_s: float
    cached_tokens: int


class BatchingInstance:
    """vLLM-like continuous batching of one instance, driven by events; time in mesh seconds.

    Call `advance` at (or after) `next_event_s()` and whenever calls were added. Instants given
    must never go backwards. A call added at an instant at which an iteration ends still enters
    the next iteration, as long as `next_event_s` was not asked in between.

    Args:
        spec: The instance.

    Raises:
        ConfigError: The description makes no running instance.
    """

    def __init__(self, spec: InstanceSpec) -> None:
        self._spec = spec
        self._engine = new_engine_state(spec)
        self._calls: list[CallState] = []
        self._unused: list[int] = []
        self._index_of: dict[int, int] = {}
        self._handles: list[int] = []
        self._order = 0
        self._nodes: list[NodeState] = []
        self._tables = Tables()
        self._tables.calls = self._calls
        self._tables.nodes = self._nodes
        self._tables.residues = [0] * spec.block_tokens
        self._tables.events = [0] * (4 * spec.max_num_seqs)
        self._unused_nodes: list[int] = []
        self._node_of: dict[tuple[int, str], int] = {}
        self._nodes_before_sweep = _NODES_BEFORE_SWEEP
        self._events: list[BatchEvent] = []

    @property
    def spec(self) -> InstanceSpec:
        """The instance."""
        return self._spec

    @property
    def num_running(self) -> int:
        """Calls in the batch."""
        return self._engine.num_decode + self._engine.num_prefill

    @property
    def num_waiting(self) -> int:
        """Calls inside the engine that are not in the batch."""
        return self._engine.num_waiting

    @property
    def kv_used_tokens(self) -> int:
        """KV memory held by calls in the batch, in whole blocks, tokens (as of the last call)."""
        engine = self._engine
        used = engine.total_blocks - engine.free_blocks - engine.evictable_blocks
        return used * engine.block_tokens

    @property
    def num_preemptions(self) -> int:
        """How often a call lost its memory and had to start again."""
        return self._engine.num_preemptions

    @property
    def busy_s(self) -> float:
        """Time spent in iterations so far, seconds."""
        return self._engine.busy_s

    def add(
        self,
        handle: int,
        *,
        now_s: float,
        input_tokens: int,
        output_tokens: int,
        prefix: Sequence[PrefixPart] = (),
        priority: float = 0.0,
    ) -> None:
        """Take a call in.

        Args:
            handle: The caller's name for it; unique among the calls inside.
            now_s: Present instant, mesh seconds.
            input_tokens: Prompt length, tokens, >= 1.
            output_tokens: Tokens it will generate, >= 1.
            prefix: Prefix chain.
            priority: Place among the waiting inside, smallest first.

        Raises:
            InvalidCall: It can never fit, or the handle is in use.
        """
        check_call(self._spec, input_tokens, output_tokens)
        if handle in self._index_of:
            msg = f"handle {handle} is in use"
            raise InvalidCall(msg)
        self._catch_up(now_s)
        call = new_call_state(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            priority=priority,
            order=self._order,
            chain=self._chain_of(prefix, input_tokens),
        )
        self._order += 1
        index = self._store(call, handle)
        enter_engine(self._tables, self._engine, index, now_s)

    def abort(self, handle: int, *, now_s: float) -> None:
        """Drop a call and free its memory; unknown handles (ended by now) are ignored."""
        self._catch_up(now_s)
        index = self._index_of.get(handle)
        if index is None:
            return
        remove_call(self._tables, self._engine, index)
        self._forget(index)

    def next_event_s(self) -> float:
        """Return when `advance` should be called next, mesh seconds; infinite when idle.

        The iteration that starts now is fixed by this. The instant may bring no event.
        """
        if self._events:
            return self._events[0].at_s
        if self._engine.iterations == 0:
            self._start()
        return self._engine.end_s

    def advance(self, now_s: float) -> list[BatchEvent]:
        """Return all events with `at_s <= now_s`, in order."""
        self._catch_up(now_s)
        events, self._events = self._events, []
        return events

    def fits_now(
        self, input_tokens: int, output_tokens: int, prefix: Sequence[PrefixPart] = ()
    ) -> bool:
        """Return whether a call would be batched at the next chance instead of waiting inside.

        Judged as of the last instant given to `add`, `abort` or `advance`.

        Args:
            input_tokens: Prompt length, tokens.
            output_tokens: Output length to leave room for (a prediction will do), tokens.
            prefix: Prefix chain; parts that are in use already need no memory again.
        """
        chain = self._known_chain(prefix, input_tokens)
        whole = self._engine.total_blocks * self._engine.block_tokens
        tokens = min(input_tokens + max(0, output_tokens - 1), whole)
        return has_turn(self._engine) and not lacks_memory(
            self._tables, self._engine, chain, tokens
        )

    def _catch_up(self, now_s: float) -> None:
        """Complete every segment that ends by `now_s` and sync the one in flight."""
        engine = self._engine
        while True:
            if engine.iterations == 0:
                if engine.clock_s >= now_s:
                    return
                self._start()
                if engine.iterations == 0:
                    return
            if engine.end_s > now_s:
                sync_segment(self._tables, engine, now_s)
                return
            self._complete()

    def _start(self) -> None:
        start_segment(self._tables, self._engine)

    def _complete(self) -> None:
        engine = self._engine
        complete_segment(self._tables, engine)
        events = self._tables.events
        for position in range(engine.num_events):
            index, kind = events[2 * position], events[2 * position + 1]
            finished = kind == FINISHED
            self._events.append(
                BatchEvent(
                    self._handles[index],
                    "finished" if finished else "first_token",
                    engine.clock_s,
                    self._calls[index].cached_tokens,
                )
            )
            if finished:
                self._forget(index)

    def _store(self, call: CallState, handle: int) -> int:
        if self._unused:
            index = self._unused.pop()
            self._calls[index] = call
            self._handles[index] = handle
        else:
            index = len(self._calls)
            self._calls.append(call)
            self._handles.append(handle)
        self._index_of[handle] = index
        self._bind(call.chain, 1)
        return index

    def _forget(self, index: int) -> None:
        del self._index_of[self._handles[index]]
        self._unused.append(index)
        self._bind(self._calls[index].chain, -1)

    def _bind(self, chain: int, change: int) -> None:
        while chain >= 0:
            self._nodes[chain].bound += change
            chain = self._nodes[chain].parent

    def _known_chain(self, prefix: Sequence[PrefixPart], input_tokens: int) -> int:
        """Return the deepest node of the chain that exists already, or -1."""
        chain, end_tokens = -1, 0
        if not self._spec.prefix_caching:
            return chain
        for part in prefix:
            end_tokens += part.tokens
            node = self._node_of.get((chain, part.prefix_id))
            if node is None or end_tokens > input_tokens:
                break
            chain = node
        return chain

    def _chain_of(self, prefix: Sequence[PrefixPart], input_tokens: int) -> int:
        """Return the deepest node of a chain, made where it is new.

        Parts that would reach beyond the prompt end the chain.
        """
        chain, end_tokens = -1, 0
        if not self._spec.prefix_caching:
            return chain
        for part in prefix:
            end_tokens += part.tokens
            if end_tokens > input_tokens:
                break
            key = (chain, part.prefix_id)
            node = self._node_of.get(key)
            if node is None:
                node = self._new_node(chain, end_tokens)
                self._node_of[key] = node
            chain = node
        return chain

    def _new_node(self, parent: int, end_tokens: int) -> int:
        if not self._unused_nodes and len(self._nodes) >= self._nodes_before_sweep:
            self._sweep_nodes(keep=parent)
        node = NodeState()
        node.parent = parent
        node.end_blocks = end_tokens // self._spec.block_tokens
        node.own_blocks = node.end_blocks - (self._nodes[parent].end_blocks if parent >= 0 else 0)
        node.resident_blocks = node.refs = node.bound = 0
        node.prev = node.next = -1
        if self._unused_nodes:
            index = self._unused_nodes.pop()
            self._nodes[index] = node
        else:
            index = len(self._nodes)
            self._nodes.append(node)
        return index

    def _sweep_nodes(self, keep: int) -> None:
        """Forget parts that are neither in memory nor wanted: a long life stays small."""
        kept: set[int] = set()
        for index in [*self._node_of.values(), keep]:
            node = self._nodes[index]
            if node.resident_blocks > 0 or node.bound > 0 or index == keep:
                kept.update(self._ancestry(index))
        gone = [key for key, index in self._node_of.items() if index not in kept]
        self._unused_nodes.extend(self._node_of.pop(key) for key in gone)
        self._nodes_before_sweep = max(_NODES_BEFORE_SWEEP, 2 * len(kept))

    def _ancestry(self, index: int) -> list[int]:
        chain = []
        while index >= 0:
            chain.append(index)
            index = self._nodes[index].parent
        return chain
