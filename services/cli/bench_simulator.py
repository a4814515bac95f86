"""`hexflow bench simulator`: how fast the compiled simulator is on one core of this machine."""

import subprocess
import sys
import time
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from services.cli.console import print_json, stderr_console, stdout_console
from services.cli.options import JsonOption
from shared.errors import MeshError
from shared.simulation.benchmark import SimulatorFigures, measure_simulator

DEFAULT_QUERIES = 20_000

_FRESH = """
from shared.simulation.benchmark import paper_scenario
from shared.simulation.simulator import simulate
simulate(paper_scenario(1, 0), core="compiled")
"""


class FreshProcessFailed(MeshError):
    """The simulator could not be run in a process of its own."""

    reason = "fresh_process_failed"


def fresh_process_s() -> float:
    """Return how long a new process takes from its start to the end of its first compiled run.

    Raises:
        FreshProcessFailed: It ended with an error.
    """
    started_s = time.perf_counter()
    done = subprocess.run(  # noqa: S603 - our own interpreter and our own text
        [sys.executable, "-c", _FRESH], capture_output=True, text=True, check=False
    )
    spent_s = time.perf_counter() - started_s
    if done.returncode != 0:
        raise FreshProcessFailed(f"a fresh process failed: {done.stderr.strip()[-500:]}")
    return spent_s


def figures_json(
    figures: SimulatorFigures, cpu: SimulatorFigures, fresh_s: float
) -> dict[str, Any]:
    """Return the JSON object of `hexflow bench simulator --json`."""
    content: dict[str, Any] = msgspec.to_builtins(figures)
    return {
        **content,
        "cpu_calls_per_s": cpu.calls_per_s,
        "cpu_sweep_s": cpu.sweep_s,
        "fresh_process_s": fresh_s,
    }


def figures_table(figures: SimulatorFigures, cpu: SimulatorFigures, fresh_s: float) -> Table:
    """Return the figures for people; `cpu` are the same by the processor's clock."""
    table = Table(title="the simulator on one core", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    sweep = f"{figures.sweep_alphas} α × {figures.sweep_queries} queries"
    for name, text in (
        ("one run", f"{figures.calls_per_s:,.0f} calls/s, {figures.num_calls:,} calls"),
        ("the same, per second of processor time", f"{cpu.calls_per_s:,.0f} calls/s"),
        ("its event loop alone", f"{figures.event_loop_calls_per_s:,.0f} calls/s"),
        ("instants visited per call", f"{figures.instants_per_call:.2f}"),
        (f"replay of {sweep}", f"{figures.sweep_s:.3f} s, {figures.sweep_calls:,} calls each"),
        ("the same, processor time", f"{cpu.sweep_s:.3f} s"),
        ("ready in this process", f"{figures.ready_s:.2f} s"),
        ("fresh process, to the end of a run", f"{fresh_s:.2f} s"),
    ):
        table.add_row(name, text)
    return table


def command(
    queries: Annotated[
        int, typer.Option(min=100, max=1_000_000, help="Queries of the long run.")
    ] = DEFAULT_QUERIES,
    json: JsonOption = False,
) -> None:
    """Measure simulated calls per second, a replay over α, and the time to start.

    The workload is the paper's: hetero-1 near its capacity, long revision chains, the paper's
    policy. The first run on a machine compiles the simulator, which takes about half a minute.
    """
    console = stderr_console()
    with console.status("simulating"):
        figures = measure_simulator(time.perf_counter, num_queries=queries)
        # What one core does, also on a machine that is busy with other things.
        cpu = measure_simulator(time.process_time, num_queries=queries)
        fresh_s = fresh_process_s()
    if json:
        print_json(figures_json(figures, cpu, fresh_s))
    else:
        stdout_console().print(figures_table(figures, cpu, fresh_s))
