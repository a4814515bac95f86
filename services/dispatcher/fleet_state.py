"""What the dispatcher knows of the fleet: states as published, plus exactly its own later work.

A worker's state names the last offset of its topic that is contained in its numbers. To that the
dispatcher adds its own assignments with higher offsets, and those whose publish is not
acknowledged yet. So nothing is counted twice and no lock is shared (DESIGN.md §2, State).

Between a worker's state and our own acknowledgement of an assignment it contains already, that one
assignment is counted twice; the acknowledgement ends it.
"""

import heapq
import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from shared.contracts.epochs import epoch_of
from shared.contracts.messages import InstanceState
from shared.domain.instance import InstanceSpec
from shared.scheduling.outliers import (
    Drift,
    OutlierRules,
    Probes,
    held_back,
    is_failing,
    is_stalled,
)
from shared.scheduling.policy import InstanceView
from shared.scheduling.prefix import PrefixCacheModel

CallKey = tuple[str, int]  # (request_id, attempt)
PREFIX_SHARE = 0.5


class OwnAssignments:
    """This dispatcher's assignments to one instance that its latest state does not contain."""

    def __init__(self) -> None:
        self._unacknowledged: dict[CallKey, float] = {}
        self._later: list[tuple[int, float]] = []  # heap of (offset, t_comp_s)
        self._accounted_offset = -1
        self._t_comp_s = 0.0

    @property
    def t_comp_s(self) -> float:
        """Sum of their t_comp, seconds."""
        return max(0.0, self._t_comp_s)

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self._unacknowledged) + len(self._later)

    def reserve(self, key: CallKey, t_comp_s: float) -> None:
        """Count a call from now on, before it is published."""
        self._unacknowledged[key] = t_comp_s
        self._t_comp_s += t_comp_s

    def acknowledge(self, key: CallKey, offset: int) -> None:
        """Note where a reserved call ended up; a state may contain it already."""
        t_comp_s = self._unacknowledged.pop(key, None)
        if t_comp_s is None:
            return
        if offset <= self._accounted_offset:
            self._subtract(t_comp_s)
        else:
            heapq.heappush(self._later, (offset, t_comp_s))

    def release(self, key: CallKey) -> None:
        """Forget a reserved call that was not published."""
        t_comp_s = self._unacknowledged.pop(key, None)
        if t_comp_s is not None:
            self._subtract(t_comp_s)

    def account(self, offset: int) -> None:
        """Note that the latest state contains everything up to `offset`."""
        self._accounted_offset = offset
        while self._later and self._later[0][0] <= offset:
            self._subtract(heapq.heappop(self._later)[1])

    def _subtract(self, t_comp_s: float) -> None:
        # Exactly nothing when empty: rounding must not pile up over a million calls.
        self._t_comp_s = self._t_comp_s - t_comp_s if self.count else 0.0


class Known:
    """One instance.

    Args:
        state: Its latest state of the highest epoch.
        epoch: That epoch.
        heard_at_s: When it was last heard, monotonic seconds of this host.
    """

    def __init__(self, state: InstanceState, epoch: int, heard_at_s: float) -> None:
        self.state = state
        self.spec = state.spec
        self.epoch = epoch
        self.heard_at_s = heard_at_s
        self.has_topic = True
        self.own = OwnAssignments()
        self.prefixes = prefix_model(state.spec)
        self.own.account(state.accounted_offset)

    def take(self, state: InstanceState, epoch: int, heard_at_s: float) -> None:
        """Replace the state by a later one of the same or a higher epoch."""
        self.state = state
        self.heard_at_s = heard_at_s
        is_new_life = epoch > self.epoch
        if is_new_life or state.spec != self.spec:
            self.prefixes = prefix_model(state.spec)
        if state.spec != self.spec:  # else keep the object: predictions are cached by identity
            self.spec = state.spec
        if is_new_life:
            self.epoch = epoch
            self.has_topic = True
        self.own.account(state.accounted_offset)

    def view(self, speed_factor: float, hit_factor: float = 1.0) -> InstanceView:
        """Return what a policy sees: the published state plus our own later assignments."""
        state = self.state
        return InstanceView(
            spec=self.spec,
            backlog_s=state.backlog_s + state.foreign_s + self.own.t_comp_s,
            num_waiting=state.num_waiting + self.own.count,
            num_running=state.num_running,
            capacity=state.capacity,
            queue_bound=state.queue_bound,
            speed_factor=speed_factor,
            hit_factor=hit_factor,
            kv_used_tokens=state.kv_used_tokens,
            head_score=state.head_score,
        )


class FleetState:
    """All instances.

    Args:
        live_s: Longest silence of an instance that still gets calls, wall seconds.
        rules: When an instance counts as slow or sick; pauses in wall seconds.
    """

    def __init__(self, live_s: float, rules: OutlierRules | None = None) -> None:
        self._live_s = live_s
        self._rules = rules or OutlierRules()
        self._probes = Probes(self._rules)
        self.drift = Drift(self._rules)
        self._known: dict[str, Known] = {}
        self._listening_since_s = -math.inf
        self._last_record_s = -math.inf
        self._looked_at_s = 0.0

    def observe(self, offset: int, state: InstanceState, heard_at_s: float) -> bool:
        """Take one record of `instance-states`; returns whether it counted.

        Args:
            offset: Its offset.
            state: What it says.
            heard_at_s: When we read it, monotonic seconds; for records of the past earlier by
                their age, so that an old state is not taken for a sign of life.
        """
        epoch = epoch_of(offset, state)
        known = self._known.get(state.instance_id)
        if known is None:
            self._known[state.instance_id] = Known(state, epoch, heard_at_s)
        elif epoch < known.epoch:
            return False
        else:
            if epoch > known.epoch:
                self.drift.forget(state.instance_id)
            known.take(state, epoch, heard_at_s)
        return True

    def remove(self, instance_id: str) -> None:
        """Forget an instance: its state has a tombstone."""
        self._known.pop(instance_id, None)
        self.drift.forget(instance_id)
        self._probes.well(instance_id)

    def views(
        self,
        now_s: float,
        speeds: Mapping[str, float],
        hits: Mapping[str, float] = MappingProxyType({}),
    ) -> list[InstanceView]:
        """Return the instances that may get calls now, sorted by id.

        Args:
            now_s: Monotonic seconds.
            speeds: instance_id -> learned speed factor.
            hits: instance_id -> learned share of expected prefix-cache hits that happen.
        """
        self._looked_at_s = now_s
        live = {
            instance_id: known
            for instance_id, known in sorted(self._known.items())
            if self._takes_calls(known, now_s)
        }
        held = held_back({instance_id: self._is_sick(one) for instance_id, one in live.items()})
        found = []
        for instance_id, known in live.items():
            drift = self.drift.factor(instance_id)
            view = known.view(speeds.get(instance_id, 1.0) * drift, hits.get(instance_id, 1.0))
            if instance_id not in held:
                self._probes.well(instance_id)
                found.append(view)
            elif self._may_probe(known, now_s):
                found.append(msgspec.structs.replace(view, queue_bound=view.num_waiting + 1))
        return found

    def _is_sick(self, known: Known) -> bool:
        state = known.state
        return is_failing(state.failures_in_a_row, self._rules) or self._is_stalled(state)

    def _is_stalled(self, state: InstanceState) -> bool:
        outstanding = state.num_waiting + state.num_running
        mean_s = state.backlog_s / outstanding if outstanding else 0.0
        return is_stalled(state.stalled_s, mean_s, self._rules)

    def _may_probe(self, known: Known, now_s: float) -> bool:
        """Return whether a sick instance may be given one call, to see whether it is well again."""
        is_idle = not (known.state.num_running or known.state.num_waiting or known.own.count)
        return is_idle and self._probes.may_probe(known.state.instance_id, now_s)

    def listen(self, now_s: float) -> None:
        """Note that a record of `instance-states` has come, whoever wrote it.

        There is one every second or so, because recovery owners write probes. Where none came for
        longer than an instance may be silent, the broker was away or this process was paused:
        silence before this record tells nothing about an instance.
        """
        if now_s - self._last_record_s > self._live_s:
            self._listening_since_s = now_s
        self._last_record_s = now_s

    def has_listened(self, since_s: float, now_s: float) -> bool:
        """Return whether everything said between two monotonic instants has been heard."""
        is_deaf = now_s - self._last_record_s > self._live_s
        return not is_deaf and self._listening_since_s <= since_s

    def heard_within(self, since_s: float, now_s: float) -> list[InstanceView]:
        """Return the instances, in whatever phase, whose silence since an instant is not certain.

        Args:
            since_s: The instant, monotonic seconds.
            now_s: Monotonic seconds.
        """
        is_certain = self.has_listened(since_s, now_s)
        return [
            known.view(1.0)
            for _, known in sorted(self._known.items())
            if not is_certain or known.heard_at_s >= since_s
        ]

    def prefixes(self) -> dict[str, PrefixCacheModel]:
        """Return instance_id -> prefix model."""
        return {instance_id: known.prefixes for instance_id, known in self._known.items()}

    def is_live(self, instance_id: str, now_s: float) -> bool:
        """Return whether the instance may get calls."""
        known = self._known.get(instance_id)
        return known is not None and self._takes_calls(known, now_s)

    def mark_unreachable(self, instance_id: str) -> None:
        """Give an instance no calls until its next life: its topic does not exist."""
        known = self._known.get(instance_id)
        if known is not None:
            known.has_topic = False

    def reserve(self, instance_id: str, key: CallKey, t_comp_s: float) -> OwnAssignments:
        """Count a call against an instance and return where to acknowledge or release it."""
        own = self._known[instance_id].own
        own.reserve(key, t_comp_s)
        self._probes.probed(instance_id, self._looked_at_s)
        return own

    def backlog_s(self) -> float:
        """Return the expected work bound to the fleet, seconds."""
        return sum(known.view(1.0).backlog_s for known in self._known.values())

    def _takes_calls(self, known: Known, now_s: float) -> bool:
        return (
            known.state.phase == "serving"
            and known.has_topic
            and now_s - known.heard_at_s <= self._live_s
        )


def prefix_model(spec: InstanceSpec) -> PrefixCacheModel:
    """Return a model of the instance's prefix cache: prefixes may hold half of its KV room."""
    capacity = int(spec.kv_tokens * PREFIX_SHARE) if spec.prefix_caching else 0
    return PrefixCacheModel(capacity, spec.block_tokens)
