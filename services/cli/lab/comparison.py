"""The comparison itself: tune, measure, look for the tightest SLO.

1. *Tune* (`tuning.py`): α, and where asked the token budget, per policy and cell (setting × rate),
   on seeds that are never measured.
2. *Measure* every policy in every cell under the measured seeds.
3. *Focus*: per setting one rate is looked at closely, the highest at which the first policy still
   attains 95%. There, search the smallest SLO scale that 95% and 99% of the queries meet
   (`tightest.py`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from services.cli.lab.bench import with_budget
from services.cli.lab.intervals import Interval, interval, ratio_interval
from services.cli.lab.pool import Runner
from services.cli.lab.rates import Rate
from services.cli.lab.setting import Cell, Job, Row, Setting, Setup, Variant
from services.cli.lab.tightest import TARGETS, Start, tightest_scales
from services.cli.lab.tuning import AlphaCurve, Tuned, tune
from shared.simulation.capacity import fluid_capacity

TARGET = 0.95
GIVEN, BEST = "given", "best"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to compare.

    Attributes:
        setup: What all runs have in common.
        settings: Where.
        policies: What; the first is the one that others are held against.
        rates: Under which loads.
        seeds: Measured seeds.
        tuning_seeds: Seeds for tuning; none of them is measured.
        alpha: α of every policy that has one; None: tuned.
        token_budgets: Token budgets to choose from, per policy; empty: the fleet's own only.
    """

    setup: Setup
    settings: tuple[Setting, ...]
    policies: tuple[str, ...]
    rates: tuple[Rate, ...]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    alpha: float | None = None
    token_budgets: tuple[int, ...] = ()


class Contender(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A policy as it is compared: with the fleet's engine flags, or with its own best ones."""

    policy: str
    flags: str = GIVEN

    @property
    def label(self) -> str:
        """Name for people."""
        return self.policy if self.flags == GIVEN else f"{self.policy} (own flags)"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run of a contender."""

    contender: Contender
    row: Row


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All that a comparison brought.

    Attributes:
        plan: What was compared.
        capacity_qps: Setting -> fluid capacity, queries per second.
        own_capacity_qps: Setting -> the largest one at any token budget that was tried.
        entries: Measured runs.
        alpha_curves: What tuning saw.
        focus_qps: Setting -> the rate looked at closely.
        scales: (setting, contender) -> per target the smallest scales found, seed by seed.
    """

    plan: Plan
    capacity_qps: Mapping[Setting, float]
    own_capacity_qps: Mapping[Setting, float]
    entries: tuple[Entry, ...]
    alpha_curves: tuple[AlphaCurve, ...]
    focus_qps: Mapping[Setting, float]
    scales: Mapping[tuple[Setting, Contender], Mapping[float, tuple[float, ...]]]

    def contenders(self) -> list[Contender]:
        """Return the contenders in the plan's order."""
        flags = (GIVEN, BEST) if self.plan.token_budgets else (GIVEN,)
        return [
            Contender(policy=policy, flags=flag) for flag in flags for policy in self.plan.policies
        ]

    def bound_qps(self, setting: Setting, contender: Contender) -> float:
        """Return what no policy with these engine flags could exceed, queries per second."""
        bounds = self.capacity_qps if contender.flags == GIVEN else self.own_capacity_qps
        return bounds[setting]

    def rates_qps(self, setting: Setting) -> list[float]:
        """Return the rates of a setting, rising."""
        found = {
            entry.row.cell.rate_qps for entry in self.entries if entry.row.cell.setting == setting
        }
        return sorted(found)

    def rows(self, cell: Cell, contender: Contender) -> list[Row]:
        """Return a contender's runs in a cell, seed by seed."""
        return [
            entry.row
            for entry in self.entries
            if entry.contender == contender and entry.row.cell == cell
        ]

    def values(self, cell: Cell, contender: Contender, name: str) -> list[float]:
        """Return one measure of a contender in a cell, seed by seed."""
        return [float(getattr(row.measured, name)) for row in self.rows(cell, contender)]

    def ratio(self, cell: Cell, upper: Contender, lower: Contender, name: str) -> Interval:
        """Return the ratio of two contenders' values, paired by seed."""
        return ratio_interval(self.values(cell, upper, name), self.values(cell, lower, name))

    def sustained_qps(self, setting: Setting, contender: Contender) -> list[float]:
        """Return, seed by seed, the rate up to which the target is attained."""
        rates = self.rates_qps(setting)
        per_rate = [
            self.values(Cell(setting=setting, rate_qps=rate), contender, "attainment")
            for rate in rates
        ]
        return [crossing(rates, column) for column in zip(*per_rate, strict=True)]

    def sustained(self, setting: Setting, contender: Contender) -> Interval:
        """Return the mean of the sustained rates."""
        return interval(self.sustained_qps(setting, contender))

    def censored(self, setting: Setting, contender: Contender) -> tuple[list[bool], list[bool]]:
        """Return, seed by seed, whether the sustained rate lies below or above all simulated."""
        rates = self.rates_qps(setting)
        lowest, highest = (
            self.values(Cell(setting=setting, rate_qps=rate), contender, "attainment")
            for rate in (rates[0], rates[-1])
        )
        sustained = self.sustained_qps(setting, contender)
        return (
            [attained < TARGET for attained in lowest],
            [
                attained >= TARGET and rate == rates[-1]
                for attained, rate in zip(highest, sustained, strict=True)
            ],
        )


def crossing(rates: Sequence[float], attained: Sequence[float], target: float = TARGET) -> float:
    """Return the rate at which attainment falls below a target, by linear interpolation.

    Args:
        rates: Rates, rising.
        attained: Attainment at each.
        target: The target.

    Returns:
        The highest rate where it never falls below, 0 where it is below from the first on.
    """
    for place, value in enumerate(attained):
        if value < target:
            if place == 0:
                return 0.0
            before = attained[place - 1]
            share = (before - target) / (before - value)
            return rates[place - 1] + share * (rates[place] - rates[place - 1])
    return rates[-1]


def compare(plan: Plan, runner: Runner) -> Comparison:
    """Run a comparison.

    Args:
        plan: What to compare.
        runner: Where runs happen.
    """
    capacity = {setting: capacity_of(plan.setup, setting, 0) for setting in plan.settings}
    budgets = (0, *plan.token_budgets)
    own_capacity = {
        setting: max(capacity_of(plan.setup, setting, budget) for budget in budgets)
        for setting in plan.settings
    }
    cells = [
        Cell(setting=setting, rate_qps=rate.qps(capacity[setting]))
        for setting in plan.settings
        for rate in plan.rates
    ]
    tuned = tune(runner, cells, plan.policies, plan.tuning_seeds, plan.alpha, plan.token_budgets)
    entries = _measure(plan, runner, cells, tuned)
    found = Comparison(
        plan=plan,
        capacity_qps=capacity,
        own_capacity_qps=own_capacity,
        entries=tuple(entries),
        alpha_curves=tuple(tuned.curves),
        focus_qps={},
        scales={},
    )
    focus = {setting: _focus(found, setting) for setting in plan.settings}
    scales = _scales(found, runner, focus, tuned)
    return msgspec.structs.replace(found, focus_qps=focus, scales=scales)


def capacity_of(setup: Setup, setting: Setting, token_budget: int) -> float:
    """Return the fluid capacity of a setting's fleet at a token budget, queries per second."""
    fleet = with_budget(setup.fleets[setting.fleet], token_budget)
    return fluid_capacity(setup.traces[setting.trace], fleet).qps


def _measure(plan: Plan, runner: Runner, cells: Sequence[Cell], tuned: Tuned) -> list[Entry]:
    """Return the measured runs; a policy whose best flags are the given ones runs once."""
    wanted: dict[tuple[Cell, Variant], list[Contender]] = defaultdict(list)
    for cell in cells:
        for policy in plan.policies:
            wanted[cell, tuned.given[cell, policy]].append(Contender(policy=policy))
            if plan.token_budgets:
                best = Contender(policy=policy, flags=BEST)
                wanted[cell, tuned.best[cell, policy]].append(best)
    variants: dict[Cell, list[Variant]] = defaultdict(list)
    for cell, variant in wanted:
        variants[cell].append(variant)
    # One job per cell and seed: neighbours with equal flags share drawing and laying out queries.
    jobs = [
        Job(
            cell=cell,
            seed=seed,
            variants=tuple(sorted(variants[cell], key=lambda one: one.token_budget)),
        )
        for cell in variants
        for seed in plan.seeds
    ]
    rows = runner.run("measuring", jobs)
    return [
        Entry(contender=contender, row=row)
        for row in rows
        for contender in wanted[row.cell, row.variant]
    ]


def _focus(found: Comparison, setting: Setting) -> float:
    first = found.contenders()[0]
    rates = found.rates_qps(setting)
    attaining = [
        rate
        for rate in rates
        if interval(found.values(Cell(setting=setting, rate_qps=rate), first, "attainment")).mean
        >= TARGET
    ]
    return attaining[-1] if attaining else rates[0]


def _scales(
    found: Comparison, runner: Runner, focus: Mapping[Setting, float], tuned: Tuned
) -> dict[tuple[Setting, Contender], dict[float, tuple[float, ...]]]:
    starts = []
    for setting, rate_qps in focus.items():
        cell = Cell(setting=setting, rate_qps=rate_qps)
        for contender in found.contenders():
            chosen = tuned.given if contender.flags == GIVEN else tuned.best
            starts += [
                Start(
                    key=(setting, contender),
                    variant=chosen[cell, contender.policy],
                    target=target,
                    row=row,
                )
                for row in found.rows(cell, contender)
                for target in TARGETS
            ]
    return tightest_scales(runner, starts)
