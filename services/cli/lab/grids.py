"""The tables of a comparison, as text cells: printed, written as Markdown, shown in the report."""

import math
import re
from collections.abc import Callable, Collection, Sequence

import msgspec

from services.cli.console import counted
from services.cli.lab.comparison import TARGET, Comparison, Contender
from services.cli.lab.intervals import Interval, interval, ratio_interval
from services.cli.lab.setting import Cell, Setting
from services.cli.lab.tightest import TARGETS

MAX_TENANTS = 10
_INTERVAL = re.compile(r" ± [\d.,]+")

Text = Callable[[Interval], str]


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """One table.

    Attributes:
        title: What it shows.
        columns: Headings; the first is that of the row labels.
        rows: Cells, as wide as the headings.
        note: How to read it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def setting_title(setting: Setting) -> str:
    """Return a setting's name for people."""
    return f"{setting.trace} on {setting.fleet}, {setting.arrivals} arrivals"


def without_intervals(grid: Grid, but: Collection[int] = ()) -> Grid:
    """Return a table whose cells say the means only, for narrow screens.

    Args:
        grid: The table.
        but: Columns that keep their intervals.
    """
    rows = tuple(
        tuple(cell if number in but else _INTERVAL.sub("", cell) for number, cell in enumerate(row))
        for row in grid.rows
    )
    return msgspec.structs.replace(grid, rows=rows)


def thinned(grid: Grid, most: int) -> Grid:
    """Return a table with at most so many columns of numbers, the last among them.

    Args:
        grid: The table.
        most: Columns to keep besides the first.
    """
    num = len(grid.columns) - 1
    step = -(-num // most)
    kept = [0, *range(1 + (num - 1) % step, num + 1, step)]

    def pick(cells: Sequence[str]) -> tuple[str, ...]:
        return tuple(cells[place] for place in kept)

    return msgspec.structs.replace(
        grid, columns=pick(grid.columns), rows=tuple(pick(row) for row in grid.rows)
    )


def first_columns(grid: Grid, num: int) -> Grid:
    """Return a table's first columns."""
    rows = tuple(row[:num] for row in grid.rows)
    return msgspec.structs.replace(grid, columns=grid.columns[:num], rows=rows)


def grids_of(found: Comparison, setting: Setting) -> list[Grid]:
    """Return the tables of one setting."""
    return [
        limits_grid(found, setting),
        load_grid(found, setting, "p95_s", "P95 end-to-end time, seconds, by load", _seconds),
        ratio_grid(found, setting),
        load_grid(found, setting, "attainment", "% of queries within their SLO, by load", _percent),
        tenants_grid(found, setting),
        parameters_grid(found, setting),
    ]


def overview_grid(found: Comparison) -> Grid:
    """Return every setting's sustained rates: the first policy's, and how much that is of others'.

    One row per setting; policies are held against each other with the same kind of engine flags.
    """
    contenders = found.contenders()
    rows = []
    for setting in found.plan.settings:
        cells = []
        for contender in contenders:
            first = next(one for one in contenders if one.flags == contender.flags)
            cells.append(
                _shares_bound(found, setting, first)
                if contender == first
                else gain_text(found, setting, first, contender)
            )
        rows.append((setting_title(setting), f"{found.capacity_qps[setting]:.3f}", *cells))
    first = contenders[0]
    return Grid(
        title="All settings",
        columns=("setting", "upper bound,\nqueries/s", *(one.label for one in contenders)),
        rows=tuple(rows),
        note=(
            f"{first.label}: rate up to which {TARGET:.0%} are answered within their SLO, "
            f"queries/s. Others: {first.label}'s rate over theirs; below 1, they sustain more."
        ),
    )


def _shares_bound(found: Comparison, setting: Setting, contender: Contender) -> str:
    share = found.sustained(setting, contender).mean / found.bound_qps(setting, contender)
    text = sustained_text(found, setting, contender)
    return f"{text} ({share:.0%})" if share > 0.0 else text


def limits_grid(found: Comparison, setting: Setting) -> Grid:
    """Return how far each policy gets: sustained rate and tightest SLO."""
    capacity = found.capacity_qps[setting]
    contenders = found.contenders()
    first = contenders[0]
    rows = []
    for contender in contenders:
        rates = found.sustained_qps(setting, contender)
        bound = found.bound_qps(setting, contender)
        share = interval([rate / bound for rate in rates]).mean
        rows.append(
            (
                contender.label,
                sustained_text(found, setting, contender),
                f"{share:.0%}" if any(rates) else "–",
                "1" if contender == first else gain_text(found, setting, first, contender),
                *(_plain(interval(_scales(found, setting, contender, t))) for t in TARGETS),
            )
        )
    bounds = {"upper bound": capacity}
    if found.plan.token_budgets:
        bounds["upper bound (own flags)"] = found.own_capacity_qps[setting]
    rows += [(name, f"{bound:.3f}", "100%", "–", "–", "–") for name, bound in bounds.items()]
    focus = found.focus_qps[setting]
    return Grid(
        title=f"How far each policy gets: {setting_title(setting)}",
        columns=(
            "policy",
            "sustained,\nqueries/s",
            "of upper\nbound",
            "first\ngets",
            *(f"tightest\nSLO, {target:.0%}" for target in TARGETS),
        ),
        rows=tuple(rows),
        note=(
            f"Sustained: up to this rate {TARGET:.0%} are answered within their SLO, interpolated "
            f"between the rates simulated. First gets: {first.label}'s sustained rate over "
            "this one. The tightest SLO is the "
            f"smallest multiple of {_alone(found)} that this share of queries meets at "
            f"{focus:.3g} queries/s ({focus / capacity:.0%} of the upper bound), the highest rate "
            f"at which {first.label} attains {TARGET:.0%}. ± is the 95% confidence interval over "
            f"{counted(len(found.plan.seeds), 'seed')}; ratios are paired by seed."
        ),
    )


def load_grid(
    found: Comparison,
    setting: Setting,
    name: str,
    title: str,
    text: Text,
) -> Grid:
    """Return one measure of every policy under every load."""
    rows = []
    for contender in found.contenders():
        cells = [
            interval(found.values(Cell(setting=setting, rate_qps=rate), contender, name))
            for rate in found.rates_qps(setting)
        ]
        rows.append((contender.label, *(text(cell) for cell in cells)))
    return Grid(title=title, columns=_load_columns(found, setting), rows=tuple(rows))


def ratio_grid(found: Comparison, setting: Setting) -> Grid:
    """Return every policy's P95 over the first one's."""
    first, *others = found.contenders()
    rows = []
    for contender in others:
        ratios = [
            found.ratio(Cell(setting=setting, rate_qps=rate), contender, first, "p95_s")
            for rate in found.rates_qps(setting)
        ]
        rows.append((contender.label, *map(ratio_text, ratios)))
    return Grid(
        title=f"P95 over that of {first.label}, by load",
        columns=_load_columns(found, setting),
        rows=tuple(rows),
        note=f"Above 1: {first.label} is faster. Geometric means of pairs with the same seed.",
    )


def tenants_grid(found: Comparison, setting: Setting) -> Grid:
    """Return each tenant's attainment at the focus rate; no rows for one tenant or very many."""
    rate_qps = found.focus_qps[setting]
    cell = Cell(setting=setting, rate_qps=rate_qps)
    per_contender = {
        one: [row.measured.tenants for row in found.rows(cell, one)] for one in found.contenders()
    }
    names = sorted(
        {name for seen in per_contender.values() for one in seen for name in one}, key=_natural
    )
    rows = [
        (
            contender.label,
            *(_percent(interval([one.get(name, math.nan) for one in seen])) for name in names),
        )
        for contender, seen in per_contender.items()
    ]
    return Grid(
        title=f"% of queries within their SLO at {rate_qps:.3g} queries/s, by tenant",
        columns=("policy", *names),
        rows=tuple(rows) if 1 < len(names) <= MAX_TENANTS else (),
    )


def parameters_grid(found: Comparison, setting: Setting) -> Grid:
    """Return the parameters that were used under every load."""
    tuned = {(curve.policy) for curve in found.alpha_curves}
    rows = []
    for contender in found.contenders():
        if contender.policy not in tuned and contender.flags == "given":
            continue
        texts = []
        for rate in found.rates_qps(setting):
            variant = found.rows(Cell(setting=setting, rate_qps=rate), contender)[0].variant
            parts = [f"α {variant.alpha:.2g}"] if contender.policy in tuned else []
            if contender.flags != "given":
                parts.append(f"{variant.token_budget:,}" if variant.token_budget else "as given")
            texts.append(", ".join(parts))
        rows.append((contender.label, *texts))
    return Grid(
        title="Parameters found on seeds that were not measured",
        columns=_load_columns(found, setting),
        rows=tuple(rows),
        note="α, and the token budget of an iteration where it was searched.",
    )


def sustained_text(found: Comparison, setting: Setting, contender: Contender) -> str:
    """Return a policy's sustained rate; says so where it lies outside the rates simulated."""
    rates = found.rates_qps(setting)
    low, high = found.censored(setting, contender)
    if all(low):
        return f"below {rates[0]:.3g}"
    if all(high):
        return f"at least {rates[-1]:.3g}"
    values = found.sustained_qps(setting, contender)
    clipped = [rates[0] if is_low else v for v, is_low in zip(values, low, strict=True)]
    return f"{'≤ ' * any(low)}{'≥ ' * any(high)}{_number(interval(clipped), 3)}"


def gain_text(found: Comparison, setting: Setting, first: Contender, other: Contender) -> str:
    """Return a policy's sustained rate over another's; a dash where none is known.

    A bound is given where one of the two lies outside the rates simulated.
    """
    own_low, own_high = found.censored(setting, first)
    low, high = found.censored(setting, other)
    if any(own_low) or (any(own_high) and any(high)):
        return "–"
    rates = found.rates_qps(setting)
    values = found.sustained_qps(setting, other)
    clipped = [rates[0] if is_low else v for v, is_low in zip(values, low, strict=True)]
    ratio = ratio_interval(found.sustained_qps(setting, first), clipped)
    return f"{'≥ ' * (any(low) or any(own_high))}{'≤ ' * any(high)}{ratio_text(ratio)}"


def _alone(found: Comparison) -> str:
    is_own = found.plan.setup.slo_base == "own"
    return "a query's isolated time" if is_own else "the mean isolated time"


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts `slo-10` after `slo-3`."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


def _scales(
    found: Comparison, setting: Setting, contender: Contender, target: float
) -> Sequence[float]:
    return found.scales[setting, contender][target]


def _load_columns(found: Comparison, setting: Setting) -> tuple[str, ...]:
    capacity = found.capacity_qps[setting]
    rates = found.rates_qps(setting)
    return ("policy", *(f"{rate / capacity:.0%}\n{rate:.3g}" for rate in rates))


def _number(value: Interval, digits: int) -> str:
    if not math.isfinite(value.mean):
        return "–"
    half = f" ± {value.half:.{digits}f}" if math.isfinite(value.half) else ""
    return f"{value.mean:.{digits}f}{half}"


def _seconds(value: Interval) -> str:
    return _number(value, 0)


def _plain(value: Interval) -> str:
    return _number(value, 1)


def ratio_text(value: Interval) -> str:
    """Return a ratio with its interval."""
    return _number(value, 2)


def _percent(value: Interval) -> str:
    if not math.isfinite(value.mean):
        return "–"
    half = f" ± {100 * value.half:.1f}" if math.isfinite(value.half) else ""
    return f"{100 * value.mean:.1f}{half}"
