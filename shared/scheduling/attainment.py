"""What a run achieved: percentiles, attainment, goodput."""

import math
from collections.abc import Sequence

import msgspec


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by linear interpolation between closest ranks (NumPy's default).

    Args:
        values: Sample, any order; empty gives NaN.
        percent: In [0, 100].

    Raises:
        ValueError: `percent` is outside [0, 100].
    """
    if not 0.0 <= percent <= 100.0:
        msg = f"percent {percent} is outside [0, 100]"
        raise ValueError(msg)
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100.0
    low = math.floor(rank)
    high = math.ceil(rank)
    fraction = rank - low
    if fraction == 0.0:
        return ordered[low]
    return ordered[low] * (1.0 - fraction) + ordered[high] * fraction


class QueryEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one query ended.

    Attributes:
        arrival_s: When it arrived, seconds.
        end_s: When it ended, seconds.
        slo_s: Its SLO, seconds.
        completed: Whether it ended with an answer.
    """

    arrival_s: float
    end_s: float
    slo_s: float
    completed: bool

    @property
    def latency_s(self) -> float:
        """End-to-end time, seconds."""
        return self.end_s - self.arrival_s

    @property
    def met(self) -> bool:
        """Whether it was answered within its SLO."""
        return self.completed and self.latency_s <= self.slo_s


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run over all injected queries.

    Attributes:
        p50_s: Median end-to-end time of completed queries, seconds (NaN when there are none).
        p95_s: 95th percentile, seconds.
        p99_s: 99th percentile, seconds.
        attainment: Queries within SLO divided by queries injected, in [0, 1].
        goodput_qps: Queries within SLO per second from first arrival to last end.
    """

    p50_s: float
    p95_s: float
    p99_s: float
    attainment: float
    goodput_qps: float


def summarize(ends: Sequence[QueryEnd], num_injected: int) -> Summary:
    """Return percentiles, attainment and goodput of a run.

    Args:
        ends: The queries that ended.
        num_injected: How many were submitted, >= len(ends); those without an end count as missed.
    """
    latencies = [end.latency_s for end in ends if end.completed]
    met = sum(end.met for end in ends)
    span_s = max((e.end_s for e in ends), default=0.0) - min(
        (e.arrival_s for e in ends), default=0.0
    )
    return Summary(
        p50_s=percentile(latencies, 50),
        p95_s=percentile(latencies, 95),
        p99_s=percentile(latencies, 99),
        attainment=met / num_injected if num_injected else 0.0,
        goodput_qps=met / span_s if span_s > 0 else 0.0,
    )
