"""`hexflow bench stationary`: does tuning ever make a stationary workload worse?"""

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from services.cli.console import print_json, stderr_console, stdout_console
from services.cli.options import JsonOption
from services.cli.progress import JobProgress
from shared.simulation.stationary import StationaryResult, random_workload, run_stationary


def command(
    workloads: Annotated[int, typer.Option(min=1, max=1_000, help="How many.")] = 20,
    queries: Annotated[int, typer.Option(min=200, help="Queries per workload.")] = 10_200,
    window: Annotated[int, typer.Option(min=100, help="Queries between decisions.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Of the first workload.")] = 0,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Run at a time.")] = 2,
    json: JsonOption = False,
) -> None:
    """Tune random stationary workloads in simulation and compare P95 with the initial α's.

    Fleet, speeds, mix, load (20-85% of the fluid capacity), burstiness and the initial α are drawn;
    all runs of a workload share arrivals and lengths. Some twenty seconds per workload.
    """
    seeds = range(seed, seed + workloads)
    with (
        JobProgress(stderr_console()).stage("workloads", workloads) as advance,
        ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),
        ) as executor,
    ):
        futures = [executor.submit(run_seed, one, queries, window) for one in seeds]
        for _ in as_completed(futures):
            advance()
    results = [msgspec.msgpack.decode(future.result(), type=StationaryResult) for future in futures]
    if json:
        print_json(stationary_json(results))
    else:
        stdout_console().print(stationary_table(results))


def run_seed(seed: int, num_queries: int, window_queries: int) -> bytes:
    """Run one workload, packed to cross to another process."""
    workload = random_workload(seed, num_queries)
    result = run_stationary(workload, window_queries=window_queries, core="compiled")
    return msgspec.msgpack.encode(result)


def stationary_json(results: list[StationaryResult]) -> dict[str, Any]:
    """Return the JSON object of `hexflow bench stationary --json`."""
    return {
        "num_worse": sum(result.is_worse for result in results),
        "num_changes": sum(result.num_changes for result in results),
        "workloads": [
            {
                **msgspec.to_builtins(result),
                "is_worse": result.is_worse,
                "num_changes": result.num_changes,
            }
            for result in results
        ],
    }


def stationary_table(results: list[StationaryResult]) -> Table:
    """Return the results for people."""
    table = Table(title="stationary workloads, with and without tuning", title_justify="left")
    for name in ("workload", "α: from", "to", "changes", "P95 from", "to", "ratio (95%)", "worse"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.initial_alpha:g}",
            f"{result.alphas[-1]:.3g}",
            str(result.num_changes),
            f"{result.initial_p95_s:.1f}",
            f"{result.tuned_p95_s:.1f}",
            f"{result.ratio_low:.3f}-{result.ratio_high:.3f}",
            "yes" if result.is_worse else "no",
        )
    return table
