"""Runs jobs: draws the workload a job names, simulates its variants, measures them.

Every seed stands for the same queries in the same order, with the same SLOs and the same random
numbers behind their arrivals, whatever the policy, its parameters, the fleet and the rate: what is
compared differs in nothing else.
"""

import math
from collections.abc import Sequence
from itertools import groupby

import msgspec
import numpy as np

from services.cli.lab.setting import Cell, Job, Row, Setting, Setup, Variant
from services.cli.lab.steady import Floats, measure
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.scheduling.policies import DEFAULT_POLICY
from shared.scheduling.profiles import default_shapes, shape_from_trace
from shared.simulation.layout import Layout
from shared.simulation.results import RunResult
from shared.simulation.scenario import Scenario
from shared.simulation.simulator import CoreName, sweep
from shared.simulation.workload import (
    DEFAULT_SLO_SCALES,
    Arrivals,
    PoissonArrivals,
    RecordedArrivals,
    StepArrivals,
    TenantSlo,
    parse_arrivals,
    prepare,
)

BURSTY_CV = 2.0
STEP_LOW, STEP_HIGH = 0.6, 1.4
STEP_PHASE_QUERIES = 60
RECORDED = "recorded"
OWN_RATES = "step:"
_NO_TENANT = "default"

# Streams of random numbers, one for each thing that is drawn.
_ORDER, _ARRIVALS, _TENANTS = 1, 2, 3


class Workbench:
    """Draws workloads and runs them; keeps what several jobs need.

    Args:
        setup: What all jobs have in common.
        core: Which core simulates.
    """

    def __init__(self, setup: Setup, core: CoreName = "auto") -> None:
        self._setup = setup
        self._core = core
        self._shapes = {
            name: shape_from_trace(queries, priors=default_shapes())
            for name, queries in setup.traces.items()
        }
        self._alone: dict[tuple[str, str], tuple[TraceQuery, ...]] = {}

    def check(self, trace: str, fleet: str, arrivals: Sequence[str]) -> None:
        """Refuse a trace and a fleet that make no run.

        Raises:
            ConfigError: Names the query, the call or the setting.
        """
        queries = self._pool(trace, fleet)
        for text in arrivals:
            times_s = arrival_process(text, 1.0, queries).times_s(queries, np.random.default_rng(0))
            placed = [
                msgspec.structs.replace(query, arrival_s=arrival_s)
                for query, arrival_s in zip(queries, times_s, strict=True)
            ]
            setting = Setting(trace=trace, fleet=fleet, arrivals=text)
            cell = Cell(setting=setting, rate_qps=1.0)
            Layout(self.scenario(cell, tuple(placed), Variant(policy=DEFAULT_POLICY)))

    def run(self, job: Job, core: CoreName | None = None) -> list[Row]:
        """Return one row per variant of a job, in its order.

        Args:
            job: The work.
            core: Which core simulates, where not the bench's own.

        Raises:
            ConfigError: The job makes no run; names the place.
            SimulationFault: A run broke an invariant: a defect of the simulator.
        """
        queries, isolated_s = self.workload(job)
        tenants = [query.tenant for query in queries]
        rows = []
        for budget, variants in groupby(job.variants, key=lambda variant: variant.token_budget):
            scenarios = [self.scenario(job.cell, queries, one) for one in variants]
            for scenario, result in zip(
                scenarios, sweep(scenarios, core=core or self._core), strict=True
            ):
                result.check()
                rows.append(
                    Row(
                        cell=job.cell,
                        seed=job.seed,
                        variant=Variant(
                            policy=scenario.policy, alpha=scenario.alpha, token_budget=budget
                        ),
                        slo_scale=job.slo_scale,
                        measured=measure(result, isolated_s, self._setup.window, tenants),
                    )
                )
        return rows

    def simulate(
        self, cell: Cell, seed: int, variant: Variant
    ) -> tuple[RunResult, Scenario, Floats]:
        """Return one whole run, what was run, and the isolated times of its queries, seconds."""
        queries, isolated_s = self.workload(Job(cell=cell, seed=seed, variants=(variant,)))
        scenario = self.scenario(cell, queries, variant)
        result = sweep([scenario], core=self._core)[0]
        result.check()
        return result, scenario, isolated_s

    def workload(self, job: Job) -> tuple[tuple[TraceQuery, ...], Floats]:
        """Return a job's queries and the isolated times their SLOs are multiples of, seconds."""
        setting, setup = job.cell.setting, self._setup
        recorded = setup.traces[setting.trace]
        pool = self._pool(setting.trace, setting.fleet)
        num_queries = None if setting.arrivals == RECORDED else setup.num_queries
        order = draw_order(len(pool), num_queries, job.seed)
        picked = [pool[index] for index in order]
        rng = np.random.default_rng([job.seed, _ARRIVALS])
        times_s = arrival_times_s(setting.arrivals, job.cell.rate_qps, picked, rng)
        owners = draw_tenants(len(order), setup.slo_scales, job.seed)
        queries = []
        for number, (index, arrival_s) in enumerate(zip(order, times_s, strict=True)):
            placed = msgspec.structs.replace(
                pool[index], query_id=f"{pool[index].query_id}.{number}", arrival_s=arrival_s
            )
            queries.append(with_slo(placed, recorded[index], owners[number], job.slo_scale, setup))
        return tuple(queries), np.array([query.slo_s or 0.0 for query in picked])

    def scenario(self, cell: Cell, queries: tuple[TraceQuery, ...], variant: Variant) -> Scenario:
        """Return what is simulated."""
        mesh = self._setup.mesh
        return Scenario(
            queries=queries,
            fleet=with_budget(self._setup.fleets[cell.setting.fleet], variant.token_budget),
            policy=variant.policy,
            alpha=variant.alpha,
            shapes=self._shapes[cell.setting.trace],
            oracle=mesh.oracle,
            num_dispatchers=mesh.dispatchers,
            state_delay_s=mesh.state_delay_s,
            hop_s=mesh.hop_s,
            admission=mesh.admission,
        )

    def _pool(self, trace: str, fleet: str) -> tuple[TraceQuery, ...]:
        """Return a trace's queries with the isolated time they are held to as SLO."""
        found = self._alone.get((trace, fleet))
        if found is None:
            recorded = self._setup.traces[trace]
            found = prepare(
                recorded,
                self._setup.fleets[fleet],
                PoissonArrivals(1.0),
                (1.0,),
                np.random.default_rng(0),
            )
            kept = [query.arrival_s for query in recorded]
            found = tuple(
                msgspec.structs.replace(query, arrival_s=arrival_s)
                for query, arrival_s in zip(found, kept, strict=True)
            )
            if self._setup.slo_base == "mean":
                found = with_mean_slo(found)
            self._alone[trace, fleet] = found
        return found


def with_mean_slo(queries: Sequence[TraceQuery]) -> tuple[TraceQuery, ...]:
    """Return the queries, all with the mean of their SLOs."""
    mean_s = sum(query.slo_s or 0.0 for query in queries) / len(queries)
    return tuple(msgspec.structs.replace(query, slo_s=mean_s) for query in queries)


def draw_order(num_recorded: int, num_queries: int | None, seed: int) -> list[int]:
    """Return which recorded queries are asked, in order.

    The trace is shuffled and asked again and again, so that every stretch of a run has its mix.

    Args:
        num_recorded: Queries of the trace.
        num_queries: Queries of the run; None: the trace once, as it is.
        seed: Seed.
    """
    if num_queries is None:
        return list(range(num_recorded))
    rng = np.random.default_rng([seed, _ORDER])
    rounds = math.ceil(num_queries / num_recorded)
    order = np.concatenate([rng.permutation(num_recorded) for _ in range(rounds)])
    return [int(index) for index in order[:num_queries]]


def draw_tenants(num: int, scales: Sequence[float], seed: int) -> list[TenantSlo]:
    """Return who asks each query: one tenant per SLO scale, equally often."""
    rng = np.random.default_rng([seed, _TENANTS])
    tenants = [
        TenantSlo(tenant=f"slo-{scale:g}", scales=(scale,))
        for scale in scales or DEFAULT_SLO_SCALES
    ]
    return [tenants[int(index)] for index in rng.integers(0, len(tenants), num)]


def with_slo(
    query: TraceQuery,
    recorded: TraceQuery,
    owner: TenantSlo,
    one_scale: float | None,
    setup: Setup,
) -> TraceQuery:
    """Return a query with its tenant and SLO.

    Args:
        query: The query as drawn; its `slo_s` is its isolated time.
        recorded: The query as the trace has it.
        owner: The tenant drawn for it; a trace that names tenants keeps its own.
        one_scale: One scale for all, instead of everything else.
        setup: Whether SLOs are given or kept.
    """
    tenant = recorded.tenant if recorded.tenant != _NO_TENANT else owner.tenant
    alone_s = query.slo_s or 0.0
    scale = one_scale or owner.scales[0]
    slo_s = scale * alone_s
    if one_scale is None and not setup.slo_scales:
        if recorded.slo_s is not None:
            slo_s = recorded.slo_s
        elif recorded.slo_scale is not None:
            slo_s = recorded.slo_scale * alone_s
    return msgspec.structs.replace(query, tenant=tenant, slo_s=slo_s, slo_scale=None)


def arrival_times_s(
    text: str, rate_qps: float, queries: Sequence[TraceQuery], rng: np.random.Generator
) -> list[float]:
    """Return when each query arrives, seconds from the start.

    Drawn arrivals are stretched as a whole so that their mean rate is exactly the one asked for.
    Otherwise a run of 1,500 queries would be off by up to 5% of its load, as much as policies
    differ by.

    Args:
        text: See `arrival_process`.
        rate_qps: Mean rate, queries per second.
        queries: What arrives.
        rng: Source of randomness.

    Raises:
        ConfigError: The text is unknown, or the rate is not above 0.
    """
    times_s = arrival_process(text, rate_qps, queries).times_s(queries, rng)
    if text == RECORDED or text.startswith(OWN_RATES):
        return times_s
    stretch = len(times_s) / rate_qps / times_s[-1]
    return [time_s * stretch for time_s in times_s]


def arrival_process(text: str, rate_qps: float, queries: Sequence[TraceQuery]) -> Arrivals:
    """Return the arrival process of a run.

    Args:
        text: `poisson`; `bursty` (gamma gaps, coefficient of variation 2); `step` (the rate
            alternates between 60% and 140% of the mean); `recorded`, sped up to the rate; or any
            text that `parse_arrivals` knows.
        rate_qps: Mean rate, queries per second.
        queries: What arrives.

    Raises:
        ConfigError: The text is none of these, or the rate is not above 0.
    """
    if not (math.isfinite(rate_qps) and rate_qps > 0.0):
        raise ConfigError(f"the rate must be above 0 queries per second, is {rate_qps:g}")
    if text == "bursty":
        return parse_arrivals(f"gamma:{BURSTY_CV:g}", rate_qps)
    if text == "step":
        span_s = STEP_PHASE_QUERIES / rate_qps
        rounds = math.ceil(len(queries) / (2 * STEP_PHASE_QUERIES)) + 1
        low, high = (STEP_LOW * rate_qps, span_s), (STEP_HIGH * rate_qps, span_s)
        return StepArrivals((low, high) * rounds)
    if text == RECORDED:
        return RecordedArrivals(rate_qps / recorded_qps(queries))
    return parse_arrivals(text, rate_qps)


def recorded_qps(queries: Sequence[TraceQuery]) -> float:
    """Return the mean rate at which a trace was recorded, queries per second.

    Raises:
        ConfigError: Its queries have no arrivals, or all the same.
    """
    times = [query.arrival_s for query in queries if query.arrival_s is not None]
    if len(times) < len(queries):
        raise ConfigError("the trace records no arrivals; choose poisson, bursty or step")
    span_s = max(times) - min(times)
    if not span_s > 0.0:
        raise ConfigError("the trace's queries all arrive at once; choose poisson, bursty or step")
    return (len(times) - 1) / span_s


def with_budget(fleet: tuple[InstanceSpec, ...], token_budget: int) -> tuple[InstanceSpec, ...]:
    """Return the fleet with another token budget per iteration; 0 leaves it as it is."""
    if token_budget == 0:
        return fleet
    return tuple(msgspec.structs.replace(spec, max_batched_tokens=token_budget) for spec in fleet)
