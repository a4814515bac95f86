"""The adaptation experiment's workload: phases in which the best α differs.

One workflow of three stages: a draft, three candidates in parallel, a judge. What changes from
phase to phase is how long answers are, how many queries come, how fast an instance is and whether
prompts are cached; the producer says nothing of it to anyone.
"""

import msgspec
import numpy as np

from shared.domain.instance import InstanceSpec
from shared.domain.profile import StageEstimate, WorkflowShape
from shared.domain.trace import PrefixPart, TraceCall, TraceQuery, TraceStage
from shared.scheduling.policies import DEFAULT_ALPHA
from shared.scheduling.profiles import FleetTimes
from shared.scheduling.shapes import shape_from_trace
from shared.simulation.scenario import Scenario

WORKFLOW = "agent"
STAGES = (("draft", 1, 0.6), ("candidates", 3, 1.0), ("judge", 1, 0.4))
INPUT_TOKENS = 1_500
TEMPLATE_TOKENS = 1_000
SPREAD = 0.5
SLO_FACTOR = 5.0
PHASE_QUERIES = 2_400


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time with one kind of load.

    Attributes:
        name: For people.
        rate_qps: Queries per second (Poisson).
        num_queries: How many arrive.
        output_tokens: Typical length of a candidate, tokens.
        slow: instance_id -> how many times slower it really is.
        caches: Whether engines find prefixes in their cache.
    """

    name: str
    rate_qps: float
    num_queries: int
    output_tokens: int
    slow: dict[str, float] = {}
    caches: bool = True


def phases(scale: float = 1.0) -> tuple[Phase, ...]:
    """Return the experiment's phases; `scale` multiplies their lengths."""
    count = max(60, round(scale * PHASE_QUERIES))
    slow = {"a100-0": 3.0}
    return (
        Phase(name="short answers", rate_qps=0.6, num_queries=count, output_tokens=60),
        Phase(name="long answers", rate_qps=0.6, num_queries=count, output_tokens=300),
        Phase(
            name="an A100 is 3 × slower",
            rate_qps=0.6,
            num_queries=count,
            output_tokens=300,
            slow=slow,
        ),
        Phase(
            name="rate doubled",
            rate_qps=1.2,
            num_queries=count,
            output_tokens=300,
            slow=slow,
        ),
        Phase(
            name="prefix caching lost, A100 repaired",
            rate_qps=1.2,
            num_queries=count,
            output_tokens=300,
            caches=False,
        ),
        Phase(
            name="quiet, cached, A100 slow again",
            rate_qps=0.3,
            num_queries=count,
            output_tokens=300,
            slow=slow,
        ),
    )


def queries_of(
    phase: Phase, fleet: tuple[InstanceSpec, ...], seed: int, prefix: str
) -> tuple[TraceQuery, ...]:
    """Return a phase's queries with arrivals from 0 on and an SLO of 5 × the isolated time."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1.0 / phase.rate_qps, phase.num_queries))
    found = [_query(phase, f"{prefix}-{index}", rng) for index in range(phase.num_queries)]
    times = FleetTimes(shape_from_trace(found), [(spec, 1.0) for spec in fleet])
    first = STAGES[0][0]
    slo_s = SLO_FACTOR * (times.stage_s(WORKFLOW, first) + times.remaining_s(WORKFLOW, first, 0))
    return tuple(
        msgspec.structs.replace(query, arrival_s=float(arrival_s), slo_s=slo_s)
        for query, arrival_s in zip(found, at_s, strict=True)
    )


def _query(phase: Phase, query_id: str, rng: np.random.Generator) -> TraceQuery:
    return TraceQuery(
        query_id=query_id,
        workflow=WORKFLOW,
        stages=tuple(
            TraceStage(
                stage=stage,
                calls=tuple(_call(phase, stage, share, rng) for _ in range(siblings)),
            )
            for stage, siblings, share in STAGES
        ),
    )


def _call(phase: Phase, stage: str, share: float, rng: np.random.Generator) -> TraceCall:
    output = phase.output_tokens * share * rng.lognormal(0.0, SPREAD)
    return TraceCall(
        input_tokens=TEMPLATE_TOKENS + int(rng.integers(200, 2 * (INPUT_TOKENS - TEMPLATE_TOKENS))),
        output_tokens=max(1, round(output)),
        prefix=(PrefixPart(f"template-{stage}", TEMPLATE_TOKENS),),
    )


def wrong_priors(factor: float) -> WorkflowShape:
    """Return what is believed of the workflow at first: lengths wrong by a factor, both ways."""
    truth = shape_from_trace(
        [_query(phases()[0], f"p{index}", np.random.default_rng(index)) for index in range(50)]
    )[WORKFLOW]
    factors = {
        stage: factor if index % 2 else 1.0 / factor for index, (stage, _, _) in enumerate(STAGES)
    }
    return msgspec.structs.replace(
        truth,
        stages={
            name: StageEstimate(
                input_tokens=estimate.input_tokens * factors[name],
                output_tokens=estimate.output_tokens * factors[name],
                max_output_tokens=estimate.max_output_tokens * factors[name],
                siblings=estimate.siblings,
            )
            for name, estimate in truth.stages.items()
        },
    )


def scenario_of_phase(
    phase: Phase,
    queries: tuple[TraceQuery, ...],
    fleet: tuple[InstanceSpec, ...],
    *,
    alpha: float = DEFAULT_ALPHA,
    hop_s: float = 0.0,
) -> Scenario:
    """Return a phase as a simulation in which everything about it is known."""
    return Scenario(
        queries=queries,
        fleet=tuple(msgspec.structs.replace(spec, prefix_caching=phase.caches) for spec in fleet),
        alpha=alpha,
        shapes=shape_from_trace(queries),
        speed_factors=phase.slow,
        hop_s=hop_s,
    )
