"""Lays a scenario out as the record tables that the event loop works on.

Queries that share one `stages` tuple (repetitions of a trace) are laid out once and copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError
from shared.scheduling.dispatch import text_key
from shared.scheduling.latency import service_s
from shared.scheduling.profiles import FleetTimes, stage_estimate
from shared.simulation.batching import new_engine_state
from shared.simulation.fleet_kernel import LOOK_PAST
from shared.simulation.fleet_state import (
    UNASSIGNED,
    LineState,
    PlanState,
    QueryState,
    RunState,
    StageState,
    TimerState,
    ViewState,
)
from shared.simulation.kernel_state import CallState, EngineState, NodeState, dtype_of
from shared.simulation.scenario import Scenario, check_scenario

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

MAX_CALLS = 2**31 - 1


class Layout:
    """A scenario's workload and fleet as tables, free of policy and α.

    Attributes:
        scenario: What was laid out.
        fleet: The instances in the order of their ids: the order of every per-instance table.
        arrays: Table name -> records at the start of a run; `tables_for` copies them.
        query_of_call: Query index of every call.
        stage_of_call: Stage index within its query of every call.
    """

    def __init__(self, scenario: Scenario) -> None:
        check_scenario(scenario)
        self.scenario = scenario
        self.fleet = tuple(sorted(scenario.fleet, key=lambda spec: spec.instance_id))
        self._chains = _Chains()
        models = sorted({query.model for query in scenario.queries})
        self._model_index = {model: index for index, model in enumerate(models)}
        self._members = {model: _members_of(model, self.fleet) for model in models}
        self._times = {model: self._fleet_times(model) for model in models}
        self.arrays = self._workload_tables() | self._fleet_tables(models)

    def tables_for(self, scenario: Scenario, choose_rule: int, order_rule: int) -> Arrays:
        """Return fresh tables for one run.

        Args:
            scenario: Like the one laid out, but for α and the mesh's settings.
            choose_rule: How instances are chosen, see `rules`.
            order_rule: How lines are ordered, see `rules`.
        """
        arrays = {name: array.copy() for name, array in self.arrays.items()}
        num_calls, num_instances = len(arrays["calls"]), len(self.fleet)
        num_timers = _timers_needed(scenario, len(arrays["stages"]), num_calls)
        arrays["runs"] = run = np.zeros(1, dtype_of(RunState))
        run["alpha"] = scenario.alpha
        run["hop_s"] = scenario.hop_s
        run["state_delay_s"] = scenario.state_delay_s
        run["num_queries"] = len(arrays["queries"])
        run["num_instances"] = num_instances
        run["num_nodes"] = self._chains.size
        run["num_dispatchers"] = scenario.num_dispatchers
        run["choose_rule"], run["order_rule"] = choose_rule, order_rule
        run["pending_call"] = -1
        arrays["queries"]["dispatcher"] = (
            np.arange(len(arrays["queries"])) % scenario.num_dispatchers
        )
        arrays["views"] = np.zeros(num_instances * scenario.num_dispatchers, dtype_of(ViewState))
        arrays["turns"] = np.zeros(scenario.num_dispatchers, np.int64)
        arrays["timers"] = timers = np.empty(num_timers, dtype_of(TimerState))
        timers["next"] = np.arange(1, num_timers + 1)
        arrays["timer_heap"] = np.empty(num_timers, np.int64)
        arrays["line_heap"] = np.empty(num_instances * num_calls, np.int64)
        arrays["pool"] = np.empty(num_calls, np.int64)
        return arrays

    def _fleet_times(self, model: str) -> FleetTimes:
        factors = self.scenario.speed_factors
        pool = [(spec, factors.get(spec.instance_id, 1.0)) for spec in self._members[model]]
        return FleetTimes(self.scenario.shapes, pool)

    def _workload_tables(self) -> Arrays:
        queries = self.scenario.queries
        pieces = self._pieces(queries)
        num_stages = np.array([len(piece.stages) for piece in pieces])
        num_calls = np.array([len(piece.calls) for piece in pieces])
        num_children = np.array([len(piece.children) for piece in pieces])
        if num_calls.sum() > MAX_CALLS:
            msg = f"{num_calls.sum():,} calls are more than a run can hold"
            raise ConfigError(msg)
        first_stage, first_call = _starts(num_stages), _starts(num_calls)
        table = np.zeros(len(queries), dtype_of(QueryState))
        table["arrival_s"] = [_arrival_of(query) for query in queries]
        table["slo_s"] = [_slo_of(query) for query in queries]
        table["end_s"] = np.nan
        table["first_stage"] = first_stage
        table["num_stages"] = table["stages_left"] = num_stages
        table["model"] = [self._model_index[query.model] for query in queries]
        stages = np.concatenate([piece.stages for piece in pieces])
        stages["query"] = np.repeat(np.arange(len(queries)), num_stages)
        stages["first_call"] += np.repeat(first_call, num_stages)
        stages["first_child"] += np.repeat(_starts(num_children), num_stages)
        plans = np.concatenate([piece.plans for piece in pieces])
        self.query_of_call = np.repeat(np.arange(len(queries)), num_calls)
        self.stage_of_call = plans["stage"].copy()
        plans["stage"] += np.repeat(first_stage, num_calls)
        plans["tie_key"] = _scattered(np.arange(len(plans)))
        children = np.concatenate([piece.children for piece in pieces])
        return {
            "queries": table,
            "stages": stages,
            "plans": plans,
            "calls": np.concatenate([piece.calls for piece in pieces]),
            "children": children + np.repeat(first_stage, num_children),
            "arrivals": np.argsort(table["arrival_s"], kind="stable"),
        }

    def _pieces(self, queries: Sequence[TraceQuery]) -> list["_Piece"]:
        known: dict[tuple[int, str, str], _Piece] = {}
        pieces = []
        for query in queries:
            key = (id(query.stages), query.workflow, query.model)
            piece = known.get(key)
            if piece is None:
                piece = known[key] = self._piece(query)
            pieces.append(piece)
        return pieces

    def _piece(self, query: TraceQuery) -> "_Piece":
        limit_tokens = max(limit_of(spec) for spec in self._members[query.model])
        check_query(query, limit_tokens)
        if self.scenario.oracle:
            expected = _true_times(query, self._members[query.model], self.scenario.speed_factors)
        else:
            expected = _expected_times(query, self._times[query.model])
        piece = _Piece(query, expected)
        calls = [call for stage in query.stages for call in stage.calls]
        piece.plans["chain"] = [self._chains.index_of(call) for call in calls]
        if self.scenario.oracle:
            piece.plans["predicted_tokens"] = piece.calls["output_tokens"]
        else:
            shapes = self.scenario.shapes
            piece.plans["predicted_tokens"] = [
                stage_estimate(shapes, query.workflow, stage.stage).output_tokens
                for stage in query.stages
                for _ in stage.calls
            ]
        return piece

    def _fleet_tables(self, models: Sequence[str]) -> Arrays:
        fleet, scenario = self.fleet, self.scenario
        engines = np.zeros(len(fleet), dtype_of(EngineState))
        for place, spec in enumerate(fleet):
            state = new_engine_state(spec, scenario.speed_factors.get(spec.instance_id, 1.0))
            for name in engines.dtype.names or ():
                engines[place][name] = getattr(state, name)
        engines["residue_base"] = _starts(engines["block_tokens"])
        lines = np.zeros(len(fleet), dtype_of(LineState))
        lines["heap_base"] = np.arange(len(fleet)) * len(self.query_of_call)
        lines["admission"] = [
            spec.max_num_seqs if scenario.admission is None else scenario.admission
            for spec in fleet
        ]
        lines["limit_tokens"] = [limit_of(spec) for spec in fleet]
        lines["tie_key"] = [text_key(spec.instance_id) for spec in fleet]
        lines["caches"] = [spec.prefix_caching for spec in fleet]
        offers = [spec in self._members[model] for model in models for spec in fleet]
        return {
            "engines": engines,
            "lines": lines,
            "nodes": self._chains.tables([spec.block_tokens for spec in fleet]),
            "offers": np.array(offers, np.int64),
            "residues": np.zeros(sum(spec.block_tokens for spec in fleet), np.int64),
            "events": np.zeros(4 * max(spec.max_num_seqs for spec in fleet), np.int64),
            "wakes_s": np.full(len(fleet), np.inf),
            "costs_s": np.zeros(len(fleet)),
            "touched": np.zeros(len(fleet), np.int64),
            "held": np.zeros(LOOK_PAST, np.int64),
        }


class _Piece:
    """One query's records, with indices counted from its own first record.

    Args:
        query: The query.
        expected: Per stage, (expected duration, expected duration of what follows), seconds.
    """

    def __init__(self, query: TraceQuery, expected: Sequence[tuple[float, float]]) -> None:
        parents = [parents_of(stage, index) for index, stage in enumerate(query.stages)]
        children: list[list[int]] = [[] for _ in query.stages]
        for index, group in enumerate(parents):
            for parent in group:
                children[parent].append(index)
        counts = [len(stage.calls) for stage in query.stages]
        self.children = np.array([child for group in children for child in group], np.int64)
        self.stages = stages = np.zeros(len(query.stages), dtype_of(StageState))
        stages["ready_s"] = stages["t_slo_s"] = np.nan
        stages["expected_s"] = [stage_s for stage_s, _ in expected]
        stages["remaining_s"] = [remaining_s for _, remaining_s in expected]
        stages["think_s"] = [stage.think_s for stage in query.stages]
        stages["num_calls"] = stages["calls_left"] = counts
        stages["first_call"] = _starts(counts)
        stages["parents_left"] = [len(group) for group in parents]
        stages["num_children"] = [len(group) for group in children]
        stages["first_child"] = _starts([len(group) for group in children])
        calls = [call for stage in query.stages for call in stage.calls]
        self.calls = np.zeros(len(calls), dtype_of(CallState))
        self.calls["input_tokens"] = [call.input_tokens for call in calls]
        self.calls["output_tokens"] = [call.output_tokens for call in calls]
        self.calls["chain"] = self.calls["prev"] = self.calls["next"] = -1
        for name in ("started_s", "first_token_s", "end_s"):
            self.calls[name] = np.nan
        self.plans = np.zeros(len(calls), dtype_of(PlanState))
        self.plans["stage"] = np.repeat(np.arange(len(counts)), counts)
        self.plans["instance"] = UNASSIGNED
        self.plans["assigned_s"] = np.nan


class _Chains:
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


def check_query(query: TraceQuery, limit_tokens: int) -> None:
    """Refuse a query that cannot run.

    Args:
        query: The query.
        limit_tokens: Longest call that any of its instances can run, tokens.

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
            _check_call(call, f"{place}, call {number}", limit_tokens)


def _check_call(call: TraceCall, place: str, limit_tokens: int) -> None:
    if call.input_tokens < 1 or call.output_tokens < 1:
        msg = f"{place}: token counts must be at least 1"
        raise ConfigError(msg)
    if any(part.tokens < 1 for part in call.prefix):
        msg = f"{place}: prefix parts must have at least 1 token"
        raise ConfigError(msg)
    if call.input_tokens + call.output_tokens > limit_tokens:
        msg = (
            f"{place}: {call.input_tokens} + {call.output_tokens} tokens fit on no instance of "
            f"the fleet (longest: {limit_tokens})"
        )
        raise ConfigError(msg)


def _members_of(model: str, fleet: Sequence[InstanceSpec]) -> list[InstanceSpec]:
    members = [spec for spec in fleet if model == spec.model or model in spec.adapters]
    if not members:
        msg = f"no instance of the fleet offers model {model!r}"
        raise ConfigError(msg)
    return members


def _arrival_of(query: TraceQuery) -> float:
    if query.arrival_s is None or not 0.0 <= query.arrival_s < np.inf:
        msg = f"query {query.query_id!r}: arrival_s is {query.arrival_s}, no instant >= 0"
        raise ConfigError(msg)
    return query.arrival_s


def _slo_of(query: TraceQuery) -> float:
    if query.slo_s is None or not 0.0 < query.slo_s < np.inf:
        msg = f"query {query.query_id!r}: slo_s is {query.slo_s}, no duration above 0"
        raise ConfigError(msg)
    return query.slo_s


def _expected_times(query: TraceQuery, times: FleetTimes) -> list[tuple[float, float]]:
    return [
        (
            times.stage_s(query.workflow, stage.stage),
            times.remaining_s(query.workflow, stage.stage, stage.iteration),
        )
        for stage in query.stages
    ]


def _true_times(
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
    return total_s / len(members)


def _starts(counts: Sequence[int] | Array) -> Array:
    """Return where each group starts when groups of these sizes follow each other."""
    ends = np.cumsum(counts)
    return ends - counts


def _scattered(numbers: Array) -> Array:
    """Return a different-looking number in [0, 2**31) for every number."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(33)).astype(np.int64)


def _timers_needed(scenario: Scenario, num_stages: int, num_calls: int) -> int:
    messages = 2 * num_calls + num_stages if scenario.hop_s > 0.0 else 0
    changes = 2 * num_calls if scenario.state_delay_s > 0.0 else 0
    return 1 + num_stages + messages + changes
