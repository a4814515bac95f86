"""When to learn and when to decide, from the window alone.

A decision is due at first, on a schedule, when P95 has degraded, and after a change of the
workload or of an instance's speed. It rests on queries since the latest change only; until there
are enough of them, it waits.
"""

from collections import defaultdict
from collections.abc import Sequence

from services.tuner.params import TunerParams
from shared.contracts.query_window import QueryRecord
from shared.runtime.metrics import Metrics
from shared.scheduling.attainment import percentile

MAX_LABELS = 20
OTHERS = "(others)"
LESSON_SHARE = 0.25
REST_SHARE = 0.25
LEAST_LESSON = 20


class Watching:
    """Remembers when things were done last.

    Args:
        params: When to act.
        metrics: Shows the window.
    """

    def __init__(self, params: TunerParams, metrics: Metrics) -> None:
        self._params = params
        self._metrics = metrics
        self._num_seen = 0
        self._seen: set[str] = set()
        self._lesson_at = 0
        self._changed_at_s = 0.0
        self._decided_at_s: float | None = None
        self._p95_at_decision_s: float | None = None
        self._is_changed = False

    def look(self, ended: Sequence[QueryRecord]) -> None:
        """Count queries that ended since the last look; show the window."""
        current = {record.query_id for record in ended}
        new = current - self._seen
        self._seen = current
        self._num_seen += len(new)
        if new:
            self._show(ended)

    def since_change(self, records: Sequence[QueryRecord]) -> list[QueryRecord]:
        """Return the queries that arrived since the workload or a speed last changed."""
        return [record for record in records if record.arrival_s >= self._changed_at_s]

    def takes_lesson(self, ended: Sequence[QueryRecord]) -> bool:
        """Return whether enough queries ended since the last lesson; True counts as one."""
        step = max(LEAST_LESSON, round(LESSON_SHARE * self._params.min_queries))
        if self._num_seen - self._lesson_at < step or len(ended) < step:
            return False
        self._lesson_at = self._num_seen
        return True

    def cut(self, changed_at_s: float | None, *, is_other: bool) -> None:
        """Leave out what arrived before a change found, and decide anew.

        Args:
            changed_at_s: When the workload or a speed changed, mesh clock.
            is_other: Whether a speed is quite another than calls were dispatched under so far.
        """
        if changed_at_s is not None and changed_at_s > self._changed_at_s:
            self._changed_at_s = changed_at_s
            self._is_changed = True
        self._is_changed |= is_other

    def judged(self, ended: Sequence[QueryRecord]) -> list[QueryRecord]:
        """Return the queries a decision rests on: the latest since the latest change."""
        return self.since_change(ended)[-self._params.window_queries :]

    def lead_in(
        self, ended: Sequence[QueryRecord], judged: Sequence[QueryRecord]
    ) -> list[QueryRecord]:
        """Return the queries before those judged: their load was still there.

        A replay that began without them would begin with an empty fleet. They are simulated and
        not judged.
        """
        from_s = min((record.arrival_s for record in judged), default=0.0)
        return [record for record in ended if record.arrival_s < from_s][-self._params.lead_in :]

    def trigger(self, ended: Sequence[QueryRecord], now_s: float) -> str | None:
        """Return why a decision is due now, or None."""
        if len(ended) < self._params.min_queries:
            return None
        if self._decided_at_s is None or self._p95_at_decision_s is None:
            return "first"
        if self._is_changed:
            return "change"
        if now_s - self._decided_at_s >= self._params.period_s:
            return "schedule"
        if now_s - self._decided_at_s < REST_SHARE * self._params.period_s:
            return None
        p95_s = _p95_s(ended[-self._params.min_queries :])
        return "degradation" if p95_s > self._limit_s() else None

    def decided(self, ended: Sequence[QueryRecord], now_s: float) -> None:
        """Note a decision."""
        self._decided_at_s = now_s
        self._p95_at_decision_s = _p95_s(ended[-self._params.min_queries :])
        self._is_changed = False

    def _limit_s(self) -> float:
        return self._params.degradation * (self._p95_at_decision_s or 0.0)

    def _show(self, ended: Sequence[QueryRecord]) -> None:
        groups: dict[tuple[str, str], list[QueryRecord]] = defaultdict(list)
        for record in ended:
            key = (record.tenant, record.workflow)
            known = key in groups or len(groups) < MAX_LABELS
            groups[key if known else (OTHERS, OTHERS)].append(record)
        for (tenant, workflow), records in groups.items():
            ends = [record.end() for record in records]
            times_s = [end.latency_s for end in ends if end.completed]
            labels = {"tenant": tenant, "workflow": workflow}
            for percent in (50, 95, 99):
                value_s = percentile(times_s, percent)
                self._metrics.window_s.set(value_s, quantile=f"0.{percent}", **labels)
            met = sum(end.met for end in ends) / len(ends)
            self._metrics.window_attainment.set(met, **labels)


def _p95_s(records: Sequence[QueryRecord]) -> float:
    ends = [record.end() for record in records]
    return percentile([end.latency_s for end in ends if end.completed], 95)
