"""The lab's results as JSON objects for scripts: `null` where there is no number."""

from typing import Any

from services.cli.console import finite
from services.cli.lab.comparison import Comparison, Entry
from services.cli.lab.intervals import Interval
from services.cli.lab.setting import Cell
from services.cli.lab.steady import Measured


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Return the JSON object of `hexflow compare --json`."""
    return {
        "runs": [_run(found, entry) for entry in found.entries],
        "summary": [_summary(found, setting) for setting in found.plan.settings],
        "alpha_curves": [
            {
                **_cell(found, curve.cell),
                "policy": curve.policy,
                "alpha": curve.alpha,
                "points": [
                    {"alpha": alpha, "p95_s": finite(p95_s), "attainment": curve.attainment[alpha]}
                    for alpha, p95_s in curve.p95_s.items()
                ],
            }
            for curve in found.alpha_curves
        ],
    }


def measured_json(measured: Measured) -> dict[str, Any]:
    """Return the numbers of one run."""
    return {
        "p50_s": finite(measured.p50_s),
        "p95_s": finite(measured.p95_s),
        "p99_s": finite(measured.p99_s),
        "mean_s": finite(measured.mean_s),
        "attainment": measured.attainment,
        "goodput_qps": measured.goodput_qps,
        "utilisation": measured.utilisation,
        "completed": measured.completed,
        "queries": measured.num_queries,
        "slo_scale_p95": finite(measured.scale95),
        "slo_scale_p99": finite(measured.scale99),
        "per_tenant": {name: {"attainment": met} for name, met in measured.tenants.items()},
        "per_instance": {
            name: {
                "gpu": one.gpu,
                "utilisation": one.utilisation,
                "batch": one.batch,
                "calls": one.calls,
                "output_tokens": one.output_tokens,
                "cached_share": one.cached_share,
                "preemptions": one.preemptions,
            }
            for name, one in measured.instances.items()
        },
    }


def _run(found: Comparison, entry: Entry) -> dict[str, Any]:
    variant = entry.row.variant
    return {
        "policy": entry.contender.policy,
        **_cell(found, entry.row.cell),
        "seed": entry.row.seed,
        "alpha": variant.alpha,
        "token_budget": variant.token_budget or None,
        "flags": entry.contender.flags,
        **measured_json(entry.row.measured),
    }


def _cell(found: Comparison, cell: Cell) -> dict[str, Any]:
    capacity_qps = found.capacity_qps[cell.setting]
    return {
        "trace": cell.setting.trace,
        "fleet": cell.setting.fleet,
        "arrivals": cell.setting.arrivals,
        "rate_qps": cell.rate_qps,
        "load": cell.rate_qps / capacity_qps,
    }


def _summary(found: Comparison, setting: Any) -> dict[str, Any]:
    return {
        "trace": setting.trace,
        "fleet": setting.fleet,
        "arrivals": setting.arrivals,
        "upper_bound_qps": found.capacity_qps[setting],
        "upper_bound_own_flags_qps": found.own_capacity_qps[setting],
        "focus_qps": found.focus_qps[setting],
        "policies": [
            {
                "policy": contender.policy,
                "flags": contender.flags,
                "sustained_qps": _interval(found.sustained(setting, contender)),
                "sustains_highest_rate": all(found.censored(setting, contender)[1]),
                "sustains_lowest_rate": not any(found.censored(setting, contender)[0]),
                "tightest_slo_scale": {
                    f"{target:g}": [finite(scale) for scale in scales]
                    for target, scales in found.scales[setting, contender].items()
                },
            }
            for contender in found.contenders()
        ],
    }


def _interval(value: Interval) -> dict[str, Any]:
    return {"mean": finite(value.mean), "half_width_95": finite(value.half), "seeds": value.num}
