"""Replays a window of queries under several α: what the tuner and `hexflow tune` ask.

Everything that goes in and out is plain data, so that it can cross to another process.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.domain.trace import TraceQuery
from shared.scheduling.censoring import censored_percentile
from shared.scheduling.judgement import Replayed, p95_judged_s, warm_up_of
from shared.scheduling.policies import DEFAULT_ALPHA
from shared.scheduling.tuning import ALPHA_GRID, refine_alphas
from shared.simulation.results import RunResult
from shared.simulation.scenario import Change, Scenario
from shared.simulation.simulator import CoreName, simulate, sweep_alpha

MAX_REFINEMENTS = 2


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What was in force while a window happened; instants on the window's clock.

    Attributes:
        alpha: α at its beginning.
        shapes: What the dispatcher expected of workflows at its beginning.
        believed_factors: What it believed of speeds.
        hit_factors: What it believed of prefix caches.
        changes: What was said later.
        seen_until_s: When the window was looked at: what had not ended by then counts as running.
    """

    alpha: float
    shapes: dict[str, WorkflowShape]
    believed_factors: dict[str, float] = {}
    hit_factors: dict[str, float] = {}
    changes: tuple[Change, ...] = ()
    seen_until_s: float = math.inf


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A window to be replayed.

    Attributes:
        queries: Arrivals, structure and lengths.
        fleet: The instances, as they reported themselves.
        policy: Policy name.
        shapes: What the dispatcher is to expect.
        alphas: Values to try; the best of them is refined. Empty: only the one in force is run.
        current: α in force; it is always tried.
        past: What was in force in the window: one more run says whether the simulator reproduces
            it; None: what is in force now.
        speed_factors: How much slower than its profile each instance really is.
        believed_factors: What the dispatcher is to believe of that; None: the truth.
        hit_factors: Learned share of the expected prefix-cache hits that happen.
        cold: Instances whose prefix cache finds nothing.
        true_changes: When instances' speeds or caches changed within the window.
        hop_s: Time of one message between services, seconds.
        admission: Most calls an engine is given at a time; None: its `max_num_seqs`.
        max_batched_tokens: Prefill token budget of every engine; None: as the fleet has it.
        warm_up: How many of the first queries are not judged; None: a tenth.
        look_past: How many calls that lack memory a worker looks past, as workers do by default.
    """

    queries: tuple[TraceQuery, ...]
    fleet: tuple[InstanceSpec, ...]
    policy: str
    shapes: dict[str, WorkflowShape]
    alphas: tuple[float, ...] = ALPHA_GRID
    current: float = DEFAULT_ALPHA
    past: Past | None = None
    speed_factors: dict[str, float] = {}
    believed_factors: dict[str, float] | None = None
    hit_factors: dict[str, float] = {}
    cold: tuple[str, ...] = ()
    true_changes: tuple[Change, ...] = ()
    hop_s: float = 0.0
    admission: int | None = None
    max_batched_tokens: int | None = None
    warm_up: int | None = None
    look_past: int = 4


class ReplayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions for a window.

    Attributes:
        runs: One per α, smallest first.
        as_it_was: Under the α and the expectations in force in the window.
    """

    runs: tuple[Replayed, ...]
    as_it_was: Replayed


def replay_window(request: ReplayRequest, *, core: CoreName = "auto") -> ReplayAnswer:
    """Return what the window's queries would have taken under each α, on common arrivals.

    Raises:
        ConfigError: The request makes no run; names the place.
    """
    scenario = scenario_of(request)
    tried = {
        run.alpha: run
        for run in sweep_scenario(
            scenario,
            sorted({*request.alphas, request.current}),
            core=core,
            warm_up=request.warm_up,
        )
    }
    for _ in range(MAX_REFINEMENTS if request.alphas else 0):
        refined = refine_alphas({alpha: run.p95_s for alpha, run in tried.items()})
        if not refined:
            break
        more = sweep_scenario(scenario, refined, core=core, warm_up=request.warm_up)
        tried |= {run.alpha: run for run in more}
    runs = tuple(tried[alpha] for alpha in sorted(tried))
    return ReplayAnswer(runs=runs, as_it_was=_as_it_was(request, scenario, core, tried))


def scenario_of(request: ReplayRequest) -> Scenario:
    """Return the run a request describes, under the α in force."""
    fleet = request.fleet
    if request.max_batched_tokens is not None:
        fleet = tuple(
            msgspec.structs.replace(spec, max_batched_tokens=request.max_batched_tokens)
            for spec in fleet
        )
    return Scenario(
        queries=request.queries,
        fleet=fleet,
        policy=request.policy,
        alpha=request.current,
        shapes=request.shapes,
        speed_factors=request.speed_factors,
        believed_factors=request.believed_factors,
        hit_factors=request.hit_factors,
        cold=request.cold,
        changes=request.true_changes,
        hop_s=request.hop_s,
        admission=request.admission,
        look_past=request.look_past,
    )


def sweep_scenario(
    scenario: Scenario,
    alphas: Sequence[float],
    *,
    core: CoreName = "auto",
    warm_up: int | None = None,
) -> list[Replayed]:
    """Return predictions of one scenario under several α, in their order."""
    return [_replayed(result, warm_up) for result in sweep_alpha(scenario, alphas, core=core)]


def _as_it_was(
    request: ReplayRequest, scenario: Scenario, core: CoreName, tried: Mapping[float, Replayed]
) -> Replayed:
    past = request.past
    if past is None:
        return tried[request.current]
    then = msgspec.structs.replace(
        scenario,
        alpha=past.alpha,
        shapes=past.shapes,
        believed_factors=past.believed_factors,
        hit_factors=past.hit_factors,
        changes=tuple(sorted((*past.changes, *request.true_changes), key=_at_s)),
    )
    result = simulate(then, core=core)
    run = _replayed(result, request.warm_up)
    return msgspec.structs.replace(run, p95_s=_p95_seen_s(result, past, request.warm_up))


def _at_s(change: Change) -> float:
    return change.at_s


def _p95_seen_s(result: RunResult, past: Past, warm_up: int | None) -> float:
    """Return P95 as it would have been measured when the window was looked at, seconds."""
    start = warm_up_of(len(result.end_s)) if warm_up is None else warm_up
    ended = result.is_completed & (result.end_s <= past.seen_until_s)
    running = ~(result.end_s <= past.seen_until_s)
    return censored_percentile(
        result.latency_s[start:][ended[start:]].tolist(),
        (past.seen_until_s - result.arrival_s[start:][running[start:]]).tolist(),
        95,
    )


def _replayed(result: RunResult, warm_up: int | None) -> Replayed:
    ran = result.call_instance >= 0
    tokens = np.bincount(
        result.call_instance[ran], result.output_tokens[ran], minlength=len(result.fleet)
    )
    generated = {
        spec.instance_id: int(count) for spec, count in zip(result.fleet, tokens, strict=True)
    }
    latencies_s = tuple(result.latency_s.tolist())
    return Replayed(
        alpha=result.alpha,
        latencies_s=latencies_s,
        p95_s=p95_judged_s(latencies_s, warm_up),
        shares=shares_of(generated),
    )


def shares_of(generated: Mapping[str, int]) -> dict[str, float]:
    """Return instance_id -> share of the fleet's generated tokens, in [0, 1]."""
    total = sum(generated.values())
    return {key: tokens / total if total else 0.0 for key, tokens in generated.items()}
