"""Lays a scenario out as the record tables that the event loop works on.

Queries that share one `stages` tuple (repetitions of a trace) are laid out once and copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shared.domain.instance import TIMES, InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.scheduling.dispatch import text_key
from shared.scheduling.policies.ratio import work_weight
from shared.scheduling.profiles import FleetTimes
from shared.simulation.baseline_rules import NOTES
from shared.simulation.engine_states import new_engine_state
from shared.simulation.fleet_state import (
    UNASSIGNED,
    BeliefState,
    LineState,
    PlanState,
    QueryState,
    RunState,
    StageState,
    TimerState,
    ViewState,
)
from shared.simulation.kernel_state import CallState, EngineState, dtype_of
from shared.simulation.query_columns import (
    ChainTree,
    QueryColumns,
    check_query,
    expected_lengths,
    expected_times,
    limit_of,
    true_lengths,
    true_times,
)
from shared.simulation.scenario import Scenario, check_scenario

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

MAX_CALLS = 2**31 - 1


class Layout:
    """A scenario's workload and fleet as tables, free of policy and α.

    Attributes:
        scenario: What was laid out.
        fleet: The instances in the order of their ids: the order of every per-instance table.
        place_of: Place in `fleet` of every instance of the scenario, in the scenario's order.
        arrays: Table name -> records at the start of a run; `tables_for` copies them.
        query_of_call: Query index of every call.
        stage_of_call: Stage index within its query of every call.
    """

    def __init__(self, scenario: Scenario) -> None:
        check_scenario(scenario)
        self.scenario = scenario
        self.fleet = tuple(sorted(scenario.fleet, key=lambda spec: spec.instance_id))
        self.place_of = [self.fleet.index(spec) for spec in scenario.fleet]
        self._chains = ChainTree()
        models = sorted(_models_of(scenario.queries))
        self._model_index = {model: index for index, model in enumerate(models)}
        self._members = {model: _members_of(model, self.fleet) for model in models}
        self._limits = {
            model: max(limit_of(spec) for spec in members)
            for model, members in self._members.items()
            if members
        }
        self._times = self._fleet_times(scenario.shapes, scenario.believed)
        self.arrays = self._workload_tables() | self._fleet_tables(models)

    def tables_for(
        self, scenario: Scenario, choose_rule: int, order_rule: int, *, is_last: bool = False
    ) -> Arrays:
        """Return fresh tables for one run.

        Args:
            scenario: Like the one laid out, but for α and the mesh's settings.
            choose_rule: How instances are chosen, see `rules`.
            order_rule: How lines are ordered, see `rules`.
            is_last: Whether this layout is not needed again, so that nothing is copied.
        """
        arrays = self.arrays
        if not is_last:
            arrays = {name: array.copy() for name, array in arrays.items()}
        num_calls, num_instances = len(arrays["calls"]), len(self.fleet)
        num_timers = _timers_needed(scenario, len(arrays["stages"]), num_calls)
        arrays["runs"] = run = np.zeros(1, dtype_of(RunState))
        run["alpha"] = scenario.alpha
        run["hop_s"] = scenario.hop_s
        run["state_delay_s"] = scenario.state_delay_s
        run["look_past"] = scenario.look_past
        run["one_by_one"] = scenario.one_by_one
        run["num_queries"] = len(arrays["queries"])
        run["num_instances"] = num_instances
        run["num_nodes"] = self._chains.size
        run["num_dispatchers"] = scenario.num_dispatchers
        run["choose_rule"], run["order_rule"] = choose_rule, order_rule
        run["pending_call"] = -1
        run["pause_s"] = np.inf
        arrays["queries"]["dispatcher"] = (
            np.arange(len(arrays["queries"])) % scenario.num_dispatchers
        )
        arrays["views"] = np.zeros(num_instances * scenario.num_dispatchers, dtype_of(ViewState))
        arrays["turns"] = np.zeros(scenario.num_dispatchers, np.int64)
        arrays["notes"] = np.zeros(scenario.num_dispatchers * (NOTES + num_instances))
        arrays["timers"] = timers = np.empty(num_timers, dtype_of(TimerState))
        timers["next"] = np.arange(1, num_timers + 1)
        arrays["timer_heap"] = np.empty(num_timers, np.int64)
        arrays["line_heap"] = np.empty(num_instances * num_calls, np.int64)
        arrays["held"] = np.zeros(scenario.look_past + 1, np.int64)
        arrays["pool"] = np.empty(num_calls, np.int64)
        return arrays

    def expected(
        self, shapes: Mapping[str, WorkflowShape], believed: Mapping[str, float]
    ) -> dict[tuple[str, str], Array]:
        """Return (table, field) -> what policies expect of every stage and call.

        Args:
            shapes: What they expect of workflows.
            believed: What they believe of speeds.
        """
        if self.scenario.oracle:
            return {}
        times = self._fleet_times(shapes, believed)
        known: dict[tuple[int, str, str], tuple[list[float], ...]] = {}
        stage_s, remaining_s, lengths = [], [], []
        for query in self.scenario.queries:
            key = (id(query.stages), query.workflow, query.model)
            if key not in known:
                pairs = expected_times(query, times[query.model])
                groups = expected_lengths(query, shapes)
                known[key] = (
                    [stage for stage, _ in pairs],
                    [remaining for _, remaining in pairs],
                    [tokens for group in groups for tokens in group],
                )
            found = known[key]
            stage_s += found[0]
            remaining_s += found[1]
            lengths += found[2]
        return {
            ("stages", "expected_s"): np.array(stage_s),
            ("stages", "remaining_s"): np.array(remaining_s),
            ("plans", "predicted_tokens"): np.array(lengths),
        }

    def reuses(self, cold: Sequence[str]) -> list[bool]:
        """Return which instances reuse prefixes when some find nothing in their cache."""
        return [spec.prefix_caching and spec.instance_id not in cold for spec in self.fleet]

    def _fleet_times(
        self, shapes: Mapping[str, WorkflowShape], believed: Mapping[str, float]
    ) -> dict[str, FleetTimes]:
        return {
            model: FleetTimes(
                shapes, [(spec, believed.get(spec.instance_id, 1.0)) for spec in members]
            )
            for model, members in self._members.items()
        }

    def _workload_tables(self) -> Arrays:
        queries = self.scenario.queries
        pieces = self._pieces(queries)
        num_stages = np.array([len(piece.think_s) for piece in pieces])
        num_calls = np.array([len(piece.chains) for piece in pieces])
        num_children = np.array([len(piece.children) for piece in pieces])
        if num_calls.sum() > MAX_CALLS:
            msg = f"{num_calls.sum():,} calls are more than a run can hold"
            raise ConfigError(msg)
        first_stage = _starts(num_stages)
        table = np.zeros(len(queries), dtype_of(QueryState))
        table["arrival_s"] = [_arrival_of(query) for query in queries]
        table["slo_s"] = [_slo_of(query) for query in queries]
        table["end_s"] = np.nan
        table["first_stage"] = first_stage
        table["num_stages"] = table["stages_left"] = num_stages
        self.query_of_call = np.repeat(np.arange(len(queries)), num_calls)
        self.stage_of_call = _joined(pieces, "stage_of_call", np.int64)
        return {
            "queries": table,
            "stages": _stage_table(pieces, np.repeat(np.arange(len(queries)), num_stages)),
            "plans": self._plan_table(
                pieces, self.stage_of_call + np.repeat(first_stage, num_calls)
            ),
            "calls": _call_table(pieces),
            "children": _joined(pieces, "children", np.int64)
            + np.repeat(first_stage, num_children),
            "arrivals": np.argsort(table["arrival_s"], kind="stable"),
        }

    def _pieces(self, queries: Sequence[TraceQuery]) -> list[QueryColumns]:
        known: dict[tuple[int, str, str], QueryColumns] = {}
        pieces = []
        for query in queries:
            key = (id(query.stages), query.workflow, query.model)
            piece = known.get(key)
            if piece is None:
                piece = known[key] = self._piece(query)
            pieces.append(piece)
        return pieces

    def _piece(self, query: TraceQuery) -> QueryColumns:
        check_query(query, self._limits)
        scenario = self.scenario
        if scenario.oracle:
            times = true_times(query, self._members[query.model], scenario.believed)
            return QueryColumns(query, times, true_lengths(query), self._chains)
        times = expected_times(query, self._times[query.model])
        return QueryColumns(query, times, expected_lengths(query, scenario.shapes), self._chains)

    def _plan_table(self, pieces: Sequence[QueryColumns], stage_of_call: Array) -> Array:
        plans = np.zeros(len(stage_of_call), dtype_of(PlanState))
        plans["stage"] = stage_of_call
        plans["instance"] = UNASSIGNED
        plans["assigned_s"] = np.nan
        plans["predicted_tokens"] = _joined(pieces, "predicted_tokens", np.float64)
        plans["chain"] = _joined(pieces, "chains", np.int64)
        plans["model"] = [self._model_index[model] for piece in pieces for model in piece.models]
        plans["tie_key"] = _scattered(np.arange(len(plans)))
        return plans

    def _fleet_tables(self, models: Sequence[str]) -> Arrays:
        fleet, scenario = self.fleet, self.scenario
        engines = engine_table(fleet, scenario.speed_factors)
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
        lines["reuses"] = self.reuses(scenario.cold)
        lines["kv_tokens"] = [spec.kv_tokens for spec in fleet]
        lines["work_weight"] = [work_weight(spec.gpu) for spec in fleet]
        offers = [spec in self._members[model] for model in models for spec in fleet]
        return {
            "engines": engines,
            "lines": lines,
            "beliefs": belief_table(fleet, scenario.believed, scenario.hit_factors),
            "nodes": self._chains.tables([spec.block_tokens for spec in fleet]),
            "offers": np.array(offers, np.int64),
            "residues": np.zeros(sum(spec.block_tokens for spec in fleet), np.int64),
            "events": np.zeros(4 * max(spec.max_num_seqs for spec in fleet), np.int64),
            "wakes_s": np.full(len(fleet), np.inf),
            "costs_s": np.zeros(len(fleet)),
            "cached_tokens": np.zeros(len(fleet), np.int64),
            "scores": np.zeros(len(fleet)),
            "touched": np.zeros(len(fleet), np.int64),
        }


def engine_table(fleet: Sequence[InstanceSpec], factors: Mapping[str, float]) -> Array:
    """Return the states of idle instances that are so many times slower than their model."""
    engines = np.zeros(len(fleet), dtype_of(EngineState))
    for place, spec in enumerate(fleet):
        state = new_engine_state(spec, factors.get(spec.instance_id, 1.0))
        for name in engines.dtype.names or ():
            engines[place][name] = getattr(state, name)
    return engines


def belief_table(
    fleet: Sequence[InstanceSpec], believed: Mapping[str, float], hits: Mapping[str, float]
) -> Array:
    """Return what policies believe of each instance."""
    slowed = engine_table(fleet, believed)
    beliefs = np.zeros(len(fleet), dtype_of(BeliefState))
    for name in TIMES:
        beliefs[name] = slowed[name]
    beliefs["hit_factor"] = [hits.get(spec.instance_id, 1.0) for spec in fleet]
    return beliefs


def _joined(pieces: Sequence[QueryColumns], column: str, dtype: type) -> Array:
    """Return one column of all pieces, one piece after the other."""
    values: list[float] = []
    for piece in pieces:
        values.extend(getattr(piece, column))
    return np.array(values, dtype)


def _stage_table(pieces: Sequence[QueryColumns], query_of_stage: Array) -> Array:
    num_calls = _joined(pieces, "num_calls", np.int64)
    num_children = _joined(pieces, "num_children", np.int64)
    stages = np.zeros(len(query_of_stage), dtype_of(StageState))
    stages["ready_s"] = stages["t_slo_s"] = np.nan
    for column in ("expected_s", "remaining_s", "think_s"):
        stages[column] = _joined(pieces, column, np.float64)
    stages["query"] = query_of_stage
    stages["num_calls"] = stages["calls_left"] = num_calls
    stages["first_call"] = _starts(num_calls)
    stages["parents_left"] = _joined(pieces, "num_parents", np.int64)
    stages["num_children"] = num_children
    stages["first_child"] = _starts(num_children)
    return stages


def _call_table(pieces: Sequence[QueryColumns]) -> Array:
    input_tokens = _joined(pieces, "input_tokens", np.int64)
    calls = np.zeros(len(input_tokens), dtype_of(CallState))
    calls["input_tokens"] = input_tokens
    calls["output_tokens"] = _joined(pieces, "output_tokens", np.int64)
    calls["chain"] = calls["prev"] = calls["next"] = -1
    for name in ("started_s", "first_token_s", "end_s"):
        calls[name] = np.nan
    return calls


def _models_of(queries: Sequence[TraceQuery]) -> set[str]:
    models = {query.model for query in queries}
    seen: set[int] = set()
    for query in queries:
        if id(query.stages) not in seen:
            seen.add(id(query.stages))
            models.update(call.model for stage in query.stages for call in stage.calls)
    return models - {""}


def _members_of(model: str, fleet: Sequence[InstanceSpec]) -> list[InstanceSpec]:
    return [spec for spec in fleet if model == spec.model or model in spec.adapters]


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
