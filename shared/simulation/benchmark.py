"""Measures the simulator on the paper's workload: `hexflow bench simulator`."""

from collections.abc import Callable

import msgspec
import numpy as np

from shared.domain.trace import TraceQuery
from shared.scheduling.shapes import shape_from_trace
from shared.scheduling.tuning import ALPHA_GRID
from shared.simulation.fleets import builtin_fleet
from shared.simulation.generator import generate
from shared.simulation.layout import Layout
from shared.simulation.rules import COMPILED_RULES
from shared.simulation.scenario import Scenario
from shared.simulation.simulator import simulate, sweep_alpha
from shared.simulation.workload import PoissonArrivals, prepare

FLEET = "hetero-1"
RATE_QPS = 0.2
WINDOW_QUERIES = 600
REPEATS = 3
ALPHAS = (*ALPHA_GRID, 0.15)


class SimulatorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of the compiled simulator on one core.

    Attributes:
        num_calls: Calls of the long run.
        calls_per_s: Simulated calls per second of a whole run: laying out the workload, the event
            loop and collecting the result; best of three.
        event_loop_calls_per_s: The same for the event loop alone; best of three.
        instants_per_call: Instants the event loop visited per call.
        sweep_queries: Queries of the window that was swept.
        sweep_calls: Calls of that window.
        sweep_alphas: How many α it was replayed under.
        sweep_s: Time of that sweep, layout included, seconds; best of three.
        ready_s: Time until the first small run was done: import, and compiling (first time on a
            machine) or loading from disk, seconds.
    """

    num_calls: int
    calls_per_s: float
    event_loop_calls_per_s: float
    instants_per_call: float
    sweep_queries: int
    sweep_calls: int
    sweep_alphas: int
    sweep_s: float
    ready_s: float


def measure_simulator(
    clock_s: Callable[[], float], *, num_queries: int = 20_000, seed: int = 0
) -> SimulatorFigures:
    """Measure the compiled simulator.

    Args:
        clock_s: A monotonic clock, seconds.
        num_queries: Queries of the long run (about 20 calls each).
        seed: Draws workload and arrivals.
    """
    window = paper_scenario(WINDOW_QUERIES, seed)
    started_s = clock_s()
    simulate(msgspec.structs.replace(window, queries=window.queries[:1]), core="compiled")
    ready_s = clock_s() - started_s
    swept = sweep_alpha(window, ALPHAS, core="compiled")
    sweep_s = _best(clock_s, lambda: sweep_alpha(window, ALPHAS, core="compiled"))
    long = paper_scenario(num_queries, seed)
    result = simulate(long, core="compiled")
    run_s = _best(clock_s, lambda: simulate(long, core="compiled"))
    num_calls = len(result.call_query)
    return SimulatorFigures(
        num_calls=num_calls,
        calls_per_s=num_calls / run_s,
        event_loop_calls_per_s=num_calls / min(_loop_s(clock_s, long) for _ in range(REPEATS)),
        instants_per_call=result.num_instants / num_calls,
        sweep_queries=WINDOW_QUERIES,
        sweep_calls=len(swept[0].call_query),
        sweep_alphas=len(ALPHAS),
        sweep_s=sweep_s,
        ready_s=ready_s,
    )


def paper_scenario(num_queries: int, seed: int) -> Scenario:
    """Return the paper's policy on hetero-1 near the fleet's capacity, stress revisions.

    Long runs repeat a window of queries.
    """
    rng = np.random.default_rng(seed)
    fleet = builtin_fleet(FLEET)
    drawn = generate(min(num_queries, WINDOW_QUERIES), rng, "stress")
    repeated: list[TraceQuery] = [drawn[index % len(drawn)] for index in range(num_queries)]
    queries = prepare(repeated, fleet, PoissonArrivals(RATE_QPS), None, rng)
    return Scenario(queries=queries, fleet=fleet, shapes=shape_from_trace(drawn))


def _loop_s(clock_s: Callable[[], float], scenario: Scenario) -> float:
    # Imports numba, which whoever only wants `paper_scenario` does not need.
    from shared.simulation.compiled import CompiledCore  # noqa: PLC0415

    rules = COMPILED_RULES[scenario.policy]
    core = CompiledCore(Layout(scenario).tables_for(scenario, *rules, is_last=True))
    started_s = clock_s()
    core.proceed()
    return clock_s() - started_s


def _best(clock_s: Callable[[], float], action: Callable[[], object]) -> float:
    times_s = []
    for _ in range(REPEATS):
        started_s = clock_s()
        action()
        times_s.append(clock_s() - started_s)
    return min(times_s)
