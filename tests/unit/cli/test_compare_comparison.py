"""The order of a comparison: tuning, measuring, the tightest SLO."""

import math

import pytest

from services.cli.lab.comparison import (
    BEST,
    Comparison,
    Contender,
    Plan,
    compare,
    crossing,
)
from services.cli.lab.pool import LocalRunner
from services.cli.lab.rates import parse_rates
from services.cli.lab.setting import Job, Variant
from services.cli.lab.steady import Measured
from services.cli.lab.tightest import Start, tightest_scales
from services.cli.lab.tuning import takes_alpha, tune
from tests.support.lab import QUIET, SETTING, ScriptedRunner, cell, measured, setup

PLAN = Plan(
    setup=setup(),
    settings=(SETTING,),
    policies=("hexgen-flow", "vllm"),
    rates=parse_rates("0.1,0.2..0.4"),
    seeds=(0, 1),
    tuning_seeds=(1_000_000,),
)


def answer(job: Job, variant: Variant) -> Measured:
    """α = 0.04 is best; the paper's policy holds twice the rate; scales follow the SLO a little."""
    limit = 0.35 if variant.policy == "hexgen-flow" else 0.15
    p95_s = 100.0 + 50.0 * abs(variant.alpha - 0.04) + (10.0 if variant.token_budget else 0.0)
    if variant.policy == "vllm":
        p95_s = 150.0 - variant.token_budget / 1_024
    attained = min(1.0, max(0.0, 0.95 + limit - job.cell.rate_qps))
    scale = 4.0 if job.slo_scale is None else 3.0 + 0.25 * job.slo_scale
    return measured(p95_s=p95_s, attainment=attained, scale95=scale, scale99=scale + 1.0)


def run(plan: Plan) -> tuple[Comparison, ScriptedRunner]:
    """Compare with scripted answers."""
    runner = ScriptedRunner(answer)
    return compare(plan, runner), runner


def test_every_policy_is_measured_under_every_rate_and_seed():
    """Two policies, four rates, two seeds."""
    found, _ = run(PLAN)
    places = {
        (entry.contender.policy, entry.row.cell.rate_qps, entry.row.seed) for entry in found.entries
    }
    assert len(found.entries) == len(places) == 16


def test_policies_measured_under_the_same_seed_share_a_job():
    """Their workload is drawn and laid out once; equal flags are neighbours."""
    _, runner = run(_with(token_budgets=(4_096,)))
    jobs = [job for job in runner.jobs if job.seed in PLAN.seeds and job.slo_scale is None]
    assert len(jobs) == 4 * len(PLAN.seeds)
    assert [(one.policy, one.token_budget) for one in jobs[0].variants] == [
        ("hexgen-flow", 0),
        ("vllm", 0),
        ("vllm", 4_096),
    ]


def test_alpha_is_tuned_on_seeds_that_are_never_measured():
    """Grid values are tried on the tuning seed only; measured runs have the best one."""
    found, runner = run(PLAN)
    tried = {job.seed for job in runner.jobs if len(job.variants) > len(PLAN.policies)}
    assert tried == {1_000_000}
    alphas = {entry.row.variant.alpha for entry in found.entries if _is_flow(entry.contender)}
    assert alphas == {0.04}
    assert {entry.row.seed for entry in found.entries} == {0, 1}
    (curve, *_) = found.alpha_curves
    assert min(curve.p95_s, key=lambda alpha: curve.p95_s[alpha]) == curve.alpha == 0.04


def test_a_given_alpha_is_not_searched():
    """Only policies that have one run with it."""
    found, runner = run(_with(alpha=0.3))
    assert found.alpha_curves == ()
    assert "tuning" not in {label for label in runner.labels if runner.jobs} - {"tuning"}
    assert {entry.row.variant.alpha for entry in found.entries if _is_flow(entry.contender)} == {
        0.3
    }


def test_own_engine_flags_stand_beside_the_given_ones():
    """Vllm is faster with a larger budget and gets it; the other keeps the fleet's."""
    found, _ = run(_with(token_budgets=(1_024, 4_096)))
    labels = [contender.label for contender in found.contenders()]
    assert labels == ["hexgen-flow", "vllm", "hexgen-flow (own flags)", "vllm (own flags)"]
    at = cell(0.1)
    vllm = found.rows(at, Contender(policy="vllm", flags=BEST))
    flow = found.rows(at, Contender(policy="hexgen-flow", flags=BEST))
    assert {row.variant.token_budget for row in vllm} == {4_096}
    assert {row.variant.token_budget for row in flow} == {0}
    assert {row.variant.token_budget for row in found.rows(at, Contender(policy="vllm"))} == {0}


def test_the_focus_is_the_highest_rate_the_first_policy_sustains():
    """Attainment falls below 95% at 0.35 queries/s, so 0.3 is looked at."""
    found, _ = run(PLAN)
    assert found.focus_qps[SETTING] == pytest.approx(0.3)


def test_the_sustained_rate_is_interpolated():
    """0.35 for the paper's policy, 0.15 for the other, seed by seed."""
    found, _ = run(PLAN)
    flow, vllm = found.contenders()
    assert found.sustained_qps(SETTING, flow) == pytest.approx([0.35, 0.35])
    assert found.sustained_qps(SETTING, vllm) == pytest.approx([0.15, 0.15])
    assert found.censored(SETTING, flow) == ([False, False], [False, False])


def test_the_tightest_slo_is_a_fixed_point():
    """S = 3 + s/4 holds at 4; the schedule under that SLO meets just that SLO."""
    found, runner = run(PLAN)
    scales = found.scales[SETTING, found.contenders()[0]]
    assert scales[0.95] == pytest.approx((4.0, 4.0), rel=0.02)
    assert scales[0.99] == pytest.approx((16.0 / 3.0,) * 2, rel=0.02)
    assert any(job.slo_scale is not None for job in runner.jobs)


def test_a_policy_that_leaves_queries_unanswered_has_no_tightest_slo():
    """No scale is met by enough queries, and nothing more is run."""
    runner = ScriptedRunner(lambda _job, _variant: measured(scale95=math.inf))
    (row,) = runner.run("", [Job(cell=cell(), seed=0, variants=(Variant(policy="vllm"),))])
    start = Start(key="k", variant=row.variant, target=0.95, row=row)
    runner.jobs.clear()
    assert tightest_scales(runner, [start]) == {"k": {0.95: (math.inf,)}}
    assert runner.jobs == []


@pytest.mark.parametrize(
    ("attained", "rate"),
    [
        ([1.0, 1.0, 0.9], 2.5),
        ([1.0, 0.95, 0.85], 2.0),
        ([1.0, 1.0, 1.0], 3.0),
        ([0.9, 1.0, 1.0], 0.0),
        ([1.0, 0.9, 1.0], 1.5),
    ],
)
def test_crossings(attained: list[float], rate: float):
    """The first fall below the target counts, interpolated between two rates."""
    assert crossing([1.0, 2.0, 3.0], attained) == pytest.approx(rate)


def test_policies_say_whether_they_have_an_alpha():
    """Found out by asking, so that a new policy needs no entry here."""
    assert takes_alpha("hexgen-flow")
    assert takes_alpha("wb+fcfs")
    assert not takes_alpha("vllm")
    assert not takes_alpha("least-outstanding")


def test_tuning_survives_runs_without_answers():
    """A policy that answers nothing keeps its first parameters."""
    runner = ScriptedRunner(lambda _job, _variant: measured(p95_s=math.nan))
    tuned = tune(runner, [cell()], ["vllm"], [1], None, (1_024,))
    assert tuned.best[cell(), "vllm"] == Variant(policy="vllm")


def test_a_real_comparison_on_few_queries():
    """The real simulator: more load is never faster, and the bound is never beaten."""
    plan = _with(rates=parse_rates("20%,150%"), policies=("least-outstanding", "vllm"), seeds=(0,))
    found = compare(plan, LocalRunner(plan.setup, QUIET))
    first, _ = found.contenders()
    slow, fast = (cell(rate) for rate in found.rates_qps(SETTING))
    assert found.values(slow, first, "p95_s") < found.values(fast, first, "p95_s")
    assert found.values(fast, first, "goodput_qps")[0] <= found.capacity_qps[SETTING]


def _with(**changes: object) -> Plan:
    fields = {name: getattr(PLAN, name) for name in PLAN.__struct_fields__}
    return Plan(**{**fields, **changes})  # type: ignore[arg-type]


def _is_flow(contender: Contender) -> bool:
    return contender.policy == "hexgen-flow"
