"""What a comparison looks like: tables, plots, the HTML page, JSON."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.cli.compare import rich_table, slug, write
from services.cli.lab.bench import Workbench
from services.cli.lab.comparison import Comparison, Plan, compare
from services.cli.lab.figures import overview_figure
from services.cli.lab.gantt import gantt_figure, lanes
from services.cli.lab.grids import (
    Grid,
    first_columns,
    grids_of,
    overview_grid,
    thinned,
    without_intervals,
)
from services.cli.lab.headlines import headlines
from services.cli.lab.html import markdown, page
from services.cli.lab.jsonable import comparison_json
from services.cli.lab.rates import parse_rates
from services.cli.lab.setting import Job, Setting, Variant
from services.cli.lab.steady import Measured
from tests.support.lab import SETTING, ScriptedRunner, cell, measured, setup

POLICIES = ("hexgen-flow", "wb+fcfs", "rr+pq", "vllm")


def answer(job: Job, variant: Variant) -> Measured:
    """The first policy sustains 0.35 queries/s, vllm nothing at all."""
    limit = {"hexgen-flow": 0.35, "wb+fcfs": 0.3, "rr+pq": 0.15, "vllm": 0.0}[variant.policy]
    shift = 0.001 * (job.seed % 7)
    return measured(
        p95_s=100.0 * job.cell.rate_qps / (limit + 0.1) + shift,
        attainment=min(1.0, max(0.0, 0.95 + limit - job.cell.rate_qps - shift)),
    )


def scripted(
    answers: Callable[[Job, Variant], Measured],
    policies: tuple[str, ...] = POLICIES,
    settings: tuple[Setting, ...] = (SETTING,),
) -> Comparison:
    """Policies, three rates, two seeds."""
    plan = Plan(
        setup=setup(),
        settings=settings,
        policies=policies,
        rates=parse_rates("0.1,0.25,0.4"),
        seeds=(0, 1),
        tuning_seeds=(1_000_000,),
        token_budgets=(1_024,),
    )
    return compare(plan, ScriptedRunner(answers))


@pytest.fixture(scope="module")
def found() -> Comparison:
    """Four policies."""
    return scripted(answer)


def test_the_limits_table_has_a_row_per_contender_and_the_upper_bound(found: Comparison):
    """Whoever sustains no simulated rate is said to lie below the lowest."""
    limits = grids_of(found, SETTING)[0]
    names = [row[0] for row in limits.rows]
    assert names[: len(POLICIES)] == list(POLICIES)
    assert names[-2:] == ["upper bound", "upper bound (own flags)"]
    cells = dict(zip(names, limits.rows, strict=True))
    assert cells["vllm"][1] == "below 0.1"
    assert cells["vllm"][3].startswith("≥ 3.2")
    assert cells["hexgen-flow"][1].startswith("0.32")


def test_tenants_are_shown_in_the_order_of_their_numbers():
    """At the focus rate; one tenant makes no table."""

    def per_tenant(job: Job, variant: Variant) -> Measured:
        one = msgspec.structs.replace(answer(job, variant), tenants={"slo-10": 1.0, "slo-3": 0.5})
        return one if variant.policy == "vllm" else answer(job, variant)

    (grid,) = (
        grid
        for grid in grids_of(scripted(per_tenant, ("vllm", "rr+pq")), SETTING)
        if grid.title.endswith("by tenant")
    )
    assert grid.columns == ("policy", "slo-3", "slo-10")
    assert grid.rows[0] == ("vllm", "50.0 ± 0.0", "100.0 ± 0.0")
    assert grid.rows[1][1:] == ("–", "–")


def test_several_settings_have_one_table_of_all():
    """The first policy's rate in each, and how much that is of the others'."""
    other = msgspec.structs.replace(SETTING, fleet="homogeneous")
    both = scripted(answer, settings=(SETTING, other))
    grid = overview_grid(both)
    assert [row[0].split(" on ")[1] for row in grid.rows] == [
        "hetero-1, poisson arrivals",
        "homogeneous, poisson arrivals",
    ]
    assert grid.columns[2:6] == POLICIES
    assert grid.rows[0][2].startswith("0.32")
    assert grid.rows[0][5].startswith("≥ 3.2")
    assert {len(row) for row in grid.rows} == {len(grid.columns)}
    assert grid.title in page(both, {SETTING: {}, other: {}}, "")
    assert grid.title in markdown(both)
    (axes,) = overview_figure(both).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [row[0] for row in grid.rows]
    legend = overview_figure(both).legends[0]
    assert len(legend.get_texts()) == len(both.contenders())


def test_several_settings_have_a_plot_of_all(tmp_path: Path):
    """A file of its own, and in the page."""
    other = msgspec.structs.replace(SETTING, fleet="homogeneous")
    write(scripted(answer, settings=(SETTING, other)), tmp_path)
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.html").read_text().count("data:image/png") == 11


def test_every_row_is_as_wide_as_its_heading(found: Comparison):
    """Tables are rectangular in every form."""
    for grid in grids_of(found, SETTING):
        assert {len(row) for row in grid.rows} <= {len(grid.columns)}
        assert rich_table(grid).row_count == len(grid.rows)


def test_narrow_tables_say_the_means(found: Comparison):
    """Intervals go, numbers stay."""
    cells = [cell for row in without_intervals(grids_of(found, SETTING)[1]).rows for cell in row]
    assert not any("±" in cell for cell in cells)
    assert any(re.fullmatch(r"\d+", cell) for cell in cells)


@pytest.mark.parametrize(("num", "most"), [(15, 8), (8, 8), (9, 4), (1, 4)])
def test_wide_tables_keep_what_fits_and_the_last_column(num: int, most: int):
    """Evenly spaced loads, the highest among them."""
    columns = ("policy", *map(str, range(num)))
    thin = thinned(Grid(title="t", columns=columns, rows=(columns,)), most)
    assert thin.columns[0] == "policy"
    assert thin.columns[-1] == str(num - 1)
    assert len(thin.columns) - 1 <= most
    assert thin.rows == (thin.columns,)
    kept = [int(column) for column in thin.columns[1:]]
    assert len({b - a for a, b in itertools.pairwise(kept)}) <= 1


def test_narrow_screens_may_show_the_first_columns_only(found: Comparison):
    """The rest is in the report; rows are the same."""
    limits = grids_of(found, SETTING)[0]
    short = first_columns(limits, 3)
    assert short.columns == limits.columns[:3]
    assert [row[0] for row in short.rows] == [row[0] for row in limits.rows]
    assert {len(row) for row in short.rows} == {3}


def test_headlines_name_the_strongest_rival_and_the_usual_one(found: Comparison):
    """An easy win is not shown alone."""
    text = " ".join(headlines(found, SETTING))
    assert "strongest" in text
    assert "Against wb+fcfs, the strongest of the others here" in text
    assert "Against wb+fcfs (own flags)" in text
    assert "Against vllm, what most teams run today" in text


@pytest.fixture(scope="module")
def folder(found: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the comparison leaves on disk."""
    made = tmp_path_factory.mktemp("report")
    write(found, made)
    return made


def test_rates_outside_those_simulated_give_bounds_only():
    """A policy that holds at the highest rate gains at least; two of them cannot be told apart."""
    plan = Plan(
        setup=setup(),
        settings=(SETTING,),
        policies=("hexgen-flow", "rr+pq", "wb+fcfs"),
        rates=parse_rates("0.1,0.25"),
        seeds=(0,),
        tuning_seeds=(1_000_000,),
        alpha=0.1,
    )
    limits = grids_of(compare(plan, ScriptedRunner(answer)), SETTING)[0]
    cells = {row[0]: row for row in limits.rows}
    assert cells["hexgen-flow"][1] == "at least 0.25"
    assert cells["wb+fcfs"][3] == "–"
    assert cells["rr+pq"][3].startswith("≥ 1.6")


@pytest.mark.parametrize(("p95_s", "is_short"), [(49.0, False), (51.0, True)])
def test_runs_too_short_for_a_steady_state_are_called_so(p95_s: float, is_short: bool):
    """100 queries at 0.4/s are 250 s of arrivals: enough for a P95 of 50 s, five times over."""
    plan = Plan(
        setup=setup(),
        settings=(SETTING,),
        policies=("vllm",),
        rates=parse_rates("0.4"),
        seeds=(0,),
        tuning_seeds=(1_000_000,),
    )
    short = compare(plan, ScriptedRunner(lambda _job, _variant: measured(p95_s=p95_s)))
    assert ("Careful" in headlines(short, SETTING)[-1]) is is_short


def test_the_page_is_readable_in_the_dark(found: Comparison):
    """Colours follow the reader's setting; pictures stay on white."""
    text = page(found, {SETTING: {}}, "")
    assert "prefers-color-scheme: dark" in text
    assert "color-scheme: light dark" in text


def test_the_page_needs_no_network(folder: Path):
    """No script, no link, no style sheet, no image from elsewhere; every plot is inside."""
    text = (folder / "report.html").read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    sources = re.findall(r'src="([^"]{0,30})', text)
    assert len(sources) == 5
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_plots_tables_and_numbers_are_written_too(found: Comparison, folder: Path):
    """PNGs by setting and kind, the tables as Markdown, the runs as JSON."""
    names = {path.name for path in folder.iterdir()}
    stem = "natural-hetero-1-poisson"
    kinds = ("load", "limits", "instances", "ablation", "alpha")
    assert {f"{stem}-{kind}.png" for kind in kinds} < names
    assert (folder / f"{stem}-load.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "compare.json").read_text()) == comparison_json(found)
    assert "| hexgen-flow |" in (folder / "tables.md").read_text()


def test_names_are_shown_as_text_never_as_markup(found: Comparison):
    """A trace called `<script>` does nothing."""
    text = page(found, {SETTING: {}}, "hexflow compare --trace '<script>'")
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_markdown_rows_are_one_line_each(found: Comparison):
    """Headings of two lines become one."""
    rows = [line for line in markdown(found).splitlines() if line.startswith("|")]
    assert rows
    assert all(line.endswith("|") for line in rows)


def test_file_names_hold_no_separators():
    """Whatever the arrivals are called."""
    assert "/" not in slug(Setting(trace="a/b", fleet="c d", arrivals="gamma:2"))


def test_json_has_a_run_per_policy_rate_and_seed(found: Comparison):
    """Keys as promised; no NaN anywhere."""
    content = comparison_json(found)
    json.dumps(content, allow_nan=False)
    given = [run for run in content["runs"] if run["flags"] == "given"]
    assert len(given) == len(POLICIES) * 3 * 2
    promised = {"policy", "fleet", "rate_qps", "seed", "p50_s", "p95_s", "p99_s", "attainment"}
    assert promised | {"goodput_qps", "utilisation"} <= set(given[0])


def test_lanes_never_hold_two_calls_at_once():
    """The lowest free row is taken; five overlapping calls need five."""
    starts = np.array([0.0, 1.0, 2.0, 2.5, 6.0])
    ends = np.array([5.0, 2.0, 4.0, 3.0, 7.0])
    assert list(lanes(starts, ends)) == [0, 1, 1, 2, 0]


def test_a_gantt_has_a_panel_per_instance_and_one_of_open_queries():
    """Four instances, five panels."""
    result, scenario, _ = Workbench(setup(num_queries=5)).simulate(
        cell(), 0, Variant(policy="vllm")
    )
    figure = gantt_figure(result, scenario, "title")
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels[:4] == [spec.instance_id for spec in result.fleet]
    assert labels[4] == "open\nqueries"
