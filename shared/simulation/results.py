"""What a simulated run brought."""

from typing import Any

import numpy as np

from shared.domain.instance import InstanceSpec
from shared.scheduling.attainment import Summary
from shared.simulation.fleet_state import REFUSED
from shared.simulation.invariants import check_result

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class RunResult:
    """Everything a run brought, in arrays; instants in seconds from the trace's start.

    Attributes:
        policy: Registry name of the policy.
        alpha: α of the run.
        fleet: The instances in the scenario's order; all that is per instance is in this order.
        arrival_s: shape (queries,).
        end_s: When each query ended (NaN: never), shape (queries,).
        slo_s: shape (queries,).
        is_completed: Whether each query was answered, shape (queries,).
        call_query: Query index of each call, shape (calls,).
        call_stage: Stage index within its query, shape (calls,).
        call_instance: Instance index; negative where it was never bound, shape (calls,).
        ready_s: When each call became ready, shape (calls,).
        dispatched_s: When it was bound to its instance, shape (calls,).
        delivered_s: When it reached its instance's line, shape (calls,).
        started_s: When it first entered a batch, shape (calls,).
        first_token_s: shape (calls,).
        call_end_s: shape (calls,).
        input_tokens: shape (calls,).
        output_tokens: shape (calls,).
        cached_tokens: Prompt tokens found in the cache at first admission, shape (calls,).
        t_comp_s: Expected cost at dispatch, shape (calls,).
        predicted_tokens: Output length it was costed with, shape (calls,).
        expected_cached_tokens: Cached prompt tokens it was costed with, shape (calls,).
        busy_s: Time in iterations per instance, shape (instances,).
        num_calls: Calls bound per instance, shape (instances,).
        num_preemptions: Per instance, shape (instances,).
        present_s: Integral over time of the calls at each instance, shape (instances,).
        num_instants: Instants the event loop visited.
    """

    def __init__(
        self,
        *,
        policy: str,
        alpha: float,
        fleet: tuple[InstanceSpec, ...],
        place_of: list[int],
        tables: dict[str, np.ndarray[Any, Any]],
        query_of_call: Ints,
        stage_of_call: Ints,
    ) -> None:
        queries, calls, plans = tables["queries"], tables["calls"], tables["plans"]
        self.policy = policy
        self.alpha = alpha
        self.fleet = fleet
        self.arrival_s: Floats = queries["arrival_s"].copy()
        self.end_s: Floats = queries["end_s"].copy()
        self.slo_s: Floats = queries["slo_s"].copy()
        self.is_completed = np.isfinite(self.end_s) & (queries["is_failed"] == 0)
        self.call_query = query_of_call
        self.call_stage = stage_of_call
        index_at = np.empty(len(fleet), np.int64)
        index_at[place_of] = np.arange(len(fleet))
        places = plans["instance"].astype(np.int64)
        self.call_instance: Ints = np.where(places >= 0, index_at[np.maximum(places, 0)], places)
        self.ready_s: Floats = tables["stages"]["ready_s"][plans["stage"]]
        self.dispatched_s: Floats = plans["assigned_s"].copy()
        self.delivered_s: Floats = self.dispatched_s + tables["runs"]["hop_s"][0]
        self.t_comp_s: Floats = plans["t_comp_s"].copy()
        self.predicted_tokens: Floats = plans["predicted_tokens"].copy()
        self.expected_cached_tokens: Ints = plans["cached_tokens"].astype(np.int64)
        self.started_s: Floats = calls["started_s"].copy()
        self.first_token_s: Floats = calls["first_token_s"].copy()
        self.call_end_s: Floats = calls["end_s"].copy()
        self.input_tokens: Ints = calls["input_tokens"].astype(np.int64)
        self.output_tokens: Ints = calls["output_tokens"].astype(np.int64)
        self.cached_tokens: Ints = calls["cached_tokens"].astype(np.int64)
        self.busy_s: Floats = tables["engines"]["busy_s"][place_of]
        self.num_calls: Ints = tables["lines"]["num_calls"][place_of]
        self.num_preemptions: Ints = tables["engines"]["num_preemptions"][place_of]
        self.present_s: Floats = tables["lines"]["present_s"][place_of]
        self.num_instants = int(tables["runs"]["num_instants"][0])

    @property
    def latency_s(self) -> Floats:
        """End-to-end time of every query, seconds (NaN: never ended)."""
        latency: Floats = self.end_s - self.arrival_s
        return latency

    @property
    def is_within_slo(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each query was answered within its SLO."""
        within: np.ndarray[Any, np.dtype[np.bool_]] = self.is_completed & (
            self.latency_s <= self.slo_s
        )
        return within

    @property
    def utilisation(self) -> Floats:
        """Share of the run that each instance spent in iterations, in [0, 1]."""
        span_s = self._span_s()
        share: Floats = self.busy_s / span_s if span_s > 0 else np.zeros(len(self.busy_s))
        return share

    def summary(self) -> Summary:
        """Return percentiles, attainment and goodput, as `attainment.summarize` defines them."""
        latencies = self.latency_s[self.is_completed]
        met = int(self.is_within_slo.sum())
        span_s = self._span_s()
        p50_s, p95_s, p99_s = (
            np.percentile(latencies, [50, 95, 99]) if len(latencies) else (np.nan,) * 3
        )
        return Summary(
            p50_s=float(p50_s),
            p95_s=float(p95_s),
            p99_s=float(p99_s),
            attainment=met / len(self.arrival_s),
            goodput_qps=met / span_s if span_s > 0 else 0.0,
        )

    def to_bytes(self) -> bytes:
        """Return every array as bytes, for comparing runs."""
        return b"".join(
            value.tobytes() for value in vars(self).values() if isinstance(value, np.ndarray)
        )

    def check(self) -> None:
        """Check the run's invariants.

        Raises:
            SimulationFault: One does not hold; a defect of the simulator.
        """
        check_result(self)

    def _span_s(self) -> float:
        ended = np.isfinite(self.end_s)
        if not ended.any():
            return 0.0
        return float(self.end_s[ended].max() - self.arrival_s[ended].min())


def was_refused(result: RunResult) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which calls the policy refused."""
    refused: np.ndarray[Any, np.dtype[np.bool_]] = result.call_instance == REFUSED
    return refused
