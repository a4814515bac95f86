"""Where a query's time went, and why it was late: pure arithmetic on latency events.

The *critical path* leads from the call that ended last back to the query's arrival: before each
call stands the parent that ended last (or, where no parents are named, the call that ended last
before it became ready). The time along it falls into four parts: between calls (the agent's own),
on the way (messages), waiting (for an instance's engine), running. They add up to the query's time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared.contracts.messages import LatencyEvent, ScoreTerms
from shared.scheduling.dispatch import floored_queue_s, flow_score

PARTS = ("between calls", "on the way", "waiting", "running")
TOLERANCE_S = 1e-3
NOTABLE = 1.05


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One call on the critical path.

    Attributes:
        event: The call.
        between_s: From its predecessor's end (or the query's arrival) until it was ready, seconds.
        way_s: From ready until it stood in an instance's queue.
        waiting_s: In that queue.
        running_s: In the engine.
    """

    event: LatencyEvent
    between_s: float
    way_s: float
    waiting_s: float
    running_s: float


def critical_path(arrival_s: float, calls: Sequence[LatencyEvent]) -> list[Step]:
    """Return the calls that the query's end waited for, first one first.

    Args:
        arrival_s: The query's arrival, mesh clock.
        calls: Its ended calls, in any order.
    """
    by_id = {call.request_id: call for call in calls if _end(call) is not None}
    path: list[Step] = []
    current = max(by_id.values(), key=_end_or_zero, default=None)
    while current is not None and len(path) <= len(by_id):
        before = _before(current, by_id)
        since_s = _end_or_zero(before) if before is not None else arrival_s
        path.append(_step(current, since_s))
        current = before
    path.reverse()
    return path


def explanation(
    arrival_s: float, slo_s: float, calls: Sequence[LatencyEvent], *, is_running: bool = False
) -> dict[str, Any]:
    """Return where a query's time went, as the dashboard shows it.

    Args:
        arrival_s: The query's arrival, mesh clock.
        slo_s: Its deadline after that, seconds.
        calls: Its ended calls.
        is_running: Whether more of them may come.
    """
    path = critical_path(arrival_s, calls)
    totals = {
        PARTS[0]: sum(step.between_s for step in path),
        PARTS[1]: sum(step.way_s for step in path),
        PARTS[2]: sum(step.waiting_s for step in path),
        PARTS[3]: sum(step.running_s for step in path),
    }
    total_s = sum(totals.values())
    late_s = total_s - slo_s
    return {
        "total_s": total_s,
        "late_s": late_s,
        "parts_s": totals,
        "critical": [step.event.request_id for step in path],
        "text": _head(late_s, total_s, slo_s, is_running=is_running) + _text(total_s, totals, path),
    }


def choice_text(event: LatencyEvent) -> str:
    """Return why a call's instance was chosen, in a sentence."""
    terms = event.terms
    if terms is None or not event.instance_id:
        return ""
    text = (
        f"{terms.policy} chose {event.instance_id}: {terms.t_queue_s:.2f} s of work bound there "
        f"and {terms.t_comp_s:.2f} s for this call"
    )
    if terms.alpha is not None:
        text += f", score {terms.score:.4g} at α = {terms.alpha:g}"
    others = {one["instance_id"]: one for one in scores(event) if not one["is_chosen"]}
    if others:
        name = max(others, key=lambda one: _rank(others[one]))
        queue_s, comp_s = terms.others[name]
        text += f". Next best looked {name}: {queue_s:.2f} s bound, {comp_s:.2f} s for this call"
        if queue_s < terms.t_queue_s and comp_s > NOTABLE * terms.t_comp_s:
            text += "; the shorter run outweighed the longer line"
        elif queue_s > NOTABLE * terms.t_queue_s and comp_s < terms.t_comp_s:
            text += "; the shorter line outweighed the longer run"
    return text + "."


def scores(event: LatencyEvent) -> list[dict[str, Any]]:
    """Return the score terms of the chosen instance and of the others that looked quickest."""
    terms = event.terms
    if terms is None:
        return []
    offers = {event.instance_id: (terms.t_queue_s, terms.t_comp_s), **terms.others}
    return [
        {
            "instance_id": instance_id,
            "t_queue_s": t_queue_s,
            "t_comp_s": t_comp_s,
            "score": terms.score
            if instance_id == event.instance_id
            else _score(terms, t_queue_s, t_comp_s),
            "is_chosen": instance_id == event.instance_id,
        }
        for instance_id, (t_queue_s, t_comp_s) in offers.items()
    ]


def _rank(offer: dict[str, Any]) -> tuple[float, float]:
    """Return how good an instance looked: by score where there is one, else by time."""
    score = offer["score"]
    return (score if score is not None else 0.0, -offer["t_queue_s"] - offer["t_comp_s"])


def _score(terms: ScoreTerms, t_queue_s: float, t_comp_s: float) -> float | None:
    """Return the score of an instance that was not chosen, for policies that weigh with α."""
    if terms.alpha is None or terms.beta_s2 is None:
        return None
    return flow_score(terms.alpha, terms.beta_s2, floored_queue_s(t_queue_s), t_comp_s)


def latest_start_s(event: LatencyEvent) -> float | None:
    """Return when the call had to start to stay within its stage's budget, mesh clock."""
    ready_s = event.times.ready_at_s
    return None if ready_s is None else ready_s + event.t_slo_s - event.t_comp_s


def _end(call: LatencyEvent) -> float | None:
    return call.times.finished_at_s


def _end_or_zero(call: LatencyEvent) -> float:
    return call.times.finished_at_s or 0.0


def _ready(call: LatencyEvent) -> float:
    return call.times.ready_at_s if call.times.ready_at_s is not None else call.arrival_s


def _before(call: LatencyEvent, by_id: Mapping[str, LatencyEvent]) -> LatencyEvent | None:
    named = [by_id[one] for one in call.parents if one in by_id and one != call.request_id]
    others = named or [one for one in by_id.values() if one is not call]
    earlier = [one for one in others if _end_or_zero(one) <= _ready(call) + TOLERANCE_S]
    found = max(earlier, key=_end_or_zero, default=None)
    return found if found is not None and _ready(found) < _ready(call) else None


def _step(call: LatencyEvent, since_s: float) -> Step:
    ready_s, end_s = _ready(call), _end_or_zero(call)
    queued_s = _within(call.times.queued_at_s, ready_s, end_s, default=end_s)
    started_s = _within(call.times.started_at_s, queued_s, end_s, default=end_s)
    return Step(
        event=call,
        between_s=max(0.0, ready_s - since_s),
        way_s=queued_s - ready_s,
        waiting_s=started_s - queued_s,
        running_s=end_s - started_s,
    )


def _within(value: float | None, low: float, high: float, *, default: float) -> float:
    return min(max(value if value is not None else default, low), max(low, high))


def _head(late_s: float, total_s: float, slo_s: float, *, is_running: bool) -> str:
    if total_s <= 0:
        return "No call of it has ended yet."
    took = f"{total_s:.1f} s of {slo_s:.1f} s"
    if is_running:
        late = f", late by {late_s:.1f} s already" if late_s > 0 else ""
        return f"Still running, {took} so far{late}."
    if late_s > 0:
        return f"Late by {late_s:.1f} s: it took {took}."
    return f"In time, with {-late_s:.1f} s to spare: it took {took}."


def _text(total_s: float, totals: Mapping[str, float], path: Sequence[Step]) -> str:
    if not path or total_s <= 0:
        return ""
    part = max(totals, key=lambda name: totals[name])
    share = totals[part] / total_s
    text = f" {share:.0%} of that ({totals[part]:.1f} s) went into {_PART_TEXT[part]}"
    worst = max(path, key=lambda step: _part(step, part))
    event = worst.event
    where = f" on {event.instance_id}" if event.instance_id and part in PARTS[2:] else ""
    text += f", most of it {_part(worst, part):.1f} s at {event.stage} {event.iteration}{where}"
    if part in PARTS[2:]:
        text += f", whose budget was {event.t_slo_s:.1f} s"
    if part == "running" and event.t_comp_s > 0:
        text += f" and whose run was expected to take {event.t_comp_s:.1f} s"
    return text + "."


_PART_TEXT = {
    PARTS[0]: "the agent's own work between calls",
    PARTS[1]: "messages on their way",
    PARTS[2]: "waiting for an instance",
    PARTS[3]: "running",
}


def _part(step: Step, part: str) -> float:
    values = (step.between_s, step.way_s, step.waiting_s, step.running_s)
    return values[PARTS.index(part)]
