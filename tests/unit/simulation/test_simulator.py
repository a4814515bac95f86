"""Runs over a whole fleet: determinism, what settings do, what is refused."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest

from shared.domain.instance import LatencyModel
from shared.domain.trace import PrefixPart, TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError
from shared.scheduling.dispatch import text_key
from shared.scheduling.policies import REGISTRY
from shared.scheduling.policies.flow import HexgenFlow
from shared.scheduling.policies.round_robin import RoundRobinFcfs
from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall
from shared.scheduling.shapes import shape_from_trace
from shared.simulation.asking import PolicyDesk
from shared.simulation.fleet_kernel import ASKS
from shared.simulation.fleets import builtin_fleet
from shared.simulation.interpreted import InterpretedCore
from shared.simulation.layout import Layout
from shared.simulation.rules import ASK_POLICY, BY_ANSWER, COMPILED_RULES
from shared.simulation.scenario import Scenario
from shared.simulation.simulator import simulate, sweep, sweep_alpha
from shared.simulation.workload import PoissonArrivals, generate, prepare
from tests.support.simulated_queries import make_query, make_spec


def replace(scenario: Scenario, **changes: object) -> Scenario:
    """A scenario with some settings changed."""
    return msgspec.structs.replace(scenario, **changes)


@pytest.fixture(scope="module")
def busy() -> Scenario:
    """Forty Text-to-SQL queries on hetero-1 near its capacity."""
    rng = np.random.default_rng(7)
    fleet = builtin_fleet("hetero-1")
    queries = prepare(generate(40, rng), fleet, PoissonArrivals(0.3), None, rng)
    return Scenario(queries=queries, fleet=fleet, shapes=shape_from_trace(queries))


@pytest.mark.parametrize("policy", sorted(REGISTRY))
def test_invariants_hold_under_every_policy(busy: Scenario, policy: str) -> None:
    """Conservation, causality, work conservation and Little's law, whatever the policy."""
    result = simulate(replace(busy, policy=policy))
    result.check()
    assert result.is_completed.all()
    assert 0.0 < result.summary().attainment <= 1.0


@pytest.mark.parametrize("policy", sorted(COMPILED_RULES))
def test_compiled_and_interpreted_runs_are_the_same_bytes(busy: Scenario, policy: str) -> None:
    """One source, two ways to run it."""
    scenario = replace(busy, policy=policy, hop_s=0.01, state_delay_s=0.5, num_dispatchers=2)
    compiled = simulate(scenario, core="compiled")
    assert compiled.to_bytes() == simulate(scenario, core="interpreted").to_bytes()
    assert compiled.to_bytes() == simulate(scenario, core="compiled").to_bytes()


@pytest.mark.parametrize("policy", sorted(COMPILED_RULES))
def test_compiled_rules_decide_as_the_policy_objects_do(busy: Scenario, policy: str) -> None:
    """The dispatcher's policy and the simulator's rule choose the same, call by call, ties too."""
    mesh = {"num_dispatchers": 2, "state_delay_s": 0.5, "hop_s": 0.01}
    scenario = replace(busy, policy=policy, alpha=0.3, **mesh)
    asked = decisions(scenario, (ASK_POLICY, BY_ANSWER))
    ruled = decisions(scenario, COMPILED_RULES[policy])
    assert [column.tobytes() for column in asked] == [column.tobytes() for column in ruled]


def decisions(scenario: Scenario, rules: tuple[int, int]) -> list[np.ndarray]:
    """Where every call ran, its place in line and its end, with ties broken by request id."""
    layout = Layout(scenario)
    layout.arrays["plans"]["tie_key"] = [
        text_key(f"{query.query_id}/{index}/{sibling}")
        for query in scenario.queries
        for index, stage in enumerate(query.stages)
        for sibling in range(len(stage.calls))
    ]
    tables = layout.tables_for(scenario, *rules)
    core = InterpretedCore(tables)
    desk = PolicyDesk(layout, scenario, core)
    while core.proceed() == ASKS:
        desk.answer_pending()
    return [tables["plans"]["instance"], tables["calls"]["priority"], tables["calls"]["end_s"]]


def test_asking_works_with_compiled_code(busy: Scenario) -> None:
    """A policy that is not compiled runs on the compiled event loop, with the same result."""
    scenario = replace(busy, policy="vllm")
    compiled = simulate(scenario, core="compiled", ask_policy=True)
    assert compiled.to_bytes() == simulate(scenario, core="interpreted").to_bytes()


def test_sweep_gives_what_single_runs_give(busy: Scenario) -> None:
    """A sweep shares the layout and nothing else."""
    alphas = [0.0, 0.1, 1.0]
    swept = sweep_alpha(busy, alphas)
    single = [simulate(replace(busy, alpha=alpha)) for alpha in alphas]
    assert [run.to_bytes() for run in swept] == [run.to_bytes() for run in single]
    assert [run.alpha for run in swept] == alphas
    assert len({run.to_bytes() for run in swept}) > 1
    assert sweep([]) == []


def test_sweep_lays_out_anew_what_differs(busy: Scenario) -> None:
    """Scenarios of a sweep may differ in anything."""
    few = replace(busy, queries=busy.queries[:5])
    scenarios = [busy, replace(busy, admission=2), few, replace(few, oracle=True), few]
    swept = sweep(scenarios)
    assert [run.to_bytes() for run in swept] == [simulate(s).to_bytes() for s in scenarios]


def test_fleet_order_is_the_callers() -> None:
    """Results per instance come in the order in which the fleet was given."""
    fast, slow = make_spec("z-fast"), make_spec("a-slow", kv_tokens=4_000)
    query = make_query(0, [[(10_000, 5)]])
    for fleet in [(fast, slow), (slow, fast)]:
        result = simulate(Scenario(queries=(query,), fleet=fleet))
        assert fleet[int(result.call_instance[0])].instance_id == "z-fast"
        assert result.num_calls.tolist() == [int(spec is fast) for spec in fleet]
        assert (result.busy_s > 0).tolist() == [spec is fast for spec in fleet]


def test_order_of_queries_does_not_matter() -> None:
    """Arrival times decide, not the place in the list; results keep the list's order."""
    queries = [make_query(n, [[(500, 40)]], arrival_s=0.1 * n) for n in range(8)]
    plain = simulate(Scenario(queries=tuple(queries), fleet=(make_spec(),)))
    turned = simulate(Scenario(queries=tuple(reversed(queries)), fleet=(make_spec(),)))
    assert turned.end_s.tolist() == plain.end_s[::-1].tolist()


def test_stages_follow_each_other_and_think_times_count() -> None:
    """A stage starts when the one before has ended and its think time has passed."""
    query = make_query(0, [[(100, 3)], [(200, 5), (300, 1)]], arrival_s=4.0, think_s=2.0)
    result = simulate(Scenario(queries=(query,), fleet=(make_spec(),)))
    assert result.ready_s.tolist() == pytest.approx(
        [6.0, result.call_end_s[0] + 2.0, result.call_end_s[0] + 2.0]
    )
    assert result.end_s[0] == result.call_end_s[1:].max()
    assert result.call_stage.tolist() == [0, 1, 1]


def test_graph_of_stages() -> None:
    """A stage waits for all its parents; stages without parents start at once."""
    call = (TraceCall(input_tokens=100, output_tokens=50),)
    stages = (
        TraceStage(stage="a", calls=call),
        TraceStage(stage="b", calls=(TraceCall(input_tokens=9, output_tokens=9),), parents=()),
        TraceStage(stage="c", calls=call, parents=(0, 1, 1)),
    )
    query = TraceQuery(query_id="q", stages=stages, arrival_s=1.0, slo_s=9.0)
    result = simulate(Scenario(queries=(query,), fleet=(make_spec(),)))
    assert result.ready_s[:2].tolist() == [1.0, 1.0]
    assert result.ready_s[2] == result.call_end_s[:2].max()


def test_messages_take_their_time() -> None:
    """Three hops lie between a ready call and its known result."""
    query = make_query(0, [[(100, 3)], [(100, 3)]])
    plain = simulate(Scenario(queries=(query,), fleet=(make_spec(),)))
    hops = simulate(Scenario(queries=(query,), fleet=(make_spec(),), hop_s=0.5))
    assert hops.end_s[0] == pytest.approx(plain.end_s[0] + 6 * 0.5)
    assert hops.started_s[0] == pytest.approx(1.0)


def test_stale_state_misleads_the_dispatcher() -> None:
    """With one dispatcher and old state, ended calls still count; placement changes."""
    fleet = (make_spec("a"), make_spec("b"))
    queries = tuple(make_query(n, [[(2_000, 10)]], arrival_s=1.5 * n) for n in range(12))
    fresh = simulate(Scenario(queries=queries, fleet=fleet))
    stale = simulate(Scenario(queries=queries, fleet=fleet, state_delay_s=3.0))
    assert fresh.call_instance.tolist() != stale.call_instance.tolist()


def test_two_dispatchers_with_stale_state_herd() -> None:
    """Each believes the fast instance idle that the other has just loaded."""
    fleet = (make_spec("fast"), make_spec("slow"))
    queries = tuple(make_query(n, [[(2_000, 100)]], arrival_s=0.001 * n) for n in range(2))
    scenario = Scenario(
        queries=queries, fleet=fleet, alpha=0.001, speed_factors={"slow": 1.5}, oracle=True
    )
    assert simulate(scenario).call_instance.tolist() != [0, 0]
    stale = replace(scenario, num_dispatchers=2, state_delay_s=1.0)
    choices = simulate(stale).call_instance
    assert choices[0] == choices[1]


def test_admission_limits_what_the_engine_holds() -> None:
    """Calls beyond the limit wait in the line, where urgency orders them."""
    queries = tuple(make_query(n, [[(10, 50)]], arrival_s=0.01 * n) for n in range(4))
    result = simulate(Scenario(queries=queries, fleet=(make_spec(),), admission=1))
    assert (result.started_s[1:] >= result.call_end_s[:-1]).all()


def test_urgent_queries_overtake_under_urgency_and_not_under_fcfs() -> None:
    """The line's order is the policy's."""
    slos = [500.0, 400.0, 300.0, 5.0]
    queries = tuple(
        make_query(n, [[(4_000, 50)]], arrival_s=0.01 * n, slo_s=slo) for n, slo in enumerate(slos)
    )
    scenario = Scenario(queries=queries, fleet=(make_spec(),), admission=1)
    urgent = simulate(scenario)
    assert np.argsort(urgent.started_s).tolist() == [0, 3, 2, 1]
    in_order = simulate(replace(scenario, policy="wb+fcfs"))
    assert np.argsort(in_order.started_s).tolist() == [0, 1, 2, 3]


def test_speed_factor_slows_the_instance_and_what_is_expected_of_it() -> None:
    """Real and expected times stretch alike."""
    query = make_query(0, [[(3_000, 30)]])
    plain = simulate(Scenario(queries=(query,), fleet=(make_spec(),), oracle=True))
    slow = simulate(
        Scenario(queries=(query,), fleet=(make_spec(),), oracle=True, speed_factors={"i0": 2.0})
    )
    assert slow.end_s[0] == pytest.approx(2 * plain.end_s[0])
    assert slow.t_comp_s[0] == pytest.approx(slow.end_s[0])


def test_models_have_their_own_instances() -> None:
    """A call goes only where its model is offered, be it the query's, its own or an adapter."""
    fleet = (make_spec("base", model="m"), make_spec("lora", model="n", adapters=("tuned",)))
    calls = tuple(
        TraceCall(input_tokens=10, output_tokens=2, model=model) for model in ("", "n", "tuned")
    )
    query = TraceQuery(
        query_id="q",
        model="m",
        stages=(TraceStage(stage="s", calls=calls),),
        arrival_s=0.0,
        slo_s=1.0,
    )
    assert simulate(Scenario(queries=(query,), fleet=fleet)).call_instance.tolist() == [0, 1, 1]


def test_long_calls_go_only_where_they_fit() -> None:
    """Context and memory decide who is eligible."""
    fleet = (make_spec("small", kv_tokens=2_000), make_spec("large"))
    queries = tuple(make_query(n, [[(3_000, 10)]], arrival_s=float(n)) for n in range(5))
    result = simulate(Scenario(queries=queries, fleet=fleet, policy="vllm"))
    assert set(result.call_instance.tolist()) == {1}


def test_siblings_find_their_template_warm() -> None:
    """The second sibling computes only what it does not share."""
    prefix = (PrefixPart("template", 8_000),)
    calls = tuple(TraceCall(input_tokens=9_000, output_tokens=5, prefix=prefix) for _ in range(2))
    query = TraceQuery(
        query_id="q", stages=(TraceStage(stage="s", calls=calls),), arrival_s=0.0, slo_s=60.0
    )
    result = simulate(Scenario(queries=(query,), fleet=(make_spec(),)))
    assert result.cached_tokens.tolist() == [0, 8_000]
    # And the dispatcher expects it: the second costs less.
    assert result.t_comp_s[1] < result.t_comp_s[0]


def test_oracle_knows_lengths() -> None:
    """Only the oracle's expected costs follow the true output length."""
    queries = tuple(make_query(n, [[(100, 10 + 400 * n)]], arrival_s=99.0 * n) for n in range(2))
    scenario = Scenario(queries=queries, fleet=(make_spec(),), shapes=shape_from_trace(queries))
    blind, knowing = simulate(scenario), simulate(replace(scenario, oracle=True))
    assert blind.t_comp_s[0] == blind.t_comp_s[1]
    assert knowing.t_comp_s.tolist() == pytest.approx(knowing.end_s - knowing.arrival_s)


class RefusesLongCalls(RoundRobinFcfs):
    """Refuses calls of more than 1,000 tokens."""

    def admit(
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],  # noqa: ARG002
        now_s: float,  # noqa: ARG002
    ) -> str | None:
        """Refuse or let in."""
        return "too_long" if call.input_tokens > 1_000 else None


class WaitsForAnIdleInstance(HexgenFlow):
    """Binds calls late: only to an instance that has nothing."""

    def choose(  # type: ignore[override]
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],
        now_s: float,
    ) -> Choice | None:
        """Return an idle instance or None."""
        idle = [view for view in views if view.num_outstanding == 0]
        return super().choose(call, idle, costs, now_s) if idle else None


def test_refused_calls_end_their_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused query ends at once, unanswered; its later stages never start."""
    monkeypatch.setitem(REGISTRY, "picky", lambda _alpha: RefusesLongCalls())
    queries = (make_query(0, [[(10, 2)], [(2_000, 2)], [(10, 2)]]), make_query(1, [[(10, 2)]]))
    result = simulate(Scenario(queries=queries, fleet=(make_spec(),), policy="picky"))
    result.check()
    assert result.is_completed.tolist() == [False, True]
    assert result.end_s[0] == result.ready_s[1]
    assert np.isnan(result.ready_s[2])
    assert result.summary().attainment == 0.5


def test_calls_may_stay_unassigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may keep calls and is asked again whenever something has changed."""
    monkeypatch.setitem(REGISTRY, "late", WaitsForAnIdleInstance)
    queries = tuple(make_query(n, [[(500, 20)]], arrival_s=0.01 * n) for n in range(5))
    fleet = (make_spec("a"), make_spec("b"))
    result = simulate(Scenario(queries=queries, fleet=fleet, policy="late"))
    result.check()
    assert result.is_completed.all()
    assert (result.dispatched_s[2:] >= result.call_end_s[:3].min()).all()


CALL = (TraceCall(input_tokens=10, output_tokens=1),)


def one_query(**changes: object) -> TraceQuery:
    """A valid query with something changed."""
    fields = {
        "query_id": "q7",
        "stages": (TraceStage(stage="s", calls=CALL),),
        "arrival_s": 0.0,
        "slo_s": 1.0,
    }
    return TraceQuery(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"arrival_s": None}, "q7.*arrival_s"),
        ({"arrival_s": -1.0}, "q7.*arrival_s"),
        ({"arrival_s": float("nan")}, "q7.*arrival_s"),
        ({"slo_s": None}, "q7.*slo_s"),
        ({"slo_s": 0.0}, "q7.*slo_s"),
        ({"model": "unknown"}, "q7.*stage 0.*call 0.*unknown"),
        ({"stages": ()}, "q7.*no stages"),
        ({"stages": (TraceStage(stage="s", calls=()),)}, "q7.*stage 0.*no calls"),
        ({"stages": (TraceStage(stage="s", calls=CALL, think_s=-1.0),)}, "q7.*stage 0.*think_s"),
        ({"stages": (TraceStage(stage="s", calls=CALL, parents=(0,)),)}, "q7.*stage 0.*parents"),
        (
            {
                "stages": (
                    TraceStage(stage="s", calls=(TraceCall(input_tokens=0, output_tokens=1),)),
                )
            },
            "q7.*stage 0 .s.*call 0",
        ),
        (
            {
                "stages": (
                    TraceStage(
                        stage="s", calls=(*CALL, TraceCall(input_tokens=99_000, output_tokens=1))
                    ),
                )
            },
            "q7.*call 1.*99000.*no instance",
        ),
        (
            {
                "stages": (
                    TraceStage(
                        stage="s",
                        calls=(
                            TraceCall(
                                input_tokens=9, output_tokens=1, prefix=(PrefixPart("p", 0),)
                            ),
                        ),
                    ),
                )
            },
            "q7.*call 0.*prefix",
        ),
    ],
)
def test_bad_queries_are_refused_with_their_place(changes: dict[str, object], place: str) -> None:
    """The error names the query, the stage and the call."""
    with pytest.raises(ConfigError, match=place):
        simulate(Scenario(queries=(one_query(**changes),), fleet=(make_spec(),)))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"alpha": 1.5}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"fleet": ()}, "fleet is empty"),
        ({"fleet": (make_spec(), make_spec())}, "same id"),
        ({"queries": ()}, "no queries"),
        ({"num_dispatchers": 0}, "num_dispatchers"),
        ({"state_delay_s": -0.1}, "state_delay_s"),
        ({"hop_s": float("inf")}, "hop_s"),
        ({"admission": 0}, "admission"),
        ({"look_past": -1}, "look_past"),
        ({"speed_factors": {"i0": 0.0}}, "speed factor.*i0"),
        ({"fleet": (make_spec(kv_tokens=3),)}, "kv_tokens"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], fault: str) -> None:
    """The error names the setting."""
    scenario = Scenario(queries=(one_query(),), fleet=(make_spec(),))
    with pytest.raises(ConfigError, match=fault):
        simulate(replace(scenario, **changes))


def test_an_idle_engine_may_begin_with_the_first_call_alone() -> None:
    """Of two calls of one instant the more urgent runs alone first; the other joins after it."""
    latency = LatencyModel(prefill_s_per_token=0.001, weights_s=0.1)
    spec = make_spec(latency=latency)
    stage = TraceStage(
        stage="both",
        calls=(
            TraceCall(input_tokens=200, output_tokens=1),
            TraceCall(input_tokens=400, output_tokens=1),
        ),
    )
    query = TraceQuery(query_id="q", stages=(stage,), arrival_s=0.0, slo_s=100.0)
    together = simulate(Scenario(queries=(query,), fleet=(spec,)))
    apart = simulate(Scenario(queries=(query,), fleet=(spec,), one_by_one=True))
    assert together.call_end_s.tolist() == pytest.approx([0.6, 0.6])
    assert apart.call_end_s.tolist() == pytest.approx([0.6, 0.4])


def test_a_busy_engine_may_go_on_before_it_is_given_more() -> None:
    """Two decode, a third waits: when one ends, the other's next step of 1 s comes first.

    The third's prompt then takes 0.5 s more than a step, in which the other's last token comes too.
    """
    latency = LatencyModel(prefill_s_per_token=0.001, weights_s=1.0)
    spec = make_spec(latency=latency, max_num_seqs=2)
    lengths = ((100, 9), (100, 2), (1_500, 1))
    calls = tuple(TraceCall(input_tokens=i, output_tokens=o) for i, o in lengths)
    queries = tuple(
        TraceQuery(
            query_id=f"q{index}",
            stages=(TraceStage(stage="s", calls=(call,)),),
            arrival_s=0.001 * index,
            slo_s=100.0,
        )
        for index, call in enumerate(calls)
    )
    plain = simulate(Scenario(queries=queries, fleet=(spec,), policy="wb+fcfs"))
    real = simulate(Scenario(queries=queries, fleet=(spec,), policy="wb+fcfs", one_by_one=True))
    assert plain.call_end_s.tolist() == pytest.approx([9.5, 3.0, 4.5])
    assert real.call_end_s.tolist() == pytest.approx([9.5, 3.0, 5.5])
