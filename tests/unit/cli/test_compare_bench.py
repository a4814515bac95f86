"""Workloads the lab draws, and the runs it measures."""

import numpy as np
import pytest

from services.cli.lab.bench import (
    STEP_PHASE_QUERIES,
    Workbench,
    arrival_process,
    arrival_times_s,
    draw_order,
    draw_tenants,
    with_budget,
)
from services.cli.lab.setting import Variant
from shared.errors import ConfigError
from shared.simulation.workload import StepArrivals, isolated_s
from tests.support.lab import FLEETS, TRACE, cell, job, setup

VLLM = Variant(policy="vllm")
FLOW = Variant(policy="hexgen-flow", alpha=0.1)


def test_a_trace_is_asked_in_shuffled_rounds():
    """Every stretch as long as the trace holds each of its queries once."""
    order = draw_order(10, 25, seed=3)
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert len(set(order[20:])) == 5
    assert draw_order(10, 25, seed=3) == order != draw_order(10, 25, seed=4)


def test_without_a_number_the_trace_is_asked_once_as_it_is():
    """Order and number are the trace's."""
    assert draw_order(4, None, seed=1) == [0, 1, 2, 3]


@pytest.mark.parametrize("arrivals", ["poisson", "bursty", "step", "gamma:3"])
def test_the_mean_rate_of_a_run_is_the_one_asked_for(arrivals: str):
    """Chance moves single arrivals, never the load."""
    times = arrival_times_s(arrivals, 0.4, TRACE * 20, np.random.default_rng(1))
    assert len(times) / times[-1] == pytest.approx(0.4)
    assert times == sorted(times)


def test_steps_alternate_around_the_mean():
    """Phases of equal length at 60% and 140% of the rate, as many as the queries need."""
    arrivals = arrival_process("step", 0.5, TRACE * 40)
    assert isinstance(arrivals, StepArrivals)
    rates, spans_s = zip(*arrivals.phases, strict=True)
    assert rates[:2] == pytest.approx((0.3, 0.7))
    assert set(rates) == set(rates[:2])
    assert set(spans_s) == {2.0 * STEP_PHASE_QUERIES}
    assert sum(rate * span_s for rate, span_s in arrivals.phases) >= len(TRACE * 40)


def test_a_seed_is_the_same_workload_under_any_rate_fleet_and_policy():
    """Queries, tenants and the shape of the arrivals do not change with what is compared."""
    bench = Workbench(setup())
    slow, _ = bench.workload(job(FLOW, rate_qps=0.1))
    fast, _ = bench.workload(job(VLLM, rate_qps=0.2, fleet="homogeneous"))
    assert [query.query_id for query in slow] == [query.query_id for query in fast]
    assert [query.tenant for query in slow] == [query.tenant for query in fast]
    for one, other in zip(slow, fast, strict=True):
        assert one.arrival_s == pytest.approx(2.0 * (other.arrival_s or 0.0))


def test_every_scale_is_a_tenant():
    """SLOs are the tenant's scale times the query's isolated time on the fleet."""
    queries, alone_s = Workbench(setup(slo_scales=(3.0, 6.0))).workload(job())
    assert {query.tenant for query in queries} == {"slo-3", "slo-6"}
    for query, own_s in zip(queries, alone_s, strict=True):
        assert own_s == pytest.approx(isolated_s(query, FLEETS["hetero-1"]))
        assert query.slo_s == pytest.approx(own_s * float(query.tenant.removeprefix("slo-")))


def test_slos_may_be_multiples_of_the_mean_isolated_time():
    """Then queries of one tenant have the same time, however long they are."""
    own, alone_s = Workbench(setup(num_queries=None)).workload(job())
    same, mean_s = Workbench(setup(num_queries=None, slo_base="mean")).workload(job())
    assert mean_s == pytest.approx(alone_s.mean())
    for query, before in zip(same, own, strict=True):
        scale = float(query.tenant.removeprefix("slo-"))
        assert query.slo_s == pytest.approx(scale * alone_s.mean())
        assert before.slo_s != query.slo_s


def test_each_tenant_s_attainment_is_measured():
    """A tenant with SLOs that none can meet meets none; the other all."""
    bench = Workbench(setup(slo_scales=(0.1, 1_000.0)))
    (row,) = bench.run(job(FLOW))
    assert row.measured.tenants == {"slo-0.1": 0.0, "slo-1000": 1.0}


def test_tenants_come_equally_often():
    """Over many queries each scale has its share."""
    drawn = draw_tenants(3_000, (3.0, 4.0, 6.0), seed=0)
    counts = [sum(one.scales == (scale,) for one in drawn) for scale in (3.0, 4.0, 6.0)]
    assert min(counts) > 900


def test_one_scale_for_all_keeps_the_tenants():
    """Searching for the tightest SLO changes deadlines only."""
    bench = Workbench(setup())
    mixed, _ = bench.workload(job())
    single, alone_s = bench.workload(job(slo_scale=2.5))
    assert [query.tenant for query in mixed] == [query.tenant for query in single]
    assert [query.slo_s for query in single] == pytest.approx(list(2.5 * alone_s))


def test_recorded_deadlines_tenants_and_arrivals_are_kept():
    """A recorded trace is replayed as it was, faster or slower, unless options say otherwise."""
    recorded = tuple(
        query.__class__(
            query_id=query.query_id,
            stages=query.stages,
            tenant="acme",
            arrival_s=10.0 * number,
            slo_s=77.0,
        )
        for number, query in enumerate(TRACE)
    )
    bench = Workbench(setup(traces={"natural": recorded}))
    queries, _ = bench.workload(job(arrivals="recorded", rate_qps=0.2))
    assert [query.arrival_s for query in queries] == pytest.approx(
        [5.0 * number for number in range(len(TRACE))]
    )
    assert {(query.tenant, query.slo_s) for query in queries} == {("acme", 77.0)}
    scaled = Workbench(setup(traces={"natural": recorded}, slo_scales=(4.0,)))
    queries, alone_s = scaled.workload(job(arrivals="recorded"))
    assert [query.slo_s for query in queries] == pytest.approx(list(4.0 * alone_s))


def test_a_trace_without_arrivals_cannot_be_replayed_as_recorded():
    """The message says what to choose instead."""
    with pytest.raises(ConfigError, match="poisson"):
        Workbench(setup()).check("natural", "hetero-1", ["recorded"])


def test_variants_of_a_job_come_back_in_order():
    """Whatever token budgets they have."""
    variants = (FLOW, Variant(policy="vllm", token_budget=512), VLLM)
    rows = Workbench(setup()).run(job(*variants))
    assert [row.variant for row in rows] == list(variants)
    assert rows[1].measured != rows[2].measured


def test_another_token_budget_does_not_move_the_deadlines():
    """Policies are held to the SLOs of the fleet as declared, whatever engine flags they choose."""
    bench = Workbench(setup())
    queries, _ = bench.workload(job())
    scenario = bench.scenario(cell(), queries, Variant(policy="vllm", token_budget=512))
    assert {spec.max_batched_tokens for spec in scenario.fleet} == {512}
    assert scenario.queries == queries
    assert with_budget(FLEETS["hetero-1"], 0) == FLEETS["hetero-1"]


def test_equal_jobs_give_equal_rows():
    """Runs are deterministic, in another process or not."""
    assert Workbench(setup()).run(job(FLOW, VLLM)) == Workbench(setup()).run(job(FLOW, VLLM))


def test_a_rate_of_zero_is_refused():
    """Even where no command has checked it."""
    with pytest.raises(ConfigError, match="above 0"):
        Workbench(setup()).workload(job(rate_qps=0.0))
