"""What a run achieved in its steady part.

A simulated run starts on an empty fleet and ends with one that empties. Queries that arrive in the
first part (*warm-up*) and in the last (*cool-down*) are simulated like all others but not
measured: the former meet empty queues and cold caches, the latter are finished by a fleet to which
nothing new comes. Utilisation is that of the same stretch of time (up to the last end where there
is no cool-down). All queries run to their end,
so no latency is cut off.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.simulation.results import RunResult

Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a run is measured.

    Attributes:
        warm_up: Share of the queries, from the first, that are not measured.
        cool_down: Share of the queries, to the last, that are not measured.
    """

    warm_up: float = 0.2
    cool_down: float = 0.1

    def check(self) -> None:
        """Refuse shares that leave nothing to measure.

        Raises:
            ConfigError: A share is outside [0, 1), or they leave less than a tenth.
        """
        if not (0.0 <= self.warm_up < 1.0 and 0.0 <= self.cool_down < 1.0):
            raise ConfigError("warm-up and cool-down are shares in [0, 1)")
        if self.warm_up + self.cool_down > 0.9:
            raise ConfigError("warm-up and cool-down leave less than a tenth of the run to measure")


class InstanceUse(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's part in a run.

    Attributes:
        gpu: Its hardware label.
        utilisation: Share of the measured time in which it ran iterations, in [0, 1].
        batch: Calls in its batch, mean over the measured time.
        calls: Calls bound to it in the whole run.
        output_tokens: Tokens it generated in the whole run.
        cached_share: Prompt tokens found cached, of all its prompt tokens, in [0, 1].
        preemptions: Times it took back memory from a running call in the whole run.
    """

    gpu: str
    utilisation: float
    batch: float
    calls: int
    output_tokens: int
    cached_share: float
    preemptions: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the measured queries came to.

    Attributes:
        num_queries: Measured queries.
        completed: Share of them that were answered, in [0, 1].
        p50_s: Median end-to-end time of answered ones, seconds (NaN: none).
        p95_s: 95th percentile, seconds.
        p99_s: 99th percentile, seconds.
        mean_s: Mean, seconds.
        attainment: Share answered within their SLO, in [0, 1].
        goodput_qps: Queries per second that ended within their SLO during the measured time,
            whenever they arrived (without a cool-down the time goes on to the last end).
        scale95: 95th percentile of end-to-end time over isolated time: the SLO scale that 95%
            would have met on this schedule; infinite where fewer were answered.
        scale99: The same for 99%.
        instances: instance_id -> its part.
        tenants: Tenant -> share of its queries answered within their SLO, in [0, 1].
    """

    num_queries: int
    completed: float
    p50_s: float
    p95_s: float
    p99_s: float
    mean_s: float
    attainment: float
    goodput_qps: float
    scale95: float
    scale99: float
    instances: dict[str, InstanceUse]
    tenants: dict[str, float] = {}

    @property
    def utilisation(self) -> float:
        """Mean over the instances, in [0, 1]."""
        return sum(one.utilisation for one in self.instances.values()) / len(self.instances)


def measure(
    result: RunResult, isolated_s: Floats, window: Window, tenants: Sequence[str] = ()
) -> Measured:
    """Measure a run.

    Args:
        result: The run; queries in order of arrival.
        isolated_s: The isolated time that each query's SLO is a multiple of, shape (queries,).
        window: What to measure.
        tenants: Who asked each query; empty: nobody is told apart.
    """
    start_s, end_s = bounds_s(result, window)
    inside = (result.arrival_s >= start_s) & (result.arrival_s <= end_s)
    answered = inside & result.is_completed
    latencies = result.latency_s[answered]
    num = int(inside.sum())
    last_s = end_s if window.cool_down > 0.0 else _last_end_s(result)
    met = int((result.is_within_slo & inside).sum())
    p50_s, p95_s, p99_s = (
        np.percentile(latencies, (50, 95, 99)) if len(latencies) else (math.nan,) * 3
    )
    stretch = np.full(num, np.inf)
    stretch[: len(latencies)] = latencies / isolated_s[answered]
    return Measured(
        num_queries=num,
        completed=len(latencies) / num,
        p50_s=float(p50_s),
        p95_s=float(p95_s),
        p99_s=float(p99_s),
        mean_s=float(latencies.mean()) if len(latencies) else math.nan,
        attainment=met / num,
        goodput_qps=_ended_in_time(result, start_s, last_s) / max(last_s - start_s, 1e-9),
        scale95=_rank(stretch, 0.95),
        scale99=_rank(stretch, 0.99),
        instances={
            spec.instance_id: _use(result, place, start_s, last_s)
            for place, spec in enumerate(result.fleet)
        },
        tenants=_per_tenant(result, inside, tenants),
    )


def bounds_s(result: RunResult, window: Window) -> tuple[float, float]:
    """Return the first and the last arrival that count, seconds."""
    arrivals = np.sort(result.arrival_s)
    last = len(arrivals) - 1
    first = min(last, math.floor(window.warm_up * len(arrivals)))
    end = max(first, math.ceil((1.0 - window.cool_down) * len(arrivals)) - 1)
    return float(arrivals[first]), float(arrivals[min(end, last)])


def clipped_union_s(starts_s: Floats, ends_s: Floats, low_s: float, high_s: float) -> float:
    """Return the length of the union of intervals within [low, high], seconds."""
    starts, ends = np.clip(starts_s, low_s, high_s), np.clip(ends_s, low_s, high_s)
    order = np.argsort(starts, kind="stable")
    if len(order) == 0:
        return 0.0
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    gaps = np.maximum(0.0, starts[1:] - reach[:-1])
    return float(reach[-1] - starts[0] - gaps.sum())


def _per_tenant(result: RunResult, inside: Flags, tenants: Sequence[str]) -> dict[str, float]:
    names = np.array(tenants)
    return {
        str(name): float(result.is_within_slo[inside & (names == name)].mean())
        for name in dict.fromkeys(np.array(tenants)[inside] if tenants else ())
    }


def _ended_in_time(result: RunResult, start_s: float, end_s: float) -> int:
    ended = (result.end_s >= start_s) & (result.end_s <= end_s)
    return int((ended & result.is_within_slo).sum())


def _last_end_s(result: RunResult) -> float:
    ends = result.end_s[np.isfinite(result.end_s)]
    return float(ends.max()) if len(ends) else float(result.arrival_s.max())


def _use(result: RunResult, place: int, start_s: float, end_s: float) -> InstanceUse:
    mine: Flags = (result.call_instance == place) & np.isfinite(result.call_end_s)
    starts, ends = result.started_s[mine], result.call_end_s[mine]
    prompts = int(result.input_tokens[mine].sum())
    cached = int(result.cached_tokens[mine].sum())
    span_s = max(end_s - start_s, 1e-9)
    inside_s = np.clip(ends, start_s, end_s) - np.clip(starts, start_s, end_s)
    return InstanceUse(
        gpu=result.fleet[place].gpu,
        utilisation=clipped_union_s(starts, ends, start_s, end_s) / span_s,
        batch=float(inside_s.sum()) / span_s,
        calls=int(mine.sum()),
        output_tokens=int(result.output_tokens[mine].sum()),
        cached_share=cached / prompts if prompts else 0.0,
        preemptions=int(result.num_preemptions[place]),
    )


def _rank(values: Floats, share: float) -> float:
    """Return the smallest value that at least a share of the sample does not exceed."""
    ordered = np.sort(values)
    return float(ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)])
