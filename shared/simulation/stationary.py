"""Does tuning ever make a stationary workload worse? The tuner's decisions, in simulation.

A long stationary workload is run under the initial α, and under the tuned one: after every window
the tuner replays it exactly as it does live (from an empty fleet, without the future) and may
change α for the next. A window's queries then take what they take in a run of the *whole* workload
under the α in force, so no window starts on an empty fleet; the transient after a change of α is
not modelled. All runs share arrivals and lengths (common random numbers).
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.scheduling.attainment import percentile
from shared.scheduling.judgement import Observed, judge, warm_up_of
from shared.scheduling.shapes import shape_from_trace
from shared.scheduling.tuning import ALPHA_GRID, TuningRules
from shared.simulation.capacity import fluid_capacity
from shared.simulation.fleets import BUILTIN_GPUS, builtin_fleet
from shared.simulation.generator import generate
from shared.simulation.results import RunResult
from shared.simulation.scenario import Scenario
from shared.simulation.simulator import simulate
from shared.simulation.window_replay import ReplayRequest, replay_window, shares_of
from shared.simulation.workload import GammaArrivals, Mode, PoissonArrivals, prepare

DISTINCT_QUERIES = 600
BLOCK_QUERIES = 100
RESAMPLES = 400
LOADS = (0.2, 0.85)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A random stationary workload.

    Attributes:
        name: For people.
        scenario: Queries, fleet and speeds under the initial α.
    """

    name: str
    scenario: Scenario


class StationaryResult(msgspec.Struct, frozen=True, kw_only=True):
    """What tuning did to one workload.

    Attributes:
        name: For people.
        num_queries: Queries run.
        initial_alpha: α at first.
        alphas: α in force in every window.
        initial_p95_s: P95 under the initial α throughout, seconds.
        tuned_p95_s: P95 with tuning, seconds.
        ratio_low: Lower 95% bound of tuned ÷ initial P95 (block bootstrap).
        ratio_high: Upper bound.
    """

    name: str
    num_queries: int
    initial_alpha: float
    alphas: tuple[float, ...]
    initial_p95_s: float
    tuned_p95_s: float
    ratio_low: float
    ratio_high: float

    @property
    def num_changes(self) -> int:
        """How often α changed."""
        return sum(a != b for a, b in zip(self.alphas, self.alphas[1:], strict=False))

    @property
    def is_worse(self) -> bool:
        """Whether tuning made it worse beyond the confidence interval."""
        return self.ratio_low > 1.0


def random_workload(seed: int, num_queries: int) -> Workload:
    """Return a stationary workload: fleet, speeds, mix, load, burstiness and α drawn."""
    rng = np.random.default_rng(seed)
    fleet_name = str(rng.choice(sorted(BUILTIN_GPUS)))
    fleet = builtin_fleet(fleet_name)
    speeds = {spec.instance_id: float(rng.choice([1.0, 1.0, 1.0, 2.0, 3.0])) for spec in fleet}
    mode: Mode = "stress" if rng.random() < 0.5 else "natural"
    drawn = generate(min(DISTINCT_QUERIES, num_queries), rng, mode)
    load = float(rng.uniform(*LOADS))
    rate_qps = load * _capacity_qps(drawn, fleet, speeds)
    is_bursty = rng.random() < 0.3
    arrivals = GammaArrivals(rate_qps, 2.0) if is_bursty else PoissonArrivals(rate_qps)
    picked = [drawn[int(index)] for index in rng.integers(0, len(drawn), num_queries)]
    renamed = [
        msgspec.structs.replace(query, query_id=f"q{index}") for index, query in enumerate(picked)
    ]
    alpha = float(rng.choice(ALPHA_GRID))
    slow = sum(factor > 1.0 for factor in speeds.values())
    return Workload(
        name=f"{fleet_name}, {slow} slow, {mode}, load {load:.2f}{', bursty' * is_bursty}",
        scenario=Scenario(
            queries=prepare(renamed, fleet, arrivals, None, rng),
            fleet=fleet,
            alpha=alpha,
            shapes=shape_from_trace(drawn),
            speed_factors=speeds,
        ),
    )


def _capacity_qps(
    queries: Sequence[TraceQuery], fleet: Sequence[InstanceSpec], speeds: dict[str, float]
) -> float:
    """Return the fluid capacity, lowered by what the slow instances lack."""
    share = sum(1.0 / speeds[spec.instance_id] for spec in fleet) / len(fleet)
    return share * fluid_capacity(queries, fleet).qps


def run_stationary(
    workload: Workload,
    *,
    window_queries: int = 600,
    rules: TuningRules | None = None,
    on_window: Callable[[], None] = lambda: None,
) -> StationaryResult:
    """Run a workload with and without tuning.

    Args:
        workload: What to run.
        window_queries: Queries between decisions.
        rules: How to decide; None uses the defaults.
        on_window: Called after each window.
    """
    scenario = workload.scenario
    runs = _Runs(scenario)
    alphas, latencies = [], []
    current, previous = scenario.alpha, None
    for start in range(0, len(scenario.queries), window_queries):
        stop = min(start + window_queries, len(scenario.queries))
        alphas.append(current)
        latencies.append(runs.under(current).latency_s[start:stop])
        if stop - start == window_queries and stop < len(scenario.queries):
            chosen = _decided(runs, current, previous, start, stop, rules or TuningRules())
            if chosen != current:
                current, previous = chosen, current
        on_window()
    initial_s, tuned_s = runs.under(scenario.alpha).latency_s, np.concatenate(latencies)
    low, high = _ratio_interval(initial_s, tuned_s)
    return StationaryResult(
        name=workload.name,
        num_queries=len(scenario.queries),
        initial_alpha=scenario.alpha,
        alphas=tuple(alphas),
        initial_p95_s=percentile(initial_s.tolist(), 95),
        tuned_p95_s=percentile(tuned_s.tolist(), 95),
        ratio_low=low,
        ratio_high=high,
    )


class _Runs:
    """The whole workload under every α that was in force, each run once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._results: dict[float, RunResult] = {}

    def under(self, alpha: float) -> RunResult:
        """Return the run under an α."""
        if alpha not in self._results:
            changed = msgspec.structs.replace(self.scenario, alpha=alpha)
            self._results[alpha] = simulate(changed)
        return self._results[alpha]


def _decided(
    runs: _Runs,
    current: float,
    previous: float | None,
    start: int,
    stop: int,
    rules: TuningRules,
) -> float:
    """Return α after a window, as the tuner decides it from the window alone."""
    scenario = runs.scenario
    origin_s = scenario.queries[start].arrival_s or 0.0
    queries = tuple(
        msgspec.structs.replace(query, arrival_s=(query.arrival_s or 0.0) - origin_s)
        for query in scenario.queries[start:stop]
    )
    answer = replay_window(
        ReplayRequest(
            queries=queries,
            fleet=scenario.fleet,
            policy=scenario.policy,
            shapes=shape_from_trace(queries),
            current=current,
            speed_factors=dict(scenario.speed_factors),
        )
    )
    result = runs.under(current)
    first = start + warm_up_of(stop - start)
    observed = Observed(
        p95_s=percentile(result.latency_s[first:stop].tolist(), 95),
        num_queries=stop - start,
        shares=_shares(result, start, stop),
    )
    judgement = judge(
        answer.runs, current=current, previous=previous, observed=observed, rules=rules
    )
    return judgement.decision.alpha


def _shares(result: RunResult, start: int, stop: int) -> dict[str, float]:
    inside = (result.call_query >= start) & (result.call_query < stop)
    tokens = np.bincount(
        result.call_instance[inside],
        weights=result.output_tokens[inside],
        minlength=len(result.fleet),
    )
    return shares_of(
        {spec.instance_id: int(count) for spec, count in zip(result.fleet, tokens, strict=True)}
    )


def _ratio_interval(initial_s: np.ndarray, tuned_s: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of tuned ÷ initial P95; neighbours in time are drawn together."""
    blocks = len(initial_s) // BLOCK_QUERIES
    if blocks < 2:
        return 0.0, np.inf
    size = blocks * BLOCK_QUERIES
    pairs = np.stack([initial_s[:size], tuned_s[:size]]).reshape(2, blocks, BLOCK_QUERIES)
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = pairs[:, rng.integers(0, blocks, blocks)].reshape(2, -1)
        initial, tuned = np.percentile(drawn, 95, axis=1)
        ratios.append(tuned / initial)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)
