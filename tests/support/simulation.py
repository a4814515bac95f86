"""Random small scenarios, and runs of them on the fast and on the reference simulator."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.domain.profile import StageEstimate, WorkflowShape
from shared.domain.trace import PrefixPart, TraceCall, TraceQuery, TraceStage
from shared.simulation.asking import Core
from shared.simulation.changes import Changer
from shared.simulation.compiled import CompiledCore
from shared.simulation.fleet_kernel import DONE, PAUSES
from shared.simulation.interpreted import InterpretedCore
from shared.simulation.layout import Layout
from shared.simulation.rules import COMPILED_RULES
from shared.simulation.scenario import Change, Scenario
from tests.support import reference_simulator as ref

TICK_S = 1 / 1024
# What the reference simulator knows; other rules are compared with the policies themselves.
REFERENCE_POLICIES = (
    "edf",
    "hexgen-flow",
    "least-outstanding",
    "llf",
    "rr+pq",
    "vllm",
    "wb+fcfs",
)
PARTS = (("a", 1), ("a", 3), ("b", 4), ("c", 7), ("d", 8), ("e", 17))


def ticks(most: int, least: int = 0) -> st.SearchStrategy[float]:
    """Durations whose sums are exact in floating point."""
    return st.integers(least, most).map(lambda count: count * TICK_S)


@st.composite
def trace_calls(draw: st.DrawFn, longest: int, models: list[str]) -> TraceCall:
    """A call whose prompt holds some shared parts."""
    chain = tuple(PrefixPart(*part) for part in draw(st.lists(st.sampled_from(PARTS), max_size=3)))
    shared = sum(part.tokens for part in chain)
    output = draw(st.integers(1, 12))
    low = min(max(1, shared), longest - output)
    return TraceCall(
        input_tokens=draw(st.integers(low, max(low, min(longest - output, low + 20)))),
        output_tokens=output,
        prefix=chain,
        model=draw(st.sampled_from(["", *models])),
    )


@st.composite
def trace_queries(draw: st.DrawFn, number: int, longest: int, models: list[str]) -> TraceQuery:
    """A query: a chain or a small graph of stages."""
    stages = []
    for index in range(draw(st.integers(1, 4))):
        parents = None
        if draw(st.booleans()) and index:
            parents = tuple(draw(st.lists(st.integers(0, index - 1), max_size=2)))
        stages.append(
            TraceStage(
                stage=draw(st.sampled_from(["x", "y"])),
                calls=tuple(draw(st.lists(trace_calls(longest, models), min_size=1, max_size=3))),
                think_s=draw(st.one_of(st.just(0.0), ticks(64))),
                parents=parents,
            )
        )
    return TraceQuery(
        query_id=f"q{number}",
        workflow="w",
        model=draw(st.sampled_from(models)),
        stages=tuple(stages),
        arrival_s=draw(ticks(600)),
        slo_s=draw(ticks(900, 1)),
    )


@st.composite
def instance_specs(draw: st.DrawFn, number: int, models: list[str]) -> InstanceSpec:
    """An instance with little memory and small batches, so that every rule comes into play."""
    block = draw(st.sampled_from([1, 2, 4, 16]))
    seqs = draw(st.integers(1, 5))
    return InstanceSpec(
        instance_id=f"i{number}",
        gpu="test",
        model=models[number % len(models)],
        max_context_tokens=draw(st.sampled_from([60, 1_000])),
        max_num_seqs=seqs,
        max_batched_tokens=draw(st.integers(seqs, 40)),
        kv_tokens=draw(st.integers(60, 150)) + block,
        block_tokens=block,
        prefix_caching=draw(st.booleans()),
        latency=LatencyModel(
            prefill_s_per_token=draw(ticks(8)) / 4,
            weights_s=draw(ticks(16, 1)),
            overhead_s=draw(ticks(4)),
            seq_s=draw(ticks(4)) / 4,
            kv_s_per_token=draw(ticks(4)) / 64,
            chunk_waste_tokens=draw(st.integers(0, 4)),
            attention_s_per_pair=draw(st.sampled_from([0.0, 0.0, TICK_S / 64])),
            pair_s=draw(st.sampled_from([0.0, TICK_S / 2])),
            trio_s=draw(st.sampled_from([0.0, TICK_S])),
            batched_s=draw(st.sampled_from([0.0, TICK_S])),
            joined_s=draw(st.sampled_from([0.0, TICK_S / 4])),
        ),
    )


def workflow_shape(draw: st.DrawFn) -> WorkflowShape:
    """What is expected of the workflow."""
    estimates = {
        name: StageEstimate(
            input_tokens=draw(st.integers(1, 40)), output_tokens=draw(st.integers(1, 12))
        )
        for name in ("x", "y")
    }
    return WorkflowShape(
        workflow="w", stages=estimates, remaining={"x/0": {"y": 1.5}, "y/0": {"x": 0.5}}
    )


def factors(draw: st.DrawFn, fleet: tuple[InstanceSpec, ...], *values: float) -> dict[str, float]:
    """A factor for some of the instances."""
    drawn = {spec.instance_id: draw(st.sampled_from([None, *values])) for spec in fleet}
    return {key: value for key, value in drawn.items() if value is not None}


@st.composite
def changes(draw: st.DrawFn, fleet: tuple[InstanceSpec, ...]) -> Change:
    """A change of some things at a time at which something else may happen."""

    def maybe(*values: float) -> dict[str, float] | None:
        return factors(draw, fleet, *values) if draw(st.booleans()) else None

    return Change(
        at_s=draw(ticks(900)),
        alpha=draw(st.sampled_from([None, 0.0, 0.25, 1.0])),
        shapes={"w": workflow_shape(draw)} if draw(st.booleans()) else None,
        believed_factors=maybe(0.5, 1.0, 4.0),
        hit_factors=maybe(0.0, 0.5, 1.0),
        speed_factors=maybe(0.5, 1.0, 2.0),
        cold=tuple(factors(draw, fleet, 1.0)) if draw(st.booleans()) else None,
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """A small run in which all sums of durations are exact."""
    models = ["m", "n"] if draw(st.integers(0, 4)) == 0 else ["m"]
    count = draw(st.integers(len(models), 3))
    fleet = tuple(draw(instance_specs(number, models)) for number in range(count))
    longest = min(59, *(spec.max_context_tokens for spec in fleet))
    queries = tuple(
        draw(trace_queries(number, longest, models)) for number in range(draw(st.integers(1, 6)))
    )
    is_misled = draw(st.booleans())
    return Scenario(
        queries=queries,
        fleet=fleet,
        policy=draw(st.sampled_from(REFERENCE_POLICIES)),
        alpha=draw(st.sampled_from([0.0, 0.125, 0.5, 1.0])),
        shapes={"w": workflow_shape(draw)},
        oracle=draw(st.booleans()),
        num_dispatchers=draw(st.integers(1, 2)),
        state_delay_s=draw(st.one_of(st.just(0.0), ticks(100))),
        hop_s=draw(st.one_of(st.just(0.0), ticks(20))),
        admission=draw(st.one_of(st.none(), st.integers(1, 3))),
        look_past=draw(st.integers(0, 3)),
        one_by_one=draw(st.booleans()),
        speed_factors=factors(draw, fleet, 0.5, 2.0) if is_misled else {},
        believed_factors=factors(draw, fleet, 0.5, 4.0) if is_misled else None,
        hit_factors=factors(draw, fleet, 0.0, 0.5) if is_misled else {},
        cold=tuple(factors(draw, fleet, 1.0)) if is_misled else (),
        changes=tuple(sorted(draw(st.lists(changes(fleet), max_size=3)), key=_at_s)),
    )


def _at_s(change: Change) -> float:
    return change.at_s


def lay_out(scenario: Scenario) -> tuple[Layout, dict[str, Any]]:
    """Return a layout and fresh tables of a run."""
    layout = Layout(scenario)
    return layout, layout.tables_for(scenario, *COMPILED_RULES[scenario.policy])


def run_fast(scenario: Scenario) -> dict[str, Any]:
    """Run interpreted; returns the tables as the run left them."""
    layout, tables = lay_out(scenario)
    _run_through(layout, scenario, InterpretedCore(tables))
    return tables


def run_compiled(scenario: Scenario) -> dict[str, Any]:
    """Run compiled; returns the tables as the run left them."""
    layout, tables = lay_out(scenario)
    _run_through(layout, scenario, CompiledCore(tables))
    return tables


def _run_through(layout: Layout, scenario: Scenario, core: Core) -> None:
    changer = Changer(layout, scenario, core, None)
    while (status := core.proceed()) != DONE:
        assert status == PAUSES
        changer.make_next()


def run_reference(scenario: Scenario) -> ref.Fleet:
    """Run on the reference simulator, with the same predictions."""
    layout, tables = lay_out(scenario)
    instances = [
        _instance(number, spec, scenario, int(tables["lines"]["tie_key"][number]))
        for number, spec in enumerate(layout.fleet)
    ]
    stages: list[ref.Stage] = []
    calls: list[ref.Call] = []
    queries: list[ref.Query] = []
    for number, query in enumerate(scenario.queries):
        first = len(stages)
        for index, stage in enumerate(query.stages):
            parents = stage.parents
            if parents is None:
                parents = (index - 1,) if index else ()
            record = tables["stages"][len(stages)]
            own = range(len(calls), len(calls) + len(stage.calls))
            stages.append(
                ref.Stage(
                    query=number,
                    calls=list(own),
                    parents=tuple(first + parent for parent in parents),
                    think=stage.think_s,
                    expected=float(record["expected_s"]),
                    remaining=float(record["remaining_s"]),
                )
            )
            for call in stage.calls:
                plan = tables["plans"][len(calls)]
                calls.append(
                    ref.Call(
                        number=len(calls),
                        stage=len(stages) - 1,
                        tokens_in=call.input_tokens,
                        tokens_out=call.output_tokens,
                        prefix=tuple((part.prefix_id, part.tokens) for part in call.prefix),
                        predicted=float(plan["predicted_tokens"]),
                        tie_key=int(plan["tie_key"]),
                        model=call.model or query.model,
                    )
                )
        assert query.arrival_s is not None
        assert query.slo_s is not None
        queries.append(
            ref.Query(
                arrival=query.arrival_s,
                slo=query.slo_s,
                stages=list(range(first, len(stages))),
            )
        )
    fleet = ref.Fleet(
        queries=queries,
        stages=stages,
        calls=calls,
        instances=instances,
        policy=scenario.policy,
        alpha=scenario.alpha,
        num_dispatchers=scenario.num_dispatchers,
        hop=scenario.hop_s,
        delay=scenario.state_delay_s,
        changes=_reference_changes(scenario, layout),
        one_by_one=scenario.one_by_one,
    )
    fleet.run()
    return fleet


def _reference_changes(scenario: Scenario, layout: Layout) -> list[ref.Change]:
    believed, hits, shapes = dict(scenario.believed), dict(scenario.hit_factors), scenario.shapes
    found = []
    for change in scenario.changes:
        believed |= change.believed_factors or {}
        hits |= change.hit_factors or {}
        shapes = change.shapes or shapes
        expected = layout.expected(shapes, believed)
        real = change.speed_factors
        columns = {
            name: expected[place].tolist() if place in expected else None
            for name, place in (
                ("expected", ("stages", "expected_s")),
                ("remaining", ("stages", "remaining_s")),
                ("predicted", ("plans", "predicted_tokens")),
            )
        }
        found.append(
            ref.Change(
                at=change.at_s,
                alpha=change.alpha,
                believed=[_speed(spec, believed) for spec in layout.fleet],
                hits=[hits.get(spec.instance_id, 1.0) for spec in layout.fleet],
                reuses=None if change.cold is None else layout.reuses(change.cold),
                speeds=None if real is None else [_speed(spec, real) for spec in layout.fleet],
                **columns,
            )
        )
    return found


def _speed(spec: InstanceSpec, factors_by_id: Mapping[str, float]) -> ref.Speed:
    model, factor = spec.latency, factors_by_id.get(spec.instance_id, 1.0)
    return ref.Speed(
        overhead=model.overhead_s * factor,
        weights=model.weights_s * factor,
        prefill=model.prefill_s_per_token * factor,
        seq=model.seq_s * factor,
        kv=model.kv_s_per_token * factor,
        waste=model.chunk_waste_tokens,
        attention=model.attention_s_per_pair * factor,
        pair=model.pair_s * factor,
        trio=model.trio_s * factor,
        batched=model.batched_s * factor,
        joined=model.joined_s * factor,
    )


def _instance(number: int, spec: InstanceSpec, scenario: Scenario, tie_key: int) -> ref.Instance:
    blocks = spec.kv_tokens // spec.block_tokens
    return ref.Instance(
        number,
        spec.model,
        _speed(spec, scenario.speed_factors),
        max_seqs=spec.max_num_seqs,
        budget=spec.max_batched_tokens,
        block=spec.block_tokens,
        blocks=blocks,
        limit=min(spec.max_context_tokens, blocks * spec.block_tokens + 1),
        caches=spec.prefix_caching,
        reuses=spec.prefix_caching and spec.instance_id not in scenario.cold,
        hits=scenario.hit_factors.get(spec.instance_id, 1.0),
        believed=_speed(spec, scenario.believed),
        admission=spec.max_num_seqs if scenario.admission is None else scenario.admission,
        look_past=scenario.look_past,
        tie_key=tie_key,
    )


def assert_same_run(tables: dict[str, Any], fleet: ref.Fleet, tolerance_s: float = 1e-9) -> None:
    """Compare everything the two runs decided and when it happened."""
    calls, plans, stages = tables["calls"], tables["plans"], tables["stages"]

    def exact(name: str, fast: Any, slow: list[Any]) -> None:
        assert fast.tolist() == slow, name

    def close(name: str, fast: Any, slow: list[float]) -> None:
        np.testing.assert_allclose(fast, slow, rtol=0, atol=tolerance_s, err_msg=name)

    exact("instance", plans["instance"], [call.instance for call in fleet.calls])
    exact("order of delivery", calls["order"], [call.order for call in fleet.calls])
    exact("order of admission", calls["admitted"], [call.admitted for call in fleet.calls])
    exact("cached tokens", calls["cached_tokens"], [call.cached for call in fleet.calls])
    exact(
        "preemptions",
        tables["engines"]["num_preemptions"],
        [instance.num_preemptions for instance in fleet.instances],
    )
    close("ready", stages["ready_s"], [stage.ready for stage in fleet.stages])
    close("assigned", plans["assigned_s"], [call.assigned for call in fleet.calls])
    close("cost", plans["t_comp_s"], [call.cost for call in fleet.calls])
    close("score", calls["priority"], [call.score for call in fleet.calls])
    close("started", calls["started_s"], [call.started for call in fleet.calls])
    close("first token", calls["first_token_s"], [call.first_token for call in fleet.calls])
    close("end", calls["end_s"], [call.end for call in fleet.calls])
    close("query end", tables["queries"]["end_s"], [query.end for query in fleet.queries])
    close("busy", tables["engines"]["busy_s"], [instance.busy for instance in fleet.instances])
