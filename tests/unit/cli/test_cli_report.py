"""The numbers and their presentation."""

import io
import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from services.cli import plots
from services.cli.report import (
    RunInfo,
    comparison_table,
    instance_table,
    quantile_bars,
    run_json,
    summary_table,
)
from services.cli.tally import Tally
from shared.contracts.messages import CallOutcome, CallTimes, Usage
from shared.scheduling.attainment import QueryEnd

INFO = RunInfo(
    workload="w", policy="p", fleet="f", rate_qps=0.5, capacity_qps=1.0, time_scale=10.0, seed=7
)
KINDS = {"submitted", "completed", "failed", "rejected", "evicted", "cancelled"}


def tally_of(*latencies_s: float, lost: int = 0) -> Tally:
    """Return a tally of queries that took so long, with an SLO of 10 s."""
    tally = Tally()
    for number, latency_s in enumerate(latencies_s):
        tally.queries["submitted"] += 1
        tally.calls["submitted"] += 1
        tally.call_ended(outcome(number, latency_s), now_s=latency_s + 0.5)
        end = QueryEnd(arrival_s=0.0, end_s=latency_s, slo_s=10.0, completed=True)
        tally.query_ended("completed", end)
    for _ in range(lost):
        tally.queries["submitted"] += 1
        end = QueryEnd(arrival_s=0.0, end_s=1.0, slo_s=10.0, completed=False)
        tally.query_ended("failed", end)
    return tally


def outcome(number: int, finished_s: float) -> CallOutcome:
    """Return a completed outcome on instance `a`."""
    return CallOutcome(
        request_id=f"r{number}",
        query_id=f"q{number}",
        kind="completed",
        instance_id="a",
        usage=Usage(input_tokens=100, output_tokens=10, cached_tokens=40),
        times=CallTimes(
            ready_at_s=0.1, queued_at_s=0.2, started_at_s=0.3, finished_at_s=finished_s
        ),
    )


def shown(what: object) -> str:
    """Return what a person sees."""
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_json_has_the_keys_scripts_rely_on():
    """The contract's keys are there, and the object is strict JSON."""
    value = run_json(INFO, tally_of(5.0, 20.0))
    assert set(value["queries"]) == KINDS
    assert set(value["calls"]) == {*KINDS, "duplicates"}
    assert {"p50_s", "p95_s", "p99_s", "attainment", "goodput_qps", "per_instance"} <= set(value)
    assert json.loads(json.dumps(value, allow_nan=False)) == value


def test_attainment_counts_every_submitted_query():
    """A query that failed counts as missed: 1 of 4 met, not 1 of 2."""
    value = run_json(INFO, tally_of(5.0, 20.0, lost=2))
    assert value["attainment"] == 0.25
    assert value["queries"]["failed"] == 2


def test_nothing_completed_gives_null_not_nan():
    """JSON has no NaN."""
    value = run_json(INFO, tally_of(lost=1))
    assert value["p95_s"] is None
    assert value["attainment"] == 0.0


def test_hops_are_what_is_neither_queue_nor_engine():
    """Ready to queued (0.1 s) plus finished to consumed (0.5 s)."""
    assert tally_of(5.0).mean_hops_s() == pytest.approx(0.6)


def test_active_queries_are_submitted_and_not_ended():
    """The live counts add up."""
    tally = tally_of(5.0, lost=1)
    tally.queries["submitted"] += 3
    assert tally.num_active == 3
    assert tally.num_ended == 2


def test_tables_show_the_numbers():
    """P95, shares and the reasons of failures can be read off."""
    tally = tally_of(5.0, 20.0, lost=1)
    tally.reasons = Counter({"generation_failed": 1})
    text = shown(summary_table(INFO, tally))
    assert "19.2 s" in text
    assert "33.3%" in text
    assert "generation_failed 1" in text
    assert "40%" in shown(instance_table(tally))


def test_comparison_divides_the_last_by_the_first():
    """Twice as slow reads 2.00."""
    text = shown(comparison_table({"one": tally_of(5.0), "two": tally_of(10.0)}))
    assert "two ÷ one" in text
    assert "2.00" in text


def test_a_comparison_says_which_way_is_better():
    """Neither a ratio nor an arrow has to be guessed at."""
    text = " ".join(shown(comparison_table({"one": tally_of(5.0), "two": tally_of(10.0)})).split())
    assert "P50, P95, P99: less is better. Within SLO, goodput: more is better." in text
    assert "two divided by one: 2.00 at P95 means that two takes twice as long." in text


def test_bars_grow_with_the_time():
    """The slower policy has the longer bar; without completed queries there is no chart."""
    lines = quantile_bars({"fast": tally_of(5.0), "slow": tally_of(10.0)})
    assert lines[0].count("█") < lines[1].count("█")
    assert quantile_bars({"none": tally_of()}) == []


def test_plot_is_a_png_even_when_nothing_completed(tmp_path: Path):
    """A run without completed queries still gives a readable file."""
    figure = plots.comparison_figure({"one": tally_of(5.0, 20.0), "two": tally_of(lost=1)}, "what")
    path = plots.save(figure, tmp_path / "new", "x.png")
    assert path.read_bytes().startswith(b"\x89PNG")
