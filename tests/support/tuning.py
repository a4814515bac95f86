"""Latency events of whole queries, and a replay whose predictions the test chooses."""

from collections.abc import Mapping, Sequence

import numpy as np

from shared.contracts.messages import CallTimes, LatencyEvent, Usage
from shared.domain.trace import TraceQuery
from shared.scheduling.judgement import Replayed
from shared.simulation.results import RunResult
from shared.simulation.speed_fit import SpeedFit, SpeedRequest
from shared.simulation.window_replay import ReplayAnswer, ReplayRequest


def query_events(
    query_id: str,
    *,
    arrival_s: float,
    latency_s: float,
    instance_id: str = "a100-0",
    siblings: int = 2,
    slo_s: float = 100.0,
) -> list[LatencyEvent]:
    """Return the events of a query of two stages, the second one with parallel calls."""
    middle_s = arrival_s + latency_s / 2
    first = _event(query_id, "draft", 0, 1, arrival_s, arrival_s, middle_s, instance_id, slo_s)
    rest = [
        _event(
            query_id,
            "judge",
            sibling,
            siblings,
            arrival_s,
            middle_s,
            arrival_s + latency_s,
            instance_id,
            slo_s,
        )
        for sibling in range(siblings)
    ]
    return [first, *rest]


def _event(
    query_id: str,
    stage: str,
    sibling: int,
    siblings: int,
    arrival_s: float,
    ready_s: float,
    end_s: float,
    instance_id: str,
    slo_s: float,
) -> LatencyEvent:
    return LatencyEvent(
        request_id=f"{query_id}/{stage}/{sibling}",
        query_id=query_id,
        workflow="demo",
        stage=stage,
        sibling=sibling,
        siblings=siblings,
        model="default",
        instance_id=instance_id,
        kind="completed",
        arrival_s=arrival_s,
        slo_s=slo_s,
        times=CallTimes(
            ready_at_s=ready_s,
            started_at_s=ready_s,
            first_token_at_s=ready_s,
            finished_at_s=end_s,
        ),
        usage=Usage(input_tokens=500, output_tokens=50),
    )


class ChosenReplay:
    """Predicts P95 per α as the test says; other α get the worst of them.

    Args:
        p95_by_alpha: α -> P95, seconds.
        share: instance_id -> share of work under every α.
        fits: instance_id -> speed found in every window.
    """

    def __init__(
        self,
        p95_by_alpha: Mapping[float, float],
        share: Mapping[str, float],
        fits: Mapping[str, SpeedFit] | None = None,
    ) -> None:
        self._p95_by_alpha = dict(p95_by_alpha)
        self._share = dict(share)
        self._fits = dict(fits or {})
        self.requests: list[ReplayRequest] = []
        self.num_lessons = 0

    async def sweep(self, request: ReplayRequest) -> ReplayAnswer:
        """Return the chosen predictions; every query takes the P95."""
        self.requests.append(request)
        runs = tuple(
            self._run(alpha, len(request.queries))
            for alpha in sorted({*request.alphas, request.current, *self._p95_by_alpha})
        )
        return ReplayAnswer(runs=runs, as_it_was=self._run(request.current, len(request.queries)))

    async def speeds(self, requests: Mapping[str, SpeedRequest]) -> dict[str, SpeedFit]:
        """Return the chosen speeds of the instances asked about."""
        self.num_lessons += 1
        return {key: fit for key, fit in self._fits.items() if key in requests}

    def _run(self, alpha: float, count: int) -> Replayed:
        p95_s = self._p95_by_alpha.get(alpha, max(self._p95_by_alpha.values()))
        return Replayed(alpha=alpha, latencies_s=(p95_s,) * count, p95_s=p95_s, shares=self._share)


def events_of_run(
    run: RunResult, queries: Sequence[TraceQuery], *, from_s: float
) -> list[LatencyEvent]:
    """Return the latency events that a mesh would have written of a simulated run, in order.

    Args:
        run: The run.
        queries: What was run.
        from_s: The run's zero on the mesh clock.
    """
    first_call = np.searchsorted(run.call_query, np.arange(len(queries)))
    events = []
    for index in np.argsort(run.call_end_s, kind="stable"):
        query = queries[run.call_query[index]]
        number = int(run.call_stage[index])
        stage = query.stages[number]
        base = int(first_call[run.call_query[index]])
        base += sum(len(earlier.calls) for earlier in query.stages[:number])
        sibling = int(index) - base
        before = query.stages[number - 1] if number else None
        spec = run.fleet[run.call_instance[index]]
        events.append(
            LatencyEvent(
                request_id=f"{query.query_id}/{number}/{sibling}",
                query_id=query.query_id,
                workflow=query.workflow,
                stage=stage.stage,
                iteration=stage.iteration,
                sibling=sibling,
                siblings=len(stage.calls),
                parents=tuple(
                    f"{query.query_id}/{number - 1}/{one}"
                    for one in range(len(before.calls) if before else 0)
                ),
                model=query.model,
                instance_id=spec.instance_id,
                kind="completed",
                arrival_s=from_s + float(query.arrival_s or 0.0),
                slo_s=float(query.slo_s or 1.0),
                times=CallTimes(
                    ready_at_s=from_s + float(run.ready_s[index]),
                    dispatched_at_s=from_s + float(run.dispatched_s[index]),
                    queued_at_s=from_s + float(run.delivered_s[index]),
                    started_at_s=from_s + float(run.started_s[index]),
                    first_token_at_s=from_s + float(run.first_token_s[index]),
                    finished_at_s=from_s + float(run.call_end_s[index]),
                ),
                usage=Usage(
                    input_tokens=int(run.input_tokens[index]),
                    output_tokens=int(run.output_tokens[index]),
                    cached_tokens=int(run.cached_tokens[index]),
                ),
                prefix=stage.calls[sibling].prefix,
                alpha=run.alpha,
                t_comp_s=float(run.t_comp_s[index]),
                predicted_output_tokens=float(run.predicted_tokens[index]),
                expected_cached_tokens=int(run.expected_cached_tokens[index]),
            )
        )
    return events
