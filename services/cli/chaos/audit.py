"""Holds the producer's journal against the raw topics: what was lost, doubled, done again.

Knows nothing of the services, the driver or the client; a query's end follows from its calls: it
completed when the producer acted on a completed outcome of every one, it ended otherwise when it
acted on another outcome, and it is lost when neither happened before the producer gave up.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from services.cli.chaos.faults import PRODUCER, FaultKind
from services.cli.chaos.journal import Entry, count_acted
from services.cli.chaos.ledger import CallStory, Ledger

NEVER_S = float("inf")
STALLED_S = 0.5
"""A call that waited longer for its dispatcher, just after one died, waited because of it."""


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that happened.

    Attributes:
        kind: What.
        victim: To which process.
        at_s: From when on the victim did nothing more, Unix seconds.
        back_s: When it could work again, Unix seconds.
        held: Calls that the mesh had and a killed producer had not acted on.
    """

    kind: FaultKind
    victim: str
    at_s: float
    back_s: float
    held: int = 0


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What a fault did.

    Attributes:
        fault: What and to whom.
        in_flight: Calls that the victim held, or that waited for it.
        running: Calls in the victim's engine, as it last said.
        moved: Of these, calls bound once more.
        resumed: Of these, calls that the victim itself took up again.
        recovery_s: From the fault until the last of them was taken up again, wall seconds; for a
            server: from its return until work went on; None where nothing was affected.
        counts: Whether calls were in flight on the victim.
    """

    fault: str
    in_flight: int = 0
    running: int = 0
    moved: int = 0
    resumed: int = 0
    recovery_s: float | None = None
    counts: bool = True

    @property
    def redone(self) -> int:
        """Work done again at most: calls bound once more, and running ones that began anew."""
        return self.moved + min(self.running, self.resumed)


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The reconciliation.

    Attributes:
        queries: Submitted, per kind of end, and lost.
        calls: Taken by the broker, and without any outcome there.
        answered_twice: Calls that the producer acted on twice.
        not_first: Outcomes acted on that are not the first record of their call.
        duplicates: Outcome records beyond the first of their call.
        redone_calls: Calls bound once more, and those begun anew in place.
        effects: Per fault.
    """

    queries: dict[str, int]
    calls: dict[str, int]
    answered_twice: int
    not_first: int
    duplicates: int
    redone_calls: int
    effects: tuple[Effect, ...]

    @property
    def holds(self) -> bool:
        """Whether every query ended exactly once."""
        return not (
            self.queries["lost"] or self.calls["unanswered"] or self.answered_twice
        ) and not (self.not_first)

    def recovery_s(self) -> dict[str, float]:
        """Return the longest recovery per kind of fault."""
        found: dict[str, float] = {}
        for effect in self.effects:
            kind = effect.fault.split(" ", 1)[0]
            if effect.counts and effect.recovery_s is not None:
                found[kind] = max(found.get(kind, 0.0), round(effect.recovery_s, 2))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the command's part of JSON."""
        return {
            "queries": self.queries,
            "calls": self.calls,
            "lost": self.queries["lost"],
            "answered_twice": self.answered_twice,
            "not_first": self.not_first,
            "duplicates": self.duplicates,
            "redone_calls": self.redone_calls,
            "recovery_s": self.recovery_s(),
            "faults": [
                {**msgspec.to_builtins(effect), "redone": effect.redone} for effect in self.effects
            ],
        }


def audit(
    journal: Sequence[Entry],
    ledger: Ledger,
    expected: Mapping[str, Collection[str]],
    injected: Sequence[Injected],
) -> Audit:
    """Return the reconciliation of a run.

    Args:
        journal: What the producer wrote down.
        ledger: Everything on the raw topics.
        expected: Query -> its calls.
        injected: What was done to the mesh.
    """
    effects = tuple(effect_of(one, ledger) for one in injected)
    num_acted = count_acted(list(journal))
    taken = {entry.request_id for entry in journal if entry.what == "taken"}
    stories = ledger.calls
    rebound = sum(max(0, len(story.bound) - 1) for story in stories.values())
    return Audit(
        queries=_query_ends(journal, expected),
        calls={
            "submitted": len(taken),
            "unanswered": sum(not stories.get(one, CallStory()).ended for one in taken),
        },
        answered_twice=sum(count > 1 for count in num_acted.values()),
        not_first=sum(not _is_first(entry, stories) for entry in journal if entry.what == "acted"),
        duplicates=sum(max(0, len(story.ended) - 1) for story in stories.values()),
        redone_calls=rebound + sum(min(one.running, one.resumed) for one in effects),
        effects=effects,
    )


def _query_ends(
    journal: Sequence[Entry], expected: Mapping[str, Collection[str]]
) -> dict[str, int]:
    """Return how many queries ended in which way, before the producer gave up.

    A query that it would have submitted later is not counted then.
    """
    kinds: dict[str, dict[str, str]] = {query_id: {} for query_id in expected}
    submitted: set[str] = set()
    for entry in journal:
        if entry.what == "gave_up":
            expected = {one: calls for one, calls in expected.items() if one in submitted}
            break
        if entry.what == "submitting":
            submitted.add(entry.query_id)
        elif entry.what == "acted":
            kinds.setdefault(entry.query_id, {}).setdefault(entry.request_id, entry.kind)
    counts = Counter(_end_of(kinds[query_id], calls) for query_id, calls in expected.items())
    return {"submitted": len(submitted), "lost": 0, "completed": 0, **dict(sorted(counts.items()))}


def _end_of(kinds: Mapping[str, str], calls: Collection[str]) -> str:
    for kind in kinds.values():
        if kind != "completed":
            return kind
    return "completed" if set(calls) <= set(kinds) else "lost"


def _is_first(entry: Entry, stories: Mapping[str, CallStory]) -> bool:
    story = stories.get(entry.request_id)
    if story is None or not story.ended:
        return False
    first = story.ended[0]
    return (first.kind, first.attempt, first.instance_id, first.finished_at_s) == (
        entry.kind,
        entry.attempt,
        entry.instance_id,
        entry.finished_at_s,
    )


# What each fault did.


def effect_of(one: Injected, ledger: Ledger) -> Effect:
    """Return what became of the calls that a fault touched."""
    name = f"{one.kind} {one.victim}".strip()
    if one.victim.startswith("worker"):
        return _worker_effect(name, one, ledger)
    if one.victim.startswith("dispatcher"):
        return _dispatcher_effect(name, one, ledger)
    if one.victim == PRODUCER:
        counts = bool(one.held)
        return Effect(
            fault=name,
            in_flight=one.held,
            resumed=one.held,
            recovery_s=one.back_s - one.at_s if counts else None,
            counts=counts,
        )
    if one.kind == "rolling-restart" or one.victim:
        return Effect(fault=name, recovery_s=one.back_s - one.at_s)
    return _server_effect(name, one, ledger)


def _worker_effect(name: str, one: Injected, ledger: Ledger) -> Effect:
    instance_id = one.victim.removeprefix("worker-")
    held = [ledger.calls[request_id] for request_id in ledger.held_by(instance_id, one.at_s)]
    again = [_taken_up_s(story, one.at_s, ledger) for story in held]
    moved = sum(any(bound.at_s > one.at_s for bound in story.bound) for story in held)
    return Effect(
        fault=name,
        in_flight=len(held),
        running=ledger.load_at(instance_id, one.at_s).num_running,
        moved=moved,
        resumed=len(held) - moved,
        recovery_s=max(again) - one.at_s if held else None,
        counts=bool(held),
    )


def _taken_up_s(story: CallStory, at_s: float, ledger: Ledger) -> float:
    """Return when a call that its instance held at a moment was taken up after it."""
    times = [bound.at_s for bound in story.bound if bound.at_s > at_s][:1]
    last = [bound for bound in story.bound if bound.at_s <= at_s][-1]
    resumed_s = ledger.taken_up_s(last.instance_id, last.offset, at_s)
    if resumed_s is not None:
        times.append(resumed_s)
    if story.ended:
        first = story.ended[0]
        if first.queued_s > at_s:
            times.append(first.queued_s)
        times.append(first.at_s)  # a paused engine goes on where it was
    return min(times, default=NEVER_S)


def _dispatcher_effect(name: str, one: Injected, ledger: Ledger) -> Effect:
    owners = ledger.owners(one.at_s)
    waits: list[float] = []
    for partition in (p for p, owner in owners.items() if owner == one.victim):
        waits += _stalled(ledger, partition, one.at_s)
    return Effect(
        fault=name,
        in_flight=len(waits),
        recovery_s=max(waits) if waits else None,
        counts=bool(waits),
    )


def _stalled(ledger: Ledger, partition: int, at_s: float) -> list[float]:
    """Return when after a dispatcher's death the calls that waited for it were bound, seconds.

    Those are the calls of its partition that had been asked for when another dispatcher bound the
    first of them. What waits later waits for other reasons, e.g. while the dead one joins again.
    """
    waits = [
        (asked.at_s, bound_s)
        for story in ledger.calls.values()
        for asked in story.asked
        if asked.partition == partition
        and (bound_s := min((b.at_s for b in story.bound if b.at_s >= asked.at_s), default=0.0))
        > at_s
        and not (story.ended and story.ended[0].at_s <= bound_s)  # a copy of an ended call
    ]
    takeover_s = min((bound_s for _, bound_s in waits), default=0.0)
    return [
        bound_s - at_s
        for asked_s, bound_s in waits
        if asked_s <= at_s or (asked_s <= takeover_s and bound_s - asked_s > STALLED_S)
    ]


def _server_effect(name: str, one: Injected, ledger: Ledger) -> Effect:
    """Return when work that a server's outage held up went on, from the server's return."""
    open_calls = [
        story
        for story in ledger.calls.values()
        if story.asked
        and story.asked[0].at_s <= one.at_s
        and (not story.ended or story.ended[0].at_s > one.at_s)
    ]
    later = [
        first_s
        for story in ledger.calls.values()
        if (first_s := _first_sign_s(story, one.back_s)) is not None
    ]
    return Effect(
        fault=name,
        in_flight=len(open_calls),
        recovery_s=min(later) - one.back_s if later else None,
        counts=bool(open_calls),
    )


def _first_sign_s(story: CallStory, after_s: float) -> float | None:
    """Return when an engine first began with a call after a moment."""
    times = [ended.started_s for ended in story.ended if ended.started_s > after_s]
    return min(times, default=None)
