"""Turns queries into a workload: when they arrive, who asks, and by when they must be done.

`generate` (queries from statistics) is offered here too, so that one import serves.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np

from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError
from shared.scheduling.latency import service_s
from shared.simulation.generator import Mode, generate

__all__ = [
    "DEFAULT_SLO_SCALES",
    "Arrivals",
    "GammaArrivals",
    "Mode",
    "PoissonArrivals",
    "RecordedArrivals",
    "StepArrivals",
    "TenantSlo",
    "check_fits",
    "generate",
    "isolated_s",
    "parse_arrivals",
    "prepare",
]

DEFAULT_SLO_SCALES = (3.0, 4.0, 6.0, 8.0, 10.0)
_ANY_MODEL = "default"


class Arrivals(Protocol):
    """An arrival process."""

    def times_s(self, queries: Sequence[TraceQuery], rng: np.random.Generator) -> list[float]:
        """Return one arrival per query, seconds from the start, never decreasing."""
        ...


class PoissonArrivals(msgspec.Struct, frozen=True):
    """Independent arrivals at a constant rate.

    Attributes:
        rate_qps: Mean queries per second, > 0.
    """

    rate_qps: float

    def times_s(self, queries: Sequence[TraceQuery], rng: np.random.Generator) -> list[float]:
        """Return cumulated exponential gaps.

        Raises:
            ConfigError: The rate is not a positive number.
        """
        rate = _positive(self.rate_qps, "the arrival rate")
        gaps = rng.exponential(1.0 / rate, len(queries))
        return [float(time) for time in np.cumsum(gaps)]


class GammaArrivals(msgspec.Struct, frozen=True):
    """Bursty arrivals: gamma-distributed gaps.

    Attributes:
        rate_qps: Mean queries per second, > 0.
        cv: Coefficient of variation of the gaps, > 0; 1 is Poisson, larger is burstier.
    """

    rate_qps: float
    cv: float = 2.0

    def times_s(self, queries: Sequence[TraceQuery], rng: np.random.Generator) -> list[float]:
        """Return cumulated gamma gaps.

        Raises:
            ConfigError: The rate or the coefficient is not a positive number.
        """
        rate = _positive(self.rate_qps, "the arrival rate")
        cv = _positive(self.cv, "the coefficient of variation")
        gaps = rng.gamma(1.0 / cv**2, cv**2 / rate, len(queries))
        return [float(time) for time in np.cumsum(gaps)]


class StepArrivals(msgspec.Struct, frozen=True):
    """Poisson arrivals whose rate changes in steps.

    Attributes:
        phases: (rate in queries per second > 0, duration in seconds > 0); the last phase goes on
            until every query has arrived.
    """

    phases: tuple[tuple[float, float], ...]

    def times_s(self, queries: Sequence[TraceQuery], rng: np.random.Generator) -> list[float]:
        """Return arrivals of a unit-rate process, stretched by each phase's rate.

        Raises:
            ConfigError: There is no phase, or a rate or duration is not a positive number.
        """
        if not self.phases:
            raise ConfigError("step arrivals need at least one phase of rate and duration")
        starts_s, marks = [0.0], [0.0]
        for number, (rate, duration_s) in enumerate(self.phases):
            _positive(rate, f"the arrival rate of phase {number}")
            _positive(duration_s, f"the duration of phase {number}")
            starts_s.append(starts_s[-1] + duration_s)
            marks.append(marks[-1] + rate * duration_s)
        times = []
        for mark in np.cumsum(rng.exponential(1.0, len(queries))):
            phase = min(int(np.searchsorted(marks, mark, side="right")) - 1, len(self.phases) - 1)
            times.append(float(starts_s[phase] + (mark - marks[phase]) / self.phases[phase][0]))
        return times


class RecordedArrivals(msgspec.Struct, frozen=True):
    """The arrivals the trace itself names.

    Attributes:
        speed: How much faster than recorded to replay, > 0.
    """

    speed: float = 1.0

    def times_s(
        self,
        queries: Sequence[TraceQuery],
        rng: np.random.Generator,  # noqa: ARG002 - nothing is drawn
    ) -> list[float]:
        """Return the recorded arrivals.

        Raises:
            ConfigError: A query has no arrival, or one arrives before its predecessor.
        """
        speed = _positive(self.speed, "the replay speed")
        times = []
        for query in queries:
            if query.arrival_s is None:
                raise ConfigError(
                    f"query {query.query_id} has no recorded arrival; choose a rate instead"
                )
            times.append(query.arrival_s / speed)
        if any(later < earlier for earlier, later in pairwise(times)):
            raise ConfigError("recorded arrivals must not decrease; sort the trace by arrival")
        return times


def parse_arrivals(text: str, rate_qps: float | None = None) -> Arrivals:
    """Return the arrival process a short text names.

    Args:
        text: `poisson`, `gamma` or `gamma:CV`, `step:RATExSECONDS,RATExSECONDS,...`, `recorded`.
        rate_qps: Rate for those that need one.

    Raises:
        ConfigError: The text is none of these, or a rate is missing.
    """
    kind, _, argument = text.strip().partition(":")
    if kind == "recorded" and not argument:
        return RecordedArrivals()
    try:
        if kind == "step":
            phases = [phase.split("x") for phase in argument.split(",")]
            return StepArrivals(tuple((float(rate), float(span)) for rate, span in phases))
        if kind == "gamma":
            return GammaArrivals(_needed(rate_qps), float(argument) if argument else 2.0)
    except ValueError as exc:
        raise ConfigError(f"cannot read arrivals {text!r}: {exc}") from exc
    if kind == "poisson" and not argument:
        return PoissonArrivals(_needed(rate_qps))
    raise ConfigError(
        f"unknown arrivals {text!r}; known: poisson, gamma, gamma:CV, "
        "step:RATExSECONDS,..., recorded"
    )


class TenantSlo(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, how often, and how patiently.

    Attributes:
        tenant: Name.
        weight: Relative share of the queries, > 0.
        scales: SLO as a multiple of the query's isolated time; one is drawn per query.
    """

    tenant: str
    weight: float = 1.0
    scales: tuple[float, ...] = DEFAULT_SLO_SCALES


def isolated_s(query: TraceQuery, fleet: Sequence[InstanceSpec]) -> float:
    """Return how long a query takes alone, on an idle and cold instance, mean over the fleet.

    Per instance: the sum over stages of think time plus the longest sibling's service time.

    Args:
        query: The query (a chain; stages with other parents count as if in a chain).
        fleet: The instances; those that serve the query's model count.

    Returns:
        Seconds.

    Raises:
        ConfigError: No instance serves the query's model.
    """
    pool = [spec for spec in fleet if query.model == spec.model or query.model in spec.adapters]
    if not pool:
        raise _no_instance(query, fleet)
    speeds = Counter((spec.latency, spec.max_batched_tokens) for spec in pool)
    samples = {(spec.latency, spec.max_batched_tokens): spec for spec in pool}
    total_s = sum(count * _isolated_on(query, samples[speed]) for speed, count in speeds.items())
    return total_s / len(pool)


def _no_instance(query: TraceQuery, fleet: Sequence[InstanceSpec]) -> ConfigError:
    offered = ", ".join(sorted({spec.model for spec in fleet})) or "none"
    return ConfigError(
        f"query {query.query_id} asks for model {query.model!r}; the fleet offers: {offered}"
    )


def _isolated_on(query: TraceQuery, spec: InstanceSpec) -> float:
    return sum(
        stage.think_s + max(_service_s(call, spec) for call in stage.calls)
        for stage in query.stages
    )


def _service_s(call: TraceCall, spec: InstanceSpec) -> float:
    return service_s(
        spec,
        input_tokens=call.input_tokens,
        cached_tokens=0,
        output_tokens=call.output_tokens,
    )


def check_fits(queries: Sequence[TraceQuery], fleet: Sequence[InstanceSpec]) -> None:
    """Refuse a workload with a call that no instance can ever hold.

    Raises:
        ConfigError: Names the query, the stage and the room there is.
    """
    if not fleet:
        raise ConfigError("the fleet has no instances")
    room: dict[str, int] = {}
    for spec in fleet:
        for model in (spec.model, *spec.adapters):
            room[model] = max(room.get(model, 0), min(spec.max_context_tokens, spec.kv_tokens))
    for query in queries:
        model = _served_model(query, fleet)
        if model not in room:
            raise _no_instance(query, fleet)
        for stage in query.stages:
            _check_stage(query, stage, room[model])


def _check_stage(query: TraceQuery, stage: TraceStage, limit: int) -> None:
    for sibling, call in enumerate(stage.calls):
        tokens = call.input_tokens + call.output_tokens
        if tokens > limit:
            raise ConfigError(
                f"query {query.query_id}, stage {stage.stage}/{stage.iteration}, call {sibling}: "
                f"needs {tokens:,} tokens of context, the fleet's largest instance for model "
                f"{query.model!r} holds {limit:,}"
            )


def prepare(
    queries: Sequence[TraceQuery],
    fleet: Sequence[InstanceSpec],
    arrivals: Arrivals,
    slo_scales: Sequence[float] | None,
    rng: np.random.Generator,
    *,
    tenants: Sequence[TenantSlo] = (),
) -> tuple[TraceQuery, ...]:
    """Return the queries with arrivals, tenants and SLOs filled in, in order of arrival.

    A query that asks for model `default` gets the fleet's model where the fleet has only one.

    Args:
        queries: What is asked.
        fleet: Where it will run: the SLO is a multiple of the isolated time there.
        arrivals: When it is asked.
        slo_scales: Scales, one drawn per query; None keeps what the trace records (`slo_s`, else
            `slo_scale`) and draws only where nothing is recorded.
        rng: Source of randomness.
        tenants: Who asks, drawn by weight; each brings its own scales. Empty: the queries keep
            their tenants.

    Raises:
        ConfigError: Nothing to run, a rate or scale is not positive, no instance serves a model,
            or a call fits no instance.
    """
    if not queries:
        raise ConfigError("the workload has no queries")
    scales = tuple(slo_scales) if slo_scales is not None else DEFAULT_SLO_SCALES
    _check_scales(scales, tenants)
    check_fits(queries, fleet)
    times_s = arrivals.times_s(queries, rng)
    owners = _draw_tenants(len(queries), tenants, rng)
    prepared = []
    for query, arrival_s, owner in zip(queries, times_s, owners, strict=True):
        scale = float(rng.choice(owner.scales if owner else scales))
        placed = msgspec.structs.replace(
            query,
            arrival_s=arrival_s,
            model=_served_model(query, fleet),
            tenant=owner.tenant if owner else query.tenant,
        )
        prepared.append(_with_slo(placed, scale, fleet, keep=slo_scales is None and not owner))
    return tuple(prepared)


def _with_slo(
    query: TraceQuery, scale: float, fleet: Sequence[InstanceSpec], *, keep: bool
) -> TraceQuery:
    if keep and query.slo_s is not None:
        return query
    if keep and query.slo_scale is not None:
        scale = query.slo_scale
    return msgspec.structs.replace(query, slo_scale=scale, slo_s=scale * isolated_s(query, fleet))


def _draw_tenants(
    num_queries: int, tenants: Sequence[TenantSlo], rng: np.random.Generator
) -> list[TenantSlo | None]:
    if not tenants:
        return [None] * num_queries
    weights = np.array([tenant.weight for tenant in tenants])
    drawn = rng.choice(len(tenants), size=num_queries, p=weights / weights.sum())
    return [tenants[index] for index in drawn]


def _check_scales(scales: Sequence[float], tenants: Sequence[TenantSlo]) -> None:
    if not scales:
        raise ConfigError("at least one SLO scale is needed")
    for scale in scales:
        _positive(scale, "an SLO scale")
    for tenant in tenants:
        _positive(tenant.weight, f"the weight of tenant {tenant.tenant!r}")
        if not tenant.scales:
            raise ConfigError(f"tenant {tenant.tenant!r} needs at least one SLO scale")
        for scale in tenant.scales:
            _positive(scale, f"an SLO scale of tenant {tenant.tenant!r}")


def _served_model(query: TraceQuery, fleet: Sequence[InstanceSpec]) -> str:
    if query.model == _ANY_MODEL:
        models = {spec.model for spec in fleet}
        if len(models) == 1:
            return models.pop()
    return query.model


def _needed(rate_qps: float | None) -> float:
    if rate_qps is None:
        raise ConfigError("these arrivals need a rate in queries per second")
    return _positive(rate_qps, "the arrival rate")


def _positive(value: float, what: str) -> float:
    if not (math.isfinite(value) and value > 0.0):
        raise ConfigError(f"{what} must be a positive number, is {value}")
    return value
