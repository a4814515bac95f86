"""Counts what came back from the mesh: the only source of the numbers a replay reports.

Invariant: every call counted here was seen as a consumed outcome; nothing is inferred from what
was sent.
"""

import math
from collections import Counter
from typing import Any, get_args

import msgspec

from services.cli.console import finite
from shared.contracts.messages import CallOutcome, OutcomeKind
from shared.scheduling.attainment import QueryEnd, Summary, percentile, summarize

KINDS: tuple[str, ...] = get_args(OutcomeKind)


class InstanceTally(msgspec.Struct, kw_only=True):
    """What one instance did, as its outcomes tell.

    Attributes:
        calls: Outcomes that name the instance.
        completed: Those that completed.
        input_tokens: Prompt tokens of completed calls, tokens.
        cached_tokens: Of these, found in the prefix cache, tokens.
        output_tokens: Generated tokens of completed calls, tokens.
        queue_s: Sum over completed calls of the time from ready to started, seconds.
        service_s: Sum over completed calls of the time from started to finished, seconds.
    """

    calls: int = 0
    completed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float = 0.0
    service_s: float = 0.0

    def add(self, outcome: CallOutcome) -> None:
        """Take one outcome of this instance."""
        self.calls += 1
        if outcome.kind != "completed":
            return
        self.completed += 1
        self.input_tokens += outcome.usage.input_tokens
        self.cached_tokens += outcome.usage.cached_tokens
        self.output_tokens += outcome.usage.output_tokens
        times = outcome.times
        if times.ready_at_s is None or times.started_at_s is None or times.finished_at_s is None:
            return
        self.queue_s += times.started_at_s - times.ready_at_s
        self.service_s += times.finished_at_s - times.started_at_s

    def to_json(self) -> dict[str, float | int]:
        """Return the JSON form."""
        num = max(1, self.completed)
        return {
            "calls": self.calls,
            "completed": self.completed,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "mean_queue_s": round(self.queue_s / num, 6),
            "mean_service_s": round(self.service_s / num, 6),
        }


class Tally:
    """Counts of one run, updated while it goes on."""

    def __init__(self) -> None:
        self.queries: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.instances: dict[str, InstanceTally] = {}
        self.ends: list[QueryEnd] = []
        self.num_met = 0
        self.latest_arrival_s = 0.0
        self._hops_s = 0.0
        self._num_hops = 0

    @property
    def num_active(self) -> int:
        """Queries submitted and not ended."""
        return self.queries["submitted"] - sum(self.queries[kind] for kind in KINDS)

    @property
    def num_ended(self) -> int:
        """Queries that ended, however."""
        return sum(self.queries[kind] for kind in KINDS)

    def call_ended(self, outcome: CallOutcome, now_s: float) -> None:
        """Take the outcome of a call that was consumed at `now_s`, mesh clock."""
        self.calls[outcome.kind] += 1
        times = outcome.times
        if times.ready_at_s and times.queued_at_s and times.finished_at_s:
            self._hops_s += times.queued_at_s - times.ready_at_s + now_s - times.finished_at_s
            self._num_hops += 1
        if outcome.kind != "completed":
            self.reasons[outcome.reason or outcome.kind] += 1
        if outcome.instance_id:
            tally = self.instances.setdefault(outcome.instance_id, InstanceTally())
            tally.add(outcome)

    def query_ended(self, kind: str, end: QueryEnd | None) -> None:
        """Take the end of a query; `end` is None when it never reached the mesh."""
        self.queries[kind] += 1
        if end is not None:
            self.ends.append(end)
            self.num_met += end.met

    def mean_hops_s(self) -> float:
        """Return what a call spends travelling: ready to queued plus finished to consumed.

        Workload seconds, mean over calls; NaN when none.
        """
        return self._hops_s / self._num_hops if self._num_hops else math.nan

    def arrived(self, late_s: float) -> None:
        """Note by how many workload seconds an arrival was late."""
        self.latest_arrival_s = max(self.latest_arrival_s, late_s)

    def p95_s(self) -> float:
        """Return the 95th percentile of completed queries so far, seconds; NaN when none."""
        return percentile([end.latency_s for end in self.ends if end.completed], 95)

    def attainment(self) -> float:
        """Return queries within SLO divided by queries that ended so far; NaN when none."""
        return self.num_met / self.num_ended if self.num_ended else math.nan

    def summary(self) -> Summary:
        """Return percentiles, attainment over all submitted queries, and goodput."""
        return summarize(self.ends, self.queries["submitted"])

    def to_json(self) -> dict[str, Any]:
        """Return the contract's JSON object of a run (times in workload seconds)."""
        summary = self.summary()
        return {
            "queries": _counts(self.queries),
            "calls": {**_counts(self.calls), "duplicates": self.calls["duplicates"]},
            "p50_s": finite(summary.p50_s),
            "p95_s": finite(summary.p95_s),
            "p99_s": finite(summary.p99_s),
            "attainment": summary.attainment,
            "goodput_qps": summary.goodput_qps,
            "per_instance": {
                name: self.instances[name].to_json() for name in sorted(self.instances)
            },
            "mean_hops_s": finite(self.mean_hops_s()),
            "reasons": dict(sorted(self.reasons.items())),
        }


def _counts(counter: Counter[str]) -> dict[str, int]:
    return {key: counter[key] for key in ("submitted", *KINDS)}
