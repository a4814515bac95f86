"""Small fleets and hand-made workloads for tests of the simulator."""

from collections.abc import Sequence

import numpy as np

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.simulation.scenario import Scenario

SLO_S = 1e9


def make_spec(instance_id: str = "i0", **changes: object) -> InstanceSpec:
    """An A100-like instance."""
    latency = LatencyModel(
        prefill_s_per_token=1 / 5_000,
        weights_s=0.035,
        overhead_s=0.002,
        seq_s=0.0004,
        kv_s_per_token=1e-7,
        chunk_waste_tokens=64,
    )
    fields = {"instance_id": instance_id, "gpu": "A100", "latency": latency, **changes}
    return InstanceSpec(**fields)  # type: ignore[arg-type]


def make_query(
    number: int,
    stages: Sequence[Sequence[tuple[int, int]]],
    *,
    arrival_s: float = 0.0,
    slo_s: float = SLO_S,
    think_s: float = 0.0,
) -> TraceQuery:
    """A chain of stages, each a list of (input, output) tokens."""
    return TraceQuery(
        query_id=f"q{number}",
        workflow="w",
        stages=tuple(
            TraceStage(
                stage=f"s{index}",
                calls=tuple(TraceCall(input_tokens=i, output_tokens=o) for i, o in calls),
                think_s=think_s,
            )
            for index, calls in enumerate(stages)
        ),
        arrival_s=arrival_s,
        slo_s=slo_s,
    )


def queueing_scenario(
    rate_qps: float,
    services: np.ndarray,
    servers: int,
    rng: np.random.Generator,
) -> Scenario:
    """Poisson arrivals of one-call queries at a station of servers that work independently.

    The station is one instance whose decode steps take a unit of time whatever the batch, so
    each of its `max_num_seqs` places is a server.

    Args:
        rate_qps: Arrival rate per second.
        services: Service times in steps of one second / `STEPS_PER_S`.
        servers: Number of servers.
        rng: Draws the arrivals.
    """
    arrivals = np.cumsum(rng.exponential(1 / rate_qps, len(services)))
    queries = tuple(
        make_query(number, [[(1, int(steps))]], arrival_s=float(arrival))
        for number, (arrival, steps) in enumerate(zip(arrivals, services, strict=True))
    )
    spec = make_spec(
        max_num_seqs=servers,
        kv_tokens=10_000_000,
        max_context_tokens=10_000_000,
        latency=LatencyModel(prefill_s_per_token=0.0, weights_s=1 / STEPS_PER_S),
    )
    return Scenario(queries=queries, fleet=(spec,), policy="vllm")


STEPS_PER_S = 1_000
