"""The two runs that fidelity compares: a workload on a real engine, and in the simulator.

Both run the mesh: the real one with dispatcher, queue and worker in front of the engine, the
simulated one with the same policy on the profiled instance. Neither the lengths nor the arrivals of
the workload were part of the profile.
"""

import asyncio
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from services.cli.embedded import EmbeddedParams, open_embedded
from services.cli.interrupts import unless
from services.cli.real_engines import OpenEngine
from services.cli.session import drive, new_run_id
from services.cli.tally import Tally
from services.cli.watch import MeshWatch, watching
from shared.contracts.messages import CallOutcome
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.errors import TransientError
from shared.scheduling.attainment import percentile
from shared.simulation.scenario import Scenario
from shared.simulation.simulator import simulate
from shared.simulation.workload import PoissonArrivals, prepare

WORKFLOW = "fidelity"  # unknown to the built-in profiles, whose prompts are far longer
POLICY, ALPHA = "hexgen-flow", 0.1
LOOK_S = 0.5
HOP_S = 0.003
STATE_DELAY_S = 0.05
SLO_SCALE = 20.0
PROMPT_S = 0.6
LEAST_TOKENS = 8
REVISE_SHARE = 0.5
SPREAD = 0.45


class CallTiming(msgspec.Struct, frozen=True, kw_only=True):
    """When things happened to a call, seconds from when it became ready.

    Attributes:
        first_token_s: First token.
        end_s: Last token.
        output_tokens: Generated, tokens.
    """

    first_token_s: float
    end_s: float
    output_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first, seconds; None for one token."""
        if self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)


class RunTimings(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as both sides tell it.

    Attributes:
        calls: Every call.
        queries_s: End-to-end time of every query, seconds.
    """

    calls: tuple[CallTiming, ...]
    queries_s: tuple[float, ...]

    def call_latency_s(self, percent: float) -> float:
        """Return a percentile of the calls' time from ready to last token, seconds."""
        return percentile([call.end_s for call in self.calls], percent)

    def mean_call_latency_s(self) -> float:
        """Return the calls' mean time from ready to last token, seconds; no calls: not a number.

        It hardly depends on which of two calls went first, as percentiles of few calls do.
        """
        return sum(call.end_s for call in self.calls) / len(self.calls) if self.calls else math.nan

    def ttft_s(self) -> float:
        """Return the median time from ready to first token, seconds."""
        return percentile([call.first_token_s for call in self.calls], 50)

    def tpot_s(self) -> float:
        """Return the median time per token after the first, seconds."""
        return percentile([tpot for call in self.calls if (tpot := call.tpot_s) is not None], 50)

    def query_s(self, percent: float) -> float:
        """Return a percentile of the queries' time, seconds."""
        return percentile(list(self.queries_s), percent)


def small_queries(spec: InstanceSpec, count: int, seed: int) -> tuple[TraceQuery, ...]:
    """Return Text-to-SQL-shaped queries small enough for an instance: one to three in parallel.

    Args:
        spec: The instance: a typical prompt takes it about half a second.
        count: How many.
        seed: Of the lengths and the number of revisions.
    """
    rng = np.random.default_rng(seed)
    typical = PROMPT_S / spec.latency.prefill_s_per_token
    longest = min(spec.max_context_tokens // 2, 3 * typical)

    def call(prompt_share: float, output: float) -> TraceCall:
        scale = float(rng.lognormal(0.0, SPREAD))
        prompt = max(LEAST_TOKENS, min(longest, typical * prompt_share * scale))
        length = max(2, round(output * float(rng.lognormal(0.0, SPREAD))))
        return TraceCall(input_tokens=round(prompt), output_tokens=min(length, 96))

    def query(number: int) -> TraceQuery:
        stages = [
            TraceStage(stage="link", calls=(call(0.8, 6),)),
            TraceStage(
                stage="draft",
                calls=tuple(call(1.0, 24) for _ in range(int(rng.integers(2, 4)))),
            ),
        ]
        if rng.random() < REVISE_SHARE:
            stages.append(TraceStage(stage="revise", calls=(call(0.6, 20),)))
        stages.append(TraceStage(stage="judge", calls=(call(0.5, 4),)))
        return TraceQuery(
            query_id=f"f{number:05d}",
            workflow=WORKFLOW,
            model=spec.model,
            stages=tuple(stages),
        )

    return tuple(query(number) for number in range(count))


def with_arrivals(
    queries: Sequence[TraceQuery], spec: InstanceSpec, rate_qps: float, seed: int
) -> tuple[TraceQuery, ...]:
    """Return the queries with Poisson arrivals and generous SLOs."""
    rng = np.random.default_rng([seed, round(rate_qps * 1e6)])
    return prepare(queries, (spec,), PoissonArrivals(rate_qps), (SLO_SCALE,), rng)


def knee_qps(queries: Sequence[TraceQuery], spec: InstanceSpec) -> float:
    """Return the rate at which the simulated instance is saturated: all queries at one instant."""
    at_once = [msgspec.structs.replace(query, arrival_s=0.0, slo_s=1e6) for query in queries]
    result = simulate(_scenario(tuple(at_once), spec))
    return len(queries) / float(np.nanmax(result.end_s))


def simulated_run(queries: Sequence[TraceQuery], spec: InstanceSpec) -> RunTimings:
    """Return what the simulator says of a workload."""
    result = simulate(_scenario(tuple(queries), spec))
    calls = tuple(
        CallTiming(
            first_token_s=float(first_s - ready_s),
            end_s=float(end_s - ready_s),
            output_tokens=int(tokens),
        )
        for first_s, end_s, ready_s, tokens in zip(
            result.first_token_s,
            result.call_end_s,
            result.ready_s,
            result.output_tokens,
            strict=True,
        )
        if math.isfinite(end_s)
    )
    return RunTimings(calls=calls, queries_s=tuple(map(float, result.latency_s)))


def _scenario(queries: tuple[TraceQuery, ...], spec: InstanceSpec) -> Scenario:
    # No shapes: nothing is known of the workflow here, as in the mesh, which has no tuner.
    return Scenario(
        queries=queries,
        fleet=(spec,),
        policy=POLICY,
        alpha=ALPHA,
        hop_s=HOP_S,
        state_delay_s=STATE_DELAY_S,
        one_by_one=True,
    )


class RecordingTally(Tally):
    """A tally that also keeps every outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[CallOutcome] = []

    def call_ended(self, outcome: CallOutcome, now_s: float) -> None:
        """Take the outcome of a call."""
        self.outcomes.append(outcome)
        super().call_ended(outcome, now_s)


async def real_run(
    queries: Sequence[TraceQuery],
    spec: InstanceSpec,
    open_engine: OpenEngine,
    stop: asyncio.Event,
    tally: RecordingTally | None = None,
) -> RunTimings:
    """Return what really became of a workload, through the whole mesh.

    Raises:
        TransientError: Not every query was answered, or the engine failed call after call.
    """
    tally = tally or RecordingTally()
    params = EmbeddedParams(
        fleet=(spec,), policy=POLICY, alpha=ALPHA, tunes=False, open_engine=open_engine
    )
    async with open_embedded(params) as mesh, watching(mesh) as watch:
        driving = drive(mesh, queries, tally, stop, new_run_id(0))
        await unless(driving, _look_for_failures(watch))  # what comes then tells nothing
    if tally.queries["completed"] < len(queries) and not stop.is_set():
        reasons = ", ".join(f"{name} {count}" for name, count in tally.reasons.items())
        raise TransientError(f"only {tally.queries['completed']} queries were answered: {reasons}")
    return RunTimings(
        calls=tuple(timing for one in tally.outcomes if (timing := _timing(one)) is not None),
        queries_s=tuple(end.latency_s for end in tally.ends if end.completed),
    )


async def _look_for_failures(watch: MeshWatch) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        for instance_id in watch.failing():
            raise TransientError(f"{instance_id} fails call after call: see the log")


def _timing(outcome: CallOutcome) -> CallTiming | None:
    times = outcome.times
    if times.ready_at_s is None or times.first_token_at_s is None or times.finished_at_s is None:
        return None
    return CallTiming(
        first_token_s=times.first_token_at_s - times.ready_at_s,
        end_s=times.finished_at_s - times.ready_at_s,
        output_tokens=outcome.usage.output_tokens,
    )
