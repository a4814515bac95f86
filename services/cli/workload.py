"""What a command runs: a trace file or a generated workload, on a fleet by name or file."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from services.cli.capacity import capacity_qps
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.simulation.fleets import builtin_fleet, parse_fleet
from shared.simulation.trace_file import parse_trace
from shared.simulation.workload import Arrivals, Mode, generate, parse_arrivals, prepare

DEFAULT_LOAD = 0.5
DEFAULT_NUM_QUERIES = 100
MAX_QUERIES = 100_000
BURSTY_CV = 2.0
STEP_LOW, STEP_HIGH = 0.6, 1.4
STEP_PHASE_QUERIES = 25


class WorkloadParams(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Attributes:
        trace: File in hexflow's format or the authors' JSON form; None: generate.
        mode: Mode of the generator (`natural`, `stress`) when there is no trace.
        limit: Most queries; None: the whole trace, or 100 generated ones.
        rate_qps: Mean queries per second; None: half of the fleet's estimated capacity.
        arrivals: `poisson`, `bursty`, `step`, or a text that `parse_arrivals` knows; None: as
            recorded where the trace records them and no rate is given, else `poisson`.
        slo_scales: SLO as multiples of a query's isolated time; empty: the default set.
        seed: Of everything that is drawn.
    """

    trace: Path | None = None
    mode: str | None = None
    limit: int | None = None
    rate_qps: float | None = None
    arrivals: str | None = None
    slo_scales: tuple[float, ...] = ()
    seed: int = 0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Queries ready to be injected.

    Attributes:
        name: For people.
        queries: With arrivals and SLOs, in order of arrival.
        rate_qps: Mean queries per second.
        capacity_qps: The fleet's estimated capacity for them.
    """

    name: str
    queries: tuple[TraceQuery, ...]
    rate_qps: float
    capacity_qps: float


def load_fleet(name_or_file: str) -> tuple[InstanceSpec, ...]:
    """Return a built-in fleet, or the one in a TOML file (a name with a dot or slash).

    Raises:
        ConfigError: There is no such fleet or file, or the file is wrong.
    """
    path = Path(name_or_file)
    if path.is_file() or path.suffix or "/" in name_or_file:
        return parse_fleet(read_file(path), str(path))
    return builtin_fleet(name_or_file)


def read_file(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror or exc}") from exc


def build_workload(params: WorkloadParams, fleet: Sequence[InstanceSpec]) -> Workload:
    """Return the queries with arrivals and SLOs for a fleet.

    Raises:
        ConfigError: A value is out of range, or the trace or the fleet is wrong.
    """
    rng = _rng(params.seed)
    name, queries = _queries(params, rng)
    capacity = capacity_qps(queries, fleet)
    rate = params.rate_qps if params.rate_qps is not None else DEFAULT_LOAD * capacity
    if not 0 < rate < math.inf:
        raise ConfigError(f"the rate must be above 0 queries per second, is {rate:g}")
    is_recorded = params.rate_qps is None and all(q.arrival_s is not None for q in queries)
    chosen = params.arrivals or ("recorded" if is_recorded else "poisson")
    arrivals = _arrivals(chosen, rate)
    prepared = prepare(queries, fleet, arrivals, params.slo_scales or None, rng)
    if params.rate_qps is None:
        rate = _mean_rate_qps(prepared, rate)
    return Workload(name=name, queries=prepared, rate_qps=rate, capacity_qps=capacity)


def generated(num_queries: int, mode: str, seed: int) -> tuple[TraceQuery, ...]:
    """Return generated queries without arrivals.

    Raises:
        ConfigError: The mode is unknown, or the number or the seed is out of range.
    """
    _check_number(num_queries)
    return generate(num_queries, _rng(seed), _mode(mode))


def _queries(
    params: WorkloadParams, rng: np.random.Generator
) -> tuple[str, tuple[TraceQuery, ...]]:
    if params.limit is not None and params.limit < 1:
        raise ConfigError(f"the limit must be at least 1 query, is {params.limit}")
    if params.trace is None:
        mode = params.mode or "natural"
        num = params.limit or DEFAULT_NUM_QUERIES
        _check_number(num)
        return f"generated, {mode}", generate(num, rng, _mode(mode))
    if params.mode is not None:
        raise ConfigError("a trace file and a generated workload exclude each other")
    queries = parse_trace(read_file(params.trace), str(params.trace))
    return params.trace.name, queries[: params.limit]


def _check_number(num_queries: int) -> None:
    if num_queries > MAX_QUERIES:
        raise ConfigError(f"at most {MAX_QUERIES:,} queries are generated, not {num_queries:,}")


def _rng(seed: int) -> np.random.Generator:
    if seed < 0:
        raise ConfigError(f"the seed must not be negative, is {seed}")
    return np.random.default_rng(seed)


def _mean_rate_qps(queries: Sequence[TraceQuery], intended_qps: float) -> float:
    """Return the rate at which queries really arrive; the intended one for a single instant."""
    arrivals_s = [query.arrival_s or 0.0 for query in queries]
    span_s = max(arrivals_s) - min(arrivals_s)
    return (len(queries) - 1) / span_s if span_s > 0 else intended_qps


def _mode(mode: str) -> Mode:
    for known in get_args(Mode):
        if known == mode:
            return known  # type: ignore[no-any-return]  # get_args knows no types
    raise ConfigError(f"unknown mode {mode!r}; known: {', '.join(get_args(Mode))}")


def _arrivals(text: str, rate_qps: float) -> Arrivals:
    if text == "bursty":
        text = f"gamma:{BURSTY_CV:g}"
    elif text == "step":
        phases = [
            f"{factor * rate_qps!r}x{STEP_PHASE_QUERIES / (factor * rate_qps)!r}"
            for factor in (STEP_LOW, STEP_HIGH) * 4
        ]
        text = f"step:{','.join(phases)}"
    return parse_arrivals(text, rate_qps)
