"""Does tuning ever make a stationary workload worse? The tuner's decisions, in simulation.

A long stationary workload is run under the initial α, and tuned: when a window's queries have ended
the tuner replays them exactly as it does live (what led up to them, then the window, without the
future) and may change α from that instant on. The workload is then run again from the beginning
with all changes so far, so transients are what they would be. All runs share arrivals and lengths
(common random numbers).
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
from shared.simulation.scenario import Change, Scenario
from shared.simulation.simulator import CoreName, simulate
from shared.simulation.window_replay import Past, ReplayRequest, replay_window, shares_of
from shared.simulation.workload import GammaArrivals, Mode, PoissonArrivals, prepare

DISTINCT_QUERIES = 600
BLOCK_QUERIES = 100
RESAMPLES = 400
LEAD_IN = 300
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
        alphas: α at first, and after each window.
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
    core: CoreName = "auto",
    on_window: Callable[[], None] = lambda: None,
) -> StationaryResult:
    """Run a workload with and without tuning.

    Args:
        workload: What to run.
        window_queries: Queries between decisions.
        rules: How to decide; None uses the defaults.
        core: See `simulate`.
        on_window: Called after each window.
    """
    scenario = workload.scenario
    initial = tuned = simulate(scenario, core=core)
    tuning = _Tuning(scenario, rules or TuningRules(), core)
    stops = range(window_queries, len(scenario.queries), window_queries)
    for stop in stops:
        if tuning.decide(tuned, stop - window_queries, stop):
            tuned = simulate(tuning.scenario, core=core)
        on_window()
    low, high = _ratio_interval(initial.latency_s, tuned.latency_s)
    return StationaryResult(
        name=workload.name,
        num_queries=len(scenario.queries),
        initial_alpha=scenario.alpha,
        alphas=tuple(tuning.alphas),
        initial_p95_s=percentile(initial.latency_s.tolist(), 95),
        tuned_p95_s=percentile(tuned.latency_s.tolist(), 95),
        ratio_low=low,
        ratio_high=high,
    )


class _Tuning:
    """The tuner's decisions about one workload, window after window.

    Args:
        scenario: The workload under the initial α.
        rules: How to decide.
        core: See `simulate`.
    """

    def __init__(self, scenario: Scenario, rules: TuningRules, core: CoreName) -> None:
        self.scenario = scenario
        self.alphas = [scenario.alpha]
        self._rules = rules
        self._core = core
        self._decided_at_s = 0.0

    def decide(self, run: RunResult, start: int, stop: int) -> bool:
        """Decide when a window's queries have ended; return whether α changes from then on.

        Args:
            run: The whole workload with all changes so far.
            start: First query of the window.
            stop: The one after its last.
        """
        current = self.alphas[-1]
        self._decided_at_s = max(self._decided_at_s, float(run.end_s[start:stop].max()))
        first = max(0, start - LEAD_IN)
        warm_up = start - first or warm_up_of(stop - start)
        request = self._request(first, stop, warm_up)
        answer = replay_window(request, core=self._core)
        judgement = judge(
            answer.runs,
            current=current,
            previous=next((alpha for alpha in reversed(self.alphas) if alpha != current), None),
            observed=Observed(
                p95_s=percentile(run.latency_s[first + warm_up : stop].tolist(), 95),
                num_queries=stop - start,
                shares=_shares(run, start, stop),
            ),
            rules=self._rules,
            as_it_was=answer.as_it_was,
            warm_up=warm_up,
        )
        chosen = judgement.decision.alpha
        self.alphas.append(chosen)
        if chosen == current:
            return False
        change = Change(at_s=self._decided_at_s, alpha=chosen)
        self.scenario = msgspec.structs.replace(
            self.scenario, changes=(*self.scenario.changes, change)
        )
        return True

    def _request(self, first: int, stop: int, warm_up: int) -> ReplayRequest:
        scenario = self.scenario
        origin_s = scenario.queries[first].arrival_s or 0.0
        queries = tuple(
            msgspec.structs.replace(query, arrival_s=(query.arrival_s or 0.0) - origin_s)
            for query in scenario.queries[first:stop]
        )
        before = [change.alpha for change in scenario.changes if change.at_s <= origin_s]
        return ReplayRequest(
            queries=queries,
            fleet=scenario.fleet,
            policy=scenario.policy,
            shapes=shape_from_trace(queries),
            current=self.alphas[-1],
            past=Past(
                alpha=[scenario.alpha, *(alpha for alpha in before if alpha is not None)][-1],
                shapes=dict(scenario.shapes),
                believed_factors=dict(scenario.believed),
                changes=tuple(
                    msgspec.structs.replace(change, at_s=change.at_s - origin_s)
                    for change in scenario.changes
                    if change.at_s > origin_s
                ),
            ),
            speed_factors=dict(scenario.speed_factors),
            warm_up=warm_up,
        )


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
