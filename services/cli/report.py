"""Tables for people and JSON for scripts: what a run came to."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.table import Table

from services.cli.tally import KINDS, Tally
from shared.scheduling.attainment import percentile


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was run.

    Attributes:
        workload: Name of the workload.
        policy: Policy name; empty when the mesh's own.
        fleet: Name or file of the fleet.
        rate_qps: Mean arrivals, queries per second.
        capacity_qps: Estimated capacity of the fleet, queries per second.
        time_scale: Mesh seconds per wall second.
        seed: Seed.
        wall_s: How long it took, wall seconds.
        interrupted: Whether the user ended it early.
    """

    workload: str
    policy: str
    fleet: str
    rate_qps: float
    capacity_qps: float
    time_scale: float
    seed: int
    wall_s: float = 0.0
    interrupted: bool = False


def run_json(info: RunInfo, tally: Tally) -> dict[str, Any]:
    """Return the JSON object of `hexflow replay --json`."""
    return {**tally.to_json(), "run": msgspec.to_builtins(info)}


def seconds(value: float) -> str:
    """Return seconds for a table; a dash where there is no value."""
    return f"{value:.1f} s" if math.isfinite(value) else "–"


def summary_table(info: RunInfo, tally: Tally) -> Table:
    """Return the summary of one run."""
    summary = tally.summary()
    table = Table(title=f"{info.workload} on {info.fleet}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in (
        ("policy", info.policy or "as the mesh is configured"),
        ("arrivals", f"{info.rate_qps:.3g} queries/s{_load(info)}"),
        ("queries", _kinds(tally.queries)),
        ("calls", f"{_kinds(tally.calls)}, duplicates dropped {tally.calls['duplicates']}"),
        (
            "P50 / P95 / P99",
            " / ".join(map(seconds, (summary.p50_s, summary.p95_s, summary.p99_s))),
        ),
        ("within SLO", f"{summary.attainment:.1%} of submitted queries"),
        ("goodput", f"{summary.goodput_qps:.3g} queries/s within SLO"),
    ):
        table.add_row(name, text)
    if tally.reasons:
        reasons = ", ".join(f"{reason} {num}" for reason, num in tally.reasons.most_common(5))
        table.add_row("why not", reasons)
    return table


def instance_table(tally: Tally) -> Table:
    """Return calls, tokens and mean times per instance."""
    table = Table(title="calls per instance", title_justify="left")
    table.add_column("instance")
    for name in (
        "calls",
        "prompt tokens",
        "of these cached",
        "output tokens",
        "queued",
        "in engine",
    ):
        table.add_column(name, justify="right")
    for name in sorted(tally.instances):
        one = tally.instances[name].to_json()
        table.add_row(
            name,
            f"{one['calls']:,}",
            f"{one['input_tokens']:,}",
            f"{one['cached_tokens'] / max(1, one['input_tokens']):.0%}",
            f"{one['output_tokens']:,}",
            seconds(one["mean_queue_s"]),
            seconds(one["mean_service_s"]),
        )
    return table


def comparison_table(runs: Mapping[str, Tally]) -> Table:
    """Return policies side by side; the last column is the last policy's value over the first's."""
    names = list(runs)
    table = Table(title="the same queries under each policy", title_justify="left")
    table.caption = (
        "P50, P95, P99: less is better. Within SLO, goodput: more is better. The last column is "
        f"{names[-1]} divided by {names[0]}: 2.00 at P95 means that {names[-1]} takes twice as "
        "long."
    )
    table.caption_justify = "left"
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column(f"{names[-1]} ÷ {names[0]}", justify="right")
    summaries = [runs[name].summary() for name in names]
    for label, values, text in (
        ("P50", [s.p50_s for s in summaries], seconds),
        ("P95", [s.p95_s for s in summaries], seconds),
        ("P99", [s.p99_s for s in summaries], seconds),
        ("within SLO", [s.attainment for s in summaries], "{:.1%}".format),
        ("goodput, q/s", [s.goodput_qps for s in summaries], "{:.3g}".format),
    ):
        table.add_row(label, *[text(value) for value in values], _ratio(values))
    table.add_section()
    for instance in sorted({name for tally in runs.values() for name in tally.instances}):
        counts = [
            float(t.instances[instance].calls) if instance in t.instances else 0.0
            for t in runs.values()
        ]
        table.add_row(f"calls, {instance}", *[f"{n:,.0f}" for n in counts], _ratio(counts))
    return table


def quantile_bars(runs: Mapping[str, Tally], width: int = 46) -> list[str]:
    """Return a small text chart: end-to-end time at a few percentiles, one bar per policy."""
    samples = {n: [e.latency_s for e in t.ends if e.completed] for n, t in runs.items()}
    longest = max((max(values, default=0.0) for values in samples.values()), default=0.0)
    if longest <= 0.0:
        return []
    label_width = max(map(len, runs))
    lines = []
    for percent in (50, 75, 90, 95, 99):
        for index, (name, values) in enumerate(samples.items()):
            value = percentile(values, percent)
            if not math.isfinite(value):
                continue
            mark = f"P{percent}" if index == 0 else ""
            bar = _bar(value / longest, width)
            lines.append(f"{mark:>4} {name:<{label_width}} {bar} {value:.0f} s")
    return lines


def _bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")


def _ratio(values: Sequence[float]) -> str:
    first, last = values[0], values[-1]
    return f"{last / first:.2f}" if first > 0 and math.isfinite(last / first) else "–"


def _load(info: RunInfo) -> str:
    if info.capacity_qps <= 0:
        return ""
    return f" ({info.rate_qps / info.capacity_qps:.0%} of the fleet's estimated capacity)"


def _kinds(counts: Mapping[str, int]) -> str:
    shown = [f"{kind} {counts[kind]}" for kind in KINDS if counts[kind] or kind == "completed"]
    return f"submitted {counts['submitted']}, {', '.join(shown)}"
