"""`hexflow compare`: policies side by side on simulated fleets, with a report."""

import io
import shlex
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from matplotlib.figure import Figure
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

from services.cli.console import print_json, stderr_console, stdout_console
from services.cli.lab import options
from services.cli.lab.bench import OWN_RATES
from services.cli.lab.comparison import Comparison, Plan, compare
from services.cli.lab.figures import figures_of, overview_figure
from services.cli.lab.grids import (
    Grid,
    first_columns,
    grids_of,
    setting_title,
    thinned,
    without_intervals,
)
from services.cli.lab.headlines import headlines
from services.cli.lab.html import markdown, page
from services.cli.lab.jsonable import comparison_json
from services.cli.lab.pool import default_processes, open_runner
from services.cli.lab.rates import parse_rates
from services.cli.lab.setting import Setting, Setup
from services.cli.lab.steady import Window
from services.cli.options import JsonOption, parse_scales
from shared.errors import ConfigError

DEFAULT_OUT = Path("hexflow-compare")
DEFAULT_POLICIES = "hexgen-flow,wb+fcfs,rr+pq,vllm,least-outstanding,prefix-queue"
FIRST_TUNING_SEED = 1_000_000
MAX_SEEDS = 10_000
WIDE = 100

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Trace to draw queries from; again for several."),
    ] = None,
    generate: options.GenerateOption = None,
    fleet: Annotated[
        str, typer.Option(metavar="F[,F2]", help="Fleets by name, or fleet files (TOML).")
    ] = "hetero-1",
    policies: Annotated[
        str, typer.Option(help="Policies; the first is the one others are held against.")
    ] = DEFAULT_POLICIES,
    rates: Annotated[
        str,
        typer.Option(
            help="Queries per second (0.2,0.4), or shares of the fleet's upper bound "
            "(50%,60%..100% goes on in steps of 10%)."
        ),
    ] = "50%,60%..100%",
    seeds: Annotated[int, typer.Option(min=1, max=MAX_SEEDS, help="Measured seeds.")] = 3,
    seed: Annotated[
        int, typer.Option(min=0, max=FIRST_TUNING_SEED - MAX_SEEDS, help="The first of them.")
    ] = 0,
    arrivals: Annotated[
        list[str] | None,
        typer.Option(
            help="poisson (default), bursty, step, recorded, or gamma:CV; again for several."
        ),
    ] = None,
    alpha: Annotated[
        str, typer.Option(help="α of policies that have one, or `auto`: tuned on other seeds.")
    ] = "auto",
    token_budgets: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Also show every policy at its own best token budget of these.",
        ),
    ] = "",
    tuning_seeds: Annotated[
        int, typer.Option(min=1, max=1_000, help="Seeds for tuning, never measured.")
    ] = 2,
    queries: Annotated[
        int, typer.Option(min=10, max=10_000_000, help="Queries of one run.")
    ] = 3_000,
    warm_up: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of queries not measured, from the first.")
    ] = 0.2,
    cool_down: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of queries not measured, to the last.")
    ] = 0.1,
    slo_scales: options.ScalesOption = "",
    slo_base: options.SloBaseOption = "own",
    oracle: options.OracleOption = False,
    dispatchers: options.DispatchersOption = 1,
    state_delay: options.StateDelayOption = 0.0,
    hop: options.HopOption = 0.0,
    admission: options.AdmissionOption = None,
    prefix_caching: options.PrefixCachingOption = True,
    allow_unknown_steps: options.UnknownStepsOption = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=512, help="Processes; default: one per core.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.html, its plots, tables.md and compare.json; default: "
            f"{DEFAULT_OUT}, with --json none."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare policies on simulated fleets: times, deadlines met, and how close to the limit.

    Every policy meets the same queries. α is tuned per fleet, trace and rate on seeds that are
    not measured. Writes one HTML file that needs no network, its plots as PNG, and the tables.
    """
    fleets = options.load_fleets(fleet, prefix_caching=prefix_caching)
    setup = Setup(
        traces=options.load_traces(trace or [], generate, allow_unknown_steps=allow_unknown_steps),
        fleets=fleets,
        num_queries=queries,
        slo_scales=parse_scales(slo_scales),
        slo_base=options.parse_slo_base(slo_base),
        window=Window(warm_up=warm_up, cool_down=cool_down),
        mesh=options.mesh_model(
            oracle=oracle,
            dispatchers=dispatchers,
            state_delay=state_delay,
            hop=hop,
            admission=admission,
        ),
    )
    names = options.split(policies, "--policies")
    options.check_policies(names)
    processes = _arrivals(arrivals)
    options.check_setup(setup, processes)
    plan = Plan(
        setup=setup,
        settings=tuple(
            Setting(trace=one, fleet=two, arrivals=three)
            for one in setup.traces
            for two in fleets
            for three in processes
        ),
        policies=tuple(names),
        rates=parse_rates(rates),
        seeds=tuple(range(seed, seed + seeds)),
        tuning_seeds=tuple(range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + tuning_seeds)),
        alpha=_alpha(alpha),
        token_budgets=options.check_budgets(_budgets(token_budgets), fleets),
    )
    folder = out or (None if json else DEFAULT_OUT)
    if folder is not None:
        _prepare(folder)
    with open_runner(setup, jobs or default_processes(), stderr_console()) as runner:
        found = compare(plan, runner)
    if folder is not None:
        write(found, folder)
    if json:
        print_json(comparison_json(found))
        return
    _show(found)
    if folder is not None:
        stdout_console().print(f"report: {folder / 'report.html'}")


def write(found: Comparison, folder: Path) -> None:
    """Write the report, its plots, the tables and the numbers into a folder.

    Raises:
        ConfigError: It cannot be written.
    """
    images: dict[Setting, dict[str, bytes]] = {}
    for setting in found.plan.settings:
        figures = figures_of(found, setting)
        images[setting] = {name: _png(figure) for name, figure in figures.items()}
        for name, image in images[setting].items():
            _write_bytes(folder / f"{slug(setting)}-{name}.png", image)
    overview = None
    if len(found.plan.settings) > 1:
        overview = _png(overview_figure(found))
        _write_bytes(folder / "overview.png", overview)
    command_line = shlex.join(["hexflow", *sys.argv[1:]]) if "compare" in sys.argv[1:2] else ""
    _write_text(folder / "report.html", page(found, images, command_line, overview))
    _write_text(folder / "tables.md", markdown(found))
    _write_text(folder / "compare.json", msgspec.json.encode(comparison_json(found)).decode())


def slug(setting: Setting) -> str:
    """Return a setting's name for files."""
    name = f"{setting.trace}-{setting.fleet}-{setting.arrivals}"
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def rich_table(grid: Grid) -> Table:
    """Return a table for the terminal, without its title."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for number, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in grid.rows:
        table.add_row(*row)
    return table


def _show(found: Comparison) -> None:
    console = stdout_console()
    for setting in found.plan.settings:
        console.rule(setting_title(setting), align="left")
        for line in headlines(found, setting):
            console.print(f"- {line}", markup=False)
        limits, *others = grids_of(found, setting)
        if found.plan.token_budgets and console.width < WIDE:
            _print_grid(console, first_columns(without_intervals(limits, but=(1,)), 5))
        else:
            _print_grid(console, without_intervals(limits, but=(1, 3)))
        console.print(limits.note, style="dim", markup=False)
        for grid in others:
            if grid.rows:
                most = max(4, (console.width - 20) // 7)
                _print_grid(console, thinned(without_intervals(grid), most))


def _print_grid(console: Console, grid: Grid) -> None:
    console.print(f"\n{grid.title}", style="bold", markup=False, highlight=False)
    console.print(rich_table(grid))


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--out {folder} cannot be made: {exc.strerror or exc}") from exc


def _write_text(path: Path, text: str) -> None:
    _write_bytes(path, text.encode())


def _write_bytes(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def _png(figure: Figure) -> bytes:
    """Return a figure as PNG of 128 colours: a third of the size, and no visible difference."""
    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:
        few = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    few.save(packed, format="png", optimize=True)
    return packed.getvalue()


def _arrivals(names: list[str] | None) -> list[str]:
    chosen = list(dict.fromkeys(names or ["poisson"]))
    for name in chosen:
        if name.startswith(OWN_RATES):
            raise ConfigError(
                f"--arrivals {name!r} brings its own rates; `step` alternates around --rates"
            )
    return chosen


def _alpha(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        alpha = float(text)
    except ValueError as exc:
        raise ConfigError(f"--alpha {text!r}: a number in [0, 1], or auto") from exc
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"--alpha {text}: must be in [0, 1]")
    return alpha


def _budgets(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as exc:
        raise ConfigError(f"--token-budgets {text!r}: whole numbers are needed") from exc
