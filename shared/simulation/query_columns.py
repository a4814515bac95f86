"""One query of a scenario as columns of numbers, with what policies expect of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError
from shared.scheduling.latency import service_s
from shared.scheduling.profiles import FleetTimes, stage_estimate
from shared.simulation.kernel_state import NodeState, dtype_of

Array = np.ndarray[Any, Any]


class QueryColumns:
    """One query's columns, with indices counted from its own first record.

    Args:
        query: The query.
        times: Per stage, (expected duration, expected duration of what follows), seconds.
        lengths: Per stage and call, the output length that policies expect, tokens.
        chains: Where its prefix chains are kept.
    """

    def __init__(
        self,
        query: TraceQuery,
        times: Sequence[tuple[float, float]],
        lengths: Sequence[Sequence[float]],
        chains: "ChainTree",
    ) -> None:
        stages = query.stages
        parents = [parents_of(stage, index) for index, stage in enumerate(stages)]
        children: list[list[int]] = [[] for _ in stages]
        for index, group in enumerate(parents):
            for parent in group:
                children[parent].append(index)
        self.children = [child for group in children for child in group]
        self.num_children = [len(group) for group in children]
        self.num_parents = [len(group) for group in parents]
        self.num_calls = [len(stage.calls) for stage in stages]
        self.think_s = [stage.think_s for stage in stages]
        self.expected_s = [stage_s for stage_s, _ in times]
        self.remaining_s = [remaining_s for _, remaining_s in times]
        self.stage_of_call = [index for index, stage in enumerate(stages) for _ in stage.calls]
        self.predicted_tokens = [tokens for group in lengths for tokens in group]
        calls = [call for stage in stages for call in stage.calls]
        self.input_tokens = [call.input_tokens for call in calls]
        self.models = [call.model or query.model for call in calls]
        self.output_tokens = [call.output_tokens for call in calls]
        self.chains = [chains.index_of(call) for call in calls]


class ChainTree:
    """The tree of all prefix chains of a workload."""

    def __init__(self) -> None:
        self._node_of: dict[tuple[int, str, int], int] = {}
        self._parents: list[int] = []
        self._ends_tokens: list[int] = []

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self._parents)

    def index_of(self, call: TraceCall) -> int:
        """Return the deepest node of a call's chain, or -1; parts beyond the prompt are cut."""
        node, end_tokens = -1, 0
        for part in call.prefix:
            end_tokens += part.tokens
            if end_tokens > call.input_tokens:
                break
            key = (node, part.prefix_id, part.tokens)
            found = self._node_of.get(key)
            if found is None:
                found = self._node_of[key] = len(self._parents)
                self._parents.append(node)
                self._ends_tokens.append(end_tokens)
            node = found
        return node

    def tables(self, block_tokens: Sequence[int]) -> Array:
        """Return the nodes of every instance, one after the other."""
        parents = np.array(self._parents, np.int64)
        ends = np.array(self._ends_tokens, np.int64)
        nodes = np.zeros(len(block_tokens) * self.size, dtype_of(NodeState))
        for place, size in enumerate(block_tokens):
            base = place * self.size
            own = nodes[base : base + self.size]
            own["parent"] = np.where(parents >= 0, parents + base, -1)
            own["end_blocks"] = ends // size
            before = np.where(parents >= 0, (ends // size)[np.maximum(parents, 0)], 0)
            own["own_blocks"] = own["end_blocks"] - before
            own["prev"] = own["next"] = -1
        return nodes


def limit_of(spec: InstanceSpec) -> int:
    """Return the longest prompt plus output an instance can run, tokens."""
    memory_tokens = spec.kv_tokens - spec.kv_tokens % spec.block_tokens
    return min(spec.max_context_tokens, memory_tokens + 1)


def parents_of(stage: TraceStage, index: int) -> tuple[int, ...]:
    """Return the indices of the stages that must end before a stage."""
    if stage.parents is not None:
        return tuple(dict.fromkeys(stage.parents))
    return (index - 1,) if index else ()


def check_query(query: TraceQuery, limits: Mapping[str, int]) -> None:
    """Refuse a query that cannot run.

    Args:
        query: The query.
        limits: Model -> longest call that any instance offering it can run, tokens.

    Raises:
        ConfigError: Names the query, the stage and the call.
    """
    if not query.stages:
        msg = f"query {query.query_id!r} has no stages"
        raise ConfigError(msg)
    for index, stage in enumerate(query.stages):
        place = f"query {query.query_id!r}, stage {index} ({stage.stage})"
        if not stage.calls:
            msg = f"{place} has no calls"
            raise ConfigError(msg)
        if not 0.0 <= stage.think_s < np.inf:
            msg = f"{place}: think_s {stage.think_s} is no duration"
            raise ConfigError(msg)
        if any(not 0 <= parent < index for parent in parents_of(stage, index)):
            msg = f"{place}: parents {stage.parents} are not all earlier stages"
            raise ConfigError(msg)
        for number, call in enumerate(stage.calls):
            _check_call(call, f"{place}, call {number}", limits, call.model or query.model)


def _check_call(call: TraceCall, place: str, limits: Mapping[str, int], model: str) -> None:
    if call.input_tokens < 1 or call.output_tokens < 1:
        msg = f"{place}: token counts must be at least 1"
        raise ConfigError(msg)
    if any(part.tokens < 1 for part in call.prefix):
        msg = f"{place}: prefix parts must have at least 1 token"
        raise ConfigError(msg)
    if model not in limits:
        msg = f"{place}: no instance of the fleet offers model {model!r}"
        raise ConfigError(msg)
    if call.input_tokens + call.output_tokens > limits[model]:
        msg = (
            f"{place}: {call.input_tokens} + {call.output_tokens} tokens fit on no instance of "
            f"the fleet (longest: {limits[model]})"
        )
        raise ConfigError(msg)


def expected_times(query: TraceQuery, times: FleetTimes) -> list[tuple[float, float]]:
    """Return per stage what is expected of it and of what follows, seconds."""
    return [
        (
            times.stage_s(query.workflow, stage.stage),
            times.remaining_s(query.workflow, stage.stage, stage.iteration),
        )
        for stage in query.stages
    ]


def expected_lengths(query: TraceQuery, shapes: Mapping[str, WorkflowShape]) -> list[list[float]]:
    """Return per stage and call the predicted output length, tokens."""
    return [
        [stage_estimate(shapes, query.workflow, stage.stage).output_tokens] * len(stage.calls)
        for stage in query.stages
    ]


def true_lengths(query: TraceQuery) -> list[list[float]]:
    """Return per stage and call the output length that an oracle knows, tokens."""
    return [[float(call.output_tokens) for call in stage.calls] for stage in query.stages]


def true_times(
    query: TraceQuery, members: Sequence[InstanceSpec], factors: Mapping[str, float]
) -> list[tuple[float, float]]:
    """Return what an oracle expects: true lengths, and what really follows on the longest path."""
    own = [_true_stage_s(stage, members, factors) for stage in query.stages]
    after = [0.0] * len(own)
    for index in range(len(own) - 1, -1, -1):
        for parent in parents_of(query.stages[index], index):
            after[parent] = max(after[parent], own[index] + after[index])
    return list(zip(own, after, strict=True))


def _true_stage_s(
    stage: TraceStage, members: Sequence[InstanceSpec], factors: Mapping[str, float]
) -> float:
    total_s = 0.0
    for spec in members:
        total_s += max(
            service_s(
                spec,
                input_tokens=call.input_tokens,
                cached_tokens=0,
                output_tokens=call.output_tokens,
                speed_factor=factors.get(spec.instance_id, 1.0),
            )
            for call in stage.calls
        )
    return total_s / max(1, len(members))
