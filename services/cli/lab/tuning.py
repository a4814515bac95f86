"""Finds each policy's best parameters on seeds that are never measured.

α is searched as the live tuner does: on its grid, then once between the best value and its
neighbours. The criterion is P95, mean over the tuning seeds.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from services.cli.lab.pool import Runner
from services.cli.lab.setting import Cell, Job, Variant
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.scheduling.policies import make_policy
from shared.scheduling.policy import Cost, InstanceView, WaitingCall
from shared.scheduling.tuning import ALPHA_GRID, best_alpha, refine_alphas

UNTUNED_ALPHA = 0.1


class AlphaCurve(msgspec.Struct, frozen=True, kw_only=True):
    """P95 over α, as tuning saw it.

    Attributes:
        cell: Where.
        policy: Of which policy.
        p95_s: α -> mean P95 over the tuning seeds, seconds.
        attainment: α -> mean attainment.
        alpha: The α chosen.
    """

    cell: Cell
    policy: str
    p95_s: Mapping[float, float]
    attainment: Mapping[float, float]
    alpha: float


class Tuned(msgspec.Struct, kw_only=True):
    """The parameters chosen.

    Attributes:
        given: (cell, policy) -> the best with the fleet's own engine flags.
        best: (cell, policy) -> the best of all engine flags.
        curves: What was seen with the fleet's own flags.
    """

    given: dict[tuple[Cell, str], Variant] = {}
    best: dict[tuple[Cell, str], Variant] = {}
    curves: list[AlphaCurve] = []


# (cell, policy, token budget) -> α -> (P95, attainment) of each tuning seed.
_Seen = dict[tuple[Cell, str, int], dict[float, list[tuple[float, float]]]]


def tune(
    runner: Runner,
    cells: Sequence[Cell],
    policies: Sequence[str],
    seeds: Sequence[int],
    alpha: float | None,
    token_budgets: Sequence[int] = (),
) -> Tuned:
    """Return every policy's parameters for every cell.

    Args:
        runner: Where runs happen.
        cells: Workload, fleet and load.
        policies: Registry names.
        seeds: Seeds for tuning.
        alpha: α of every policy that has one; None: search it.
        token_budgets: Token budgets to search; empty: the fleet's own only.
    """
    grids = {policy: _grid(policy, alpha) for policy in policies}
    budgets = (0, *token_budgets)
    keys = [
        (cell, policy, budget)
        for cell in cells
        for policy in policies
        for budget in budgets
        if len(grids[policy]) * len(budgets) > 1
    ]
    seen: _Seen = defaultdict(lambda: defaultdict(list))
    _look(runner, "tuning", seen, {key: grids[key[1]] for key in keys}, seeds)
    refined = {key: refine_alphas(_p95s(seen[key])) for key in keys if len(grids[key[1]]) > 1}
    _look(runner, "tuning more finely", seen, refined, seeds)
    return _choose(seen, cells, policies, grids, budgets)


def takes_alpha(policy: str) -> bool:
    """Return whether a policy has an α: its choices name the one in force.

    Raises:
        ConfigError: The policy is unknown.
    """
    latency = LatencyModel(prefill_s_per_token=0.001, weights_s=0.05)
    view = InstanceView(spec=InstanceSpec(instance_id="a", gpu="a", latency=latency))
    call = WaitingCall(
        request_id="r",
        query_id="q",
        input_tokens=1,
        output_tokens=1.0,
        ready_at_s=0.0,
        t_slo_s=1.0,
        deadline_s=1.0,
    )
    choice = make_policy(policy, UNTUNED_ALPHA).choose(call, [view], {"a": Cost(t_comp_s=1.0)}, 0.0)
    return choice is not None and choice.alpha is not None


def _grid(policy: str, alpha: float | None) -> tuple[float, ...]:
    if not takes_alpha(policy):
        return (0.0,)
    return ALPHA_GRID if alpha is None else (alpha,)


def _look(
    runner: Runner,
    label: str,
    seen: _Seen,
    wanted: Mapping[tuple[Cell, str, int], Sequence[float]],
    seeds: Sequence[int],
) -> None:
    jobs = [
        Job(
            cell=cell,
            seed=seed,
            variants=tuple(
                Variant(policy=policy, alpha=alpha, token_budget=budget) for alpha in alphas
            ),
        )
        for (cell, policy, budget), alphas in wanted.items()
        for seed in seeds
        if alphas
    ]
    for row in runner.run(label, jobs):
        key = (row.cell, row.variant.policy, row.variant.token_budget)
        found = (row.measured.p95_s, row.measured.attainment)
        seen[key][row.variant.alpha].append(found)


def _choose(
    seen: _Seen,
    cells: Sequence[Cell],
    policies: Sequence[str],
    grids: Mapping[str, Sequence[float]],
    budgets: Sequence[int],
) -> Tuned:
    tuned = Tuned()
    for cell in cells:
        for policy in policies:
            options = {}
            for budget in budgets:
                by_alpha = seen.get((cell, policy, budget))
                p95s = _p95s(by_alpha) if by_alpha else {grids[policy][0]: math.nan}
                finite = any(math.isfinite(p95_s) for p95_s in p95s.values())
                alpha = best_alpha(p95s) if finite else grids[policy][0]
                variant = Variant(policy=policy, alpha=alpha, token_budget=budget)
                options[variant] = p95s[alpha]
            given, *_ = options
            tuned.given[cell, policy] = given
            tuned.best[cell, policy] = min(options, key=lambda one: _or_inf(options[one]))
            if len(grids[policy]) > 1:
                tuned.curves.append(_curve(cell, given, seen[cell, policy, 0]))
    return tuned


def _curve(
    cell: Cell, chosen: Variant, by_alpha: Mapping[float, Sequence[tuple[float, float]]]
) -> AlphaCurve:
    ordered = sorted(by_alpha)
    return AlphaCurve(
        cell=cell,
        policy=chosen.policy,
        p95_s={alpha: _mean([p95_s for p95_s, _ in by_alpha[alpha]]) for alpha in ordered},
        attainment={alpha: _mean([met for _, met in by_alpha[alpha]]) for alpha in ordered},
        alpha=chosen.alpha,
    )


def _p95s(by_alpha: Mapping[float, Sequence[tuple[float, float]]]) -> dict[float, float]:
    return {alpha: _mean([p95_s for p95_s, _ in pairs]) for alpha, pairs in by_alpha.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf
