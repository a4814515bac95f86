"""What the dashboard knows of queries: rebuilt from latency events, bounded in every direction.

Nothing here holds text. A query has no end mark on `latency-events`: it counts as ended when none
of its calls has ended for `quiet_s`; a call that is a query by itself, at its own end.
"""

import itertools
from collections import OrderedDict, deque
from typing import Any

from services.gateway.explain import choice_text, explanation, latest_start_s, scores
from shared.contracts.messages import AlphaUpdate, LatencyEvent
from shared.scheduling.attainment import percentile

MAX_CALLS = 500
MAX_HELD_CALLS = 100_000
MAX_INSTANCES = 10_000
MAX_RECENT = 300
MAX_HISTORY = 3_600
MAX_ALPHAS = 1_000
WINDOW_QUERIES = 300


class QueryLine:
    """One query.

    Args:
        event: Its first ended call.
    """

    def __init__(self, event: LatencyEvent) -> None:
        self.query_id = event.query_id
        self.tenant = event.tenant
        self.workflow = event.workflow
        self.model = event.model
        self.arrival_s = event.arrival_s
        self.slo_s = event.slo_s
        self.last_end_s = event.arrival_s
        self.is_one_call = event.query_id == event.request_id
        self.calls: dict[str, LatencyEvent] = {}
        self.num_calls = 0
        self.num_taken = 0
        self.failure = ""
        self.change = 0
        self.was_running = True

    def add(self, event: LatencyEvent) -> bool:
        """Take an ended attempt; False when it is known already."""
        known = self.calls.get(event.request_id)
        if known is not None and known.attempt >= event.attempt:
            return False
        self.num_taken += 1
        if known is None:
            self.num_calls += 1
        if known is not None or len(self.calls) < MAX_CALLS:
            self.calls[event.request_id] = event
        self.arrival_s = min(self.arrival_s, event.arrival_s)
        self.last_end_s = max(self.last_end_s, event.times.finished_at_s or 0.0)
        if event.kind != "completed" and not self.failure:
            self.failure = event.kind
        return True

    @property
    def took_s(self) -> float:
        """From arrival to the last end seen, seconds."""
        return self.last_end_s - self.arrival_s

    def outcome(self, *, is_running: bool) -> str:
        """Return the query's state in one word."""
        if self.failure:
            return self.failure
        return "running" if is_running else "completed"


class Board:
    """The recent queries, times per instance, α and the course of P95 and attainment.

    Args:
        max_queries: Most queries remembered; the least recently changed is forgotten.
        quiet_s: Silence after which a query counts as ended, mesh seconds.
    """

    def __init__(self, max_queries: int, quiet_s: float) -> None:
        self._max_queries = max_queries
        self._quiet_s = quiet_s
        self._lines: OrderedDict[str, QueryLine] = OrderedDict()
        self._recent: dict[str, deque[float]] = {}
        self._call_s: deque[float] = deque(maxlen=MAX_RECENT)
        self._changes = itertools.count(1)
        self._num_held = 0
        self.change = 0
        """Grows with everything that is taken."""
        self.num_calls: dict[str, int] = {}
        self.alpha_now: dict[str, float] = {}
        """Model -> α under which its last call was dispatched."""
        self.alphas: deque[AlphaUpdate] = deque(maxlen=MAX_ALPHAS)
        self.history: deque[dict[str, float | None]] = deque(maxlen=MAX_HISTORY)

    def __len__(self) -> int:
        return len(self._lines)

    def take(self, event: LatencyEvent) -> None:
        """Take one ended attempt of a call."""
        line = self._lines.get(event.query_id)
        if line is None:
            line = self._lines[event.query_id] = QueryLine(event)
        elif line.tenant != event.tenant:
            return  # somebody else's id; what was first counts
        if not line.add(event):
            return
        self._touch(line)
        self._lines.move_to_end(event.query_id)
        self._num_held += 1
        while len(self._lines) > self._max_queries or self._num_held > MAX_HELD_CALLS:
            _, gone = self._lines.popitem(last=False)
            self._num_held -= gone.num_taken
        self.num_calls[event.kind] = self.num_calls.get(event.kind, 0) + 1
        if event.alpha is not None and (event.model in self.alpha_now or len(self.alpha_now) < 100):
            self.alpha_now[event.model] = event.alpha
        self._time(event)

    def take_alpha(self, update: AlphaUpdate) -> None:
        """Take a new α."""
        self.alphas.append(update)
        self.change = next(self._changes)

    def sample(self, now_s: float, num_waiting: int, num_running: int) -> None:
        """Note the present state for the charts; call it at a steady pace (mesh clock)."""
        summary = self.summary(now_s)
        self.history.append(
            {
                "at_s": now_s,
                "p95_s": summary["p95_s"],
                "attainment": summary["attainment"],
                "call_p95_s": summary["call_p95_s"],
                "waiting": num_waiting,
                "running": num_running,
            }
        )

    def summary(self, now_s: float) -> dict[str, Any]:
        """Return P95 and attainment of the queries that ended last (mesh clock)."""
        ended: list[QueryLine] = []
        num_running = 0
        for line in reversed(self._lines.values()):
            if self._is_running(line, now_s):
                num_running += 1
            else:
                if line.was_running:
                    line.was_running = False
                    self._touch(line)
                if len(ended) < WINDOW_QUERIES:
                    ended.append(line)
        took = [line.took_s for line in ended if not line.failure]
        met = sum(not line.failure and line.took_s <= line.slo_s for line in ended)
        return {
            "queries": len(self._lines),
            "queries_running": num_running,
            "queries_ended": len(ended),
            "p95_s": _number(percentile(took, 95)) if took else None,
            "p50_s": _number(percentile(took, 50)) if took else None,
            "attainment": met / len(ended) if ended else None,
            "call_p95_s": self.p95_s(None),
            "calls": dict(self.num_calls),
        }

    def p95_s(self, instance_id: str | None) -> float | None:
        """Return P95 of recent calls' times from dispatch to end, seconds; None: all instances."""
        times = self._call_s if instance_id is None else self._recent.get(instance_id)
        return _number(percentile(list(times), 95)) if times else None

    def rows(
        self,
        now_s: float,
        *,
        tenant: str | None = None,
        outcome: str | None = None,
        since: int = 0,
        limit: int = 1_000,
    ) -> list[dict[str, Any]]:
        """Return queries, changed last first.

        Args:
            now_s: Present instant, mesh clock.
            tenant: Only this tenant's.
            outcome: Only those in this state; `late` for those that took longer than their SLO.
            since: Only those changed after this change.
            limit: Most rows.
        """
        found = []
        for line in reversed(self._lines.values()):
            if line.change <= since or (tenant is not None and line.tenant != tenant):
                continue
            row = self._row(line, now_s)
            is_wanted = outcome is None or row["outcome"] == outcome
            if is_wanted or (outcome == "late" and row["is_late"]):
                found.append(row)
                if len(found) >= limit:
                    break
        return found

    def query(self, query_id: str, now_s: float) -> dict[str, Any] | None:
        """Return one query with its calls and where its time went; None: not known."""
        line = self._lines.get(query_id)
        if line is None:
            return None
        calls = sorted(line.calls.values(), key=_ready)
        return {
            **self._row(line, now_s),
            "calls": [_call_view(call, line.arrival_s) for call in calls],
            "explanation": explanation(
                line.arrival_s, line.slo_s, calls, is_running=self._is_running(line, now_s)
            ),
        }

    def forget_instance(self, instance_id: str) -> None:
        """Drop an instance's times."""
        self._recent.pop(instance_id, None)

    def _touch(self, line: QueryLine) -> None:
        line.change = self.change = next(self._changes)

    def _time(self, event: LatencyEvent) -> None:
        times = event.times
        if times.finished_at_s is None or times.dispatched_at_s is None:
            return
        took_s = max(0.0, times.finished_at_s - times.dispatched_at_s)
        self._call_s.append(took_s)
        if event.instance_id in self._recent or len(self._recent) < MAX_INSTANCES:
            recent = self._recent.setdefault(event.instance_id, deque(maxlen=MAX_RECENT))
            recent.append(took_s)

    def _is_running(self, line: QueryLine, now_s: float) -> bool:
        if line.failure or line.is_one_call:
            return False
        return now_s - line.last_end_s < self._quiet_s

    def _row(self, line: QueryLine, now_s: float) -> dict[str, Any]:
        return {
            "query_id": line.query_id,
            "tenant": line.tenant,
            "workflow": line.workflow,
            "model": line.model,
            "arrival_s": line.arrival_s,
            "slo_s": line.slo_s,
            "took_s": line.took_s,
            "is_late": line.took_s > line.slo_s,
            "outcome": line.outcome(is_running=self._is_running(line, now_s)),
            "calls_ended": line.num_calls,
            "change": line.change,
        }


def _number(value: float) -> float | None:
    return value if value == value else None  # noqa: PLR0124 - NaN is no JSON


def _ready(call: LatencyEvent) -> float:
    return call.times.ready_at_s or 0.0


def _call_view(call: LatencyEvent, arrival_s: float) -> dict[str, Any]:
    """Return one call for the waterfall; instants are seconds after the query's arrival."""

    def after(instant_s: float | None) -> float | None:
        return None if instant_s is None else instant_s - arrival_s

    times, start_by_s = call.times, latest_start_s(call)
    slack_s = None
    if start_by_s is not None and times.started_at_s is not None:
        slack_s = start_by_s - times.started_at_s
    return {
        "request_id": call.request_id,
        "stage": call.stage,
        "iteration": call.iteration,
        "sibling": call.sibling,
        "siblings": call.siblings,
        "parents": list(call.parents),
        "instance_id": call.instance_id,
        "model": call.model,
        "kind": call.kind,
        "reason": call.reason,
        "attempt": call.attempt,
        "ready_s": after(times.ready_at_s),
        "dispatched_s": after(times.dispatched_at_s),
        "queued_s": after(times.queued_at_s),
        "started_s": after(times.started_at_s),
        "first_token_s": after(times.first_token_at_s),
        "finished_s": after(times.finished_at_s),
        "budget_s": call.t_slo_s,
        "expected_s": call.t_comp_s,
        "latest_start_s": after(start_by_s),
        "slack_s": slack_s,
        "input_tokens": call.usage.input_tokens,
        "cached_tokens": call.usage.cached_tokens,
        "expected_cached_tokens": call.expected_cached_tokens,
        "output_tokens": call.usage.output_tokens,
        "expected_output_tokens": call.predicted_output_tokens,
        "policy": call.terms.policy if call.terms is not None else "",
        "alpha": call.alpha,
        "beta_s2": call.terms.beta_s2 if call.terms is not None else None,
        "scores": scores(call),
        "choice": choice_text(call),
    }
