"""`hexflow bench tuner`: how long a full sweep over α takes on one core."""

import time
from typing import Annotated

import numpy as np
import typer

from services.cli.console import print_json, stderr_console, stdout_console
from services.cli.options import JsonOption
from shared.scheduling.shapes import shape_from_trace
from shared.simulation.fleets import builtin_fleet
from shared.simulation.generator import generate
from shared.simulation.scenario import Scenario
from shared.simulation.window_replay import sweep_scenario
from shared.simulation.workload import PoissonArrivals, prepare

WINDOW_S = 600.0
PAPER_RATE_QPS = 0.5
NUM_ALPHAS = 21
REPEATS = 3


def command(
    rate: Annotated[
        float, typer.Option(min=0.01, max=100.0, help="Queries per second.")
    ] = PAPER_RATE_QPS,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: JsonOption = False,
) -> None:
    """Time a sweep of 21 α over a ten-minute window on four instances (hetero-1), best of three.

    Laying out the workload, the event loops and the percentiles are included; loading the compiled
    simulator (once per process) is not. The time is the processor's: what else runs on the machine
    does not count.
    """
    scenario = window(rate, seed)
    alphas = [round(index / (NUM_ALPHAS - 1), 3) for index in range(NUM_ALPHAS)]
    with stderr_console().status("sweeping"):
        sweep_scenario(scenario, alphas[:1], core="compiled")
        sweep_s = min(_timed_s(scenario, alphas) for _ in range(REPEATS))
    calls = sum(query.num_calls for query in scenario.queries)
    if json:
        print_json({"sweep_s": sweep_s, "alphas": len(alphas), "calls": calls})
        return
    stdout_console().print(
        f"{len(alphas)} α × {len(scenario.queries)} queries ({calls:,} calls): {sweep_s:.3f} s"
    )


def window(rate_qps: float, seed: int) -> Scenario:
    """Return ten minutes of the paper's workload on four instances."""
    rng = np.random.default_rng(seed)
    fleet = builtin_fleet("hetero-1")
    drawn = generate(max(1, round(rate_qps * WINDOW_S)), rng, "stress")
    queries = prepare(drawn, fleet, PoissonArrivals(rate_qps), None, rng)
    return Scenario(queries=queries, fleet=fleet, shapes=shape_from_trace(drawn))


def _timed_s(scenario: Scenario, alphas: list[float]) -> float:
    started_s = time.process_time()
    sweep_scenario(scenario, alphas, core="compiled")
    return time.process_time() - started_s
