"""Instances that are slow or sick: how it shows, and how much work they still get.

- *Failing*: its engine failed several calls in a row. It gets one call at a time, as a probe, with
  pauses that double; a success ends it.
- *Stalled*: calls run, and none had a token or an end for much longer than they take. It gets
  nothing until one does.
- *Drifting*: its calls take longer, compared with what was expected of them, than they used to,
  and the other instances' do not. Its expected times are multiplied by as much, so that policies
  give it less.

Never more than half of the instances are held back as failing or stalled: where most seem sick,
it is the calls or the judgement that is wrong. (Envoy's outlier detection does likewise.)
"""

import statistics
from collections.abc import Mapping

import msgspec

NORMAL = 1.0


class OutlierRules(msgspec.Struct, frozen=True, kw_only=True):
    """When an instance counts as sick.

    Attributes:
        failures: Failures in a row from which it is failing.
        stall_floor_s: Shortest time without progress that is a stall, mesh seconds.
        stall_factor: ... and never less than so many expected service times.
        first_pause_s: Time until a failing instance gets a further probe, mesh seconds; doubles.
        longest_pause_s: Longest of these pauses, mesh seconds.
        least_drift: Drift that changes nothing yet.
        most_drift: Largest factor applied.
        least_calls: Calls of an instance from which its drift is judged.
    """

    failures: int = 3
    stall_floor_s: float = 5.0
    stall_factor: float = 6.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    least_drift: float = 1.5
    most_drift: float = 10.0
    least_calls: int = 20


def is_failing(failures_in_a_row: int, rules: OutlierRules) -> bool:
    """Return whether an engine fails call after call."""
    return failures_in_a_row >= rules.failures


def is_stalled(stalled_s: float, mean_t_comp_s: float, rules: OutlierRules) -> bool:
    """Return whether running calls have been without progress for too long.

    Args:
        stalled_s: Time since the last token or end, mesh seconds; 0 while nothing runs.
        mean_t_comp_s: Expected service time of a call there, seconds.
        rules: How long is too long.
    """
    return stalled_s > max(rules.stall_floor_s, rules.stall_factor * mean_t_comp_s)


class _Probing(msgspec.Struct):
    pause_s: float
    next_s: float


class Probes:
    """When a failing instance gets its next call."""

    def __init__(self, rules: OutlierRules) -> None:
        self._rules = rules
        self._failing: dict[str, _Probing] = {}

    def may_probe(self, instance_id: str, now_s: float) -> bool:
        """Return whether a failing instance may be given one call now."""
        rules = self._rules
        found = self._failing.setdefault(
            instance_id, _Probing(rules.first_pause_s, now_s + rules.first_pause_s)
        )
        return now_s >= found.next_s

    def probed(self, instance_id: str, now_s: float) -> None:
        """Note that a failing instance was given a call; the next one waits longer."""
        found = self._failing.get(instance_id)
        if found is not None:
            found.pause_s = min(self._rules.longest_pause_s, 2.0 * found.pause_s)
            found.next_s = now_s + found.pause_s

    def well(self, instance_id: str) -> None:
        """Note that an instance is not failing (any more)."""
        self._failing.pop(instance_id, None)


class _Pace(msgspec.Struct):
    recent: float
    usual: float
    num_calls: int = 1


class Drift:
    """Compares each instance's pace with its own usual one, and with the others' change.

    Args:
        rules: When a drift counts.
    """

    RECENT_GAIN = 0.1
    USUAL_GAIN = 0.005

    def __init__(self, rules: OutlierRules) -> None:
        self._rules = rules
        self._paces: dict[str, _Pace] = {}

    def finished(self, instance_id: str, service_s: float, t_comp_s: float) -> None:
        """Take a finished call: time in the engine, and what was expected of it, seconds."""
        if not (service_s > 0.0 and t_comp_s > 0.0):
            return
        ratio = service_s / t_comp_s
        pace = self._paces.get(instance_id)
        if pace is None:
            self._paces[instance_id] = _Pace(recent=ratio, usual=ratio)
            return
        pace.num_calls += 1
        pace.recent += self.RECENT_GAIN * (ratio - pace.recent)
        gain = max(self.USUAL_GAIN, 1.0 / pace.num_calls)
        if pace.num_calls < self._rules.least_calls or not self._drifts(pace):
            pace.usual += gain * (ratio - pace.usual)

    def factor(self, instance_id: str) -> float:
        """Return by how much an instance takes longer than usual, 1 where it does not."""
        pace = self._paces.get(instance_id)
        if pace is None or pace.num_calls < self._rules.least_calls:
            return NORMAL
        change = self._change(pace)
        return NORMAL if change < self._rules.least_drift else min(self._rules.most_drift, change)

    def forget(self, instance_id: str) -> None:
        """Forget an instance: it is gone, or has begun a new life."""
        self._paces.pop(instance_id, None)

    def _drifts(self, pace: _Pace) -> bool:
        return self._change(pace) >= self._rules.least_drift

    def _change(self, pace: _Pace) -> float:
        """Return the change of a pace in relation to the others': load slows down all of them."""
        others = [
            other.recent / other.usual
            for other in self._paces.values()
            if other is not pace and other.num_calls >= self._rules.least_calls
        ]
        general = max(NORMAL, statistics.median(others)) if others else NORMAL
        return pace.recent / pace.usual / general


def held_back(sick: Mapping[str, bool]) -> set[str]:
    """Return which instances are held back: the sick ones, where they are at most half.

    Args:
        sick: instance_id -> whether it seems sick, for all that are live.
    """
    found = {instance_id for instance_id, is_sick in sick.items() if is_sick}
    return found if 2 * len(found) <= len(sick) else set()
