"""The calls a dispatcher holds: waiting to be assigned, or being published.

Invariants. A call, that is a delivery (request_id, attempt), is here at most once. Each keeps the
places it was read from (its origins); they are finished together when the call is handed on, so a
duplicate is never committed before the delivery it repeats. A call whose last origin has moved to
another dispatcher is dropped while it waits: its new owner has it.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import TypeVar

import msgspec

from services.dispatcher.fleet_state import CallKey
from services.dispatcher.preparation import Prepared
from shared.contracts.messages import StageRequest
from shared.ports import TopicPartition
from shared.runtime.offsets import OffsetTracker

GroupKey = tuple[str, tuple[str, ...]]  # (model, features)
K = TypeVar("K")


class Origin(msgspec.Struct, frozen=True):
    """Where a delivery was read."""

    tp: TopicPartition
    offset: int
    tracker: OffsetTracker

    def finish(self) -> None:
        """Note that it is handed on."""
        self.tracker.finish(self.offset)


class OpenCall:
    """A call that is not handed on yet.

    Args:
        request: The call.
        origin: Where it was read.
        size_bytes: Size of its record, bytes.
        since_s: When it was read, monotonic seconds.
        traceparent: W3C trace context.
    """

    __slots__ = (
        "is_publishing",
        "origins",
        "prepared",
        "request",
        "since_s",
        "size_bytes",
        "traceparent",
    )

    def __init__(
        self,
        request: StageRequest,
        origin: Origin,
        size_bytes: int,
        since_s: float,
        traceparent: str | None = None,
    ) -> None:
        self.request = request
        self.origins = [origin]
        self.size_bytes = size_bytes
        self.since_s = since_s
        self.traceparent = traceparent
        self.prepared: Prepared | None = None
        self.is_publishing = False

    @property
    def key(self) -> CallKey:
        """The delivery's identity."""
        return (self.request.request_id, self.request.attempt)

    @property
    def cancelled_by(self) -> tuple[str, ...]:
        """What a tombstone that ends the call may name: its query, or the call itself."""
        return (self.request.effective_query_id, self.request.request_id)

    @property
    def group(self) -> GroupKey:
        """Calls of one group have the same instances to choose from, context length apart."""
        return (self.request.model, self.request.needs.features)


class CallBook:
    """All open calls, and the recently ended ones.

    Args:
        remembered: How many ended deliveries are remembered.
    """

    def __init__(self, remembered: int) -> None:
        self._open: dict[CallKey, OpenCall] = {}
        self._waiting: dict[CallKey, OpenCall] = {}
        self._groups: dict[GroupKey, dict[CallKey, OpenCall]] = {}
        self._new: dict[GroupKey, dict[CallKey, OpenCall]] = {}
        self._tenants: dict[str, dict[CallKey, OpenCall]] = {}
        self._of: dict[str, set[CallKey]] = {}  # by query, and by request id
        self._ended: OrderedDict[CallKey, None] = OrderedDict()
        self._remembered = remembered
        self.waiting_bytes = 0

    @property
    def num_waiting(self) -> int:
        """Calls not assigned yet."""
        return len(self._waiting)

    @property
    def num_publishing(self) -> int:
        """Calls assigned or answered and not acknowledged yet."""
        return len(self._open) - len(self._waiting)

    def add(self, call: OpenCall) -> bool:
        """Take a call; False when it is a duplicate.

        A duplicate of an open call adds its origin to it; one of an ended call is finished at
        once, because that call is handed on.
        """
        key = call.key
        known = self._open.get(key)
        if known is not None:
            known.origins.extend(call.origins)
            return False
        if key in self._ended:
            for origin in call.origins:
                origin.finish()
            return False
        self._open[key] = call
        for one_id in call.cancelled_by:
            self._of.setdefault(one_id, set()).add(key)
        self._wait(call)
        self._new.setdefault(call.group, {})[key] = call
        return True

    def take_new(self, group: GroupKey) -> list[OpenCall]:
        """Return the calls of a group that came since this was last asked and still wait."""
        return list(self._new.pop(group, {}).values())

    def groups(self) -> list[GroupKey]:
        """Return the groups that have waiting calls."""
        return list(self._groups)

    def waiting_in(self, group: GroupKey) -> Iterator[OpenCall]:
        """Yield the waiting calls of a group, first come first; change nothing meanwhile."""
        yield from self._groups.get(group, {}).values()

    def num_waiting_in(self, group: GroupKey) -> int:
        """Return how many calls of a group wait."""
        return len(self._groups.get(group, {}))

    def most_waiting(self) -> tuple[str, int]:
        """Return the tenant with the most waiting calls, and how many they are."""
        tenant = max(self._tenants, key=lambda one: (len(self._tenants[one]), one))
        return tenant, len(self._tenants[tenant])

    def newest_waiting(self, tenant: str) -> OpenCall:
        """Return the call of a tenant that came to wait last."""
        calls = self._tenants[tenant]
        return calls[next(reversed(calls))]

    def waiting_of(self, one_id: str) -> list[OpenCall]:
        """Return the waiting calls of a query, or the attempts of one call."""
        keys = self._of.get(one_id, set())
        return [self._waiting[key] for key in sorted(keys) if key in self._waiting]

    def begin_publish(self, call: OpenCall) -> None:
        """Take a call out of the waiting ones."""
        self._unwait(call)
        call.is_publishing = True

    def put_back(self, call: OpenCall) -> bool:
        """Make a call wait again; False when it was dropped because its origins moved away."""
        call.is_publishing = False
        if not call.origins:
            self._forget(call)
            return False
        self._wait(call)
        return True

    def send_to_back(self, call: OpenCall) -> None:
        """Put a waiting call behind the others of its group."""
        group = self._groups[call.group]
        group[call.key] = group.pop(call.key)

    def end(self, call: OpenCall) -> None:
        """Note that a call is handed on: its origins are finished, later copies are dropped."""
        for origin in call.origins:
            origin.finish()
        self._forget(call)
        self._ended[call.key] = None
        if len(self._ended) > self._remembered:
            self._ended.popitem(last=False)

    def abandon(self, call: OpenCall) -> None:
        """Forget a call without finishing it: it will be delivered again."""
        self._forget(call)

    def publishing_from(self, tps: Collection[TopicPartition]) -> int:
        """Return how many calls read from these partitions are being published."""
        return sum(
            call.is_publishing and any(origin.tp in tps for origin in call.origins)
            for call in self._open.values()
        )

    def drop_origins(self, tps: Collection[TopicPartition], *, waiting_only: bool) -> int:
        """Forget what was read from partitions that move away; returns the calls dropped."""
        dropped = 0
        for call in list(self._open.values()):
            if waiting_only and call.is_publishing:
                continue
            call.origins = [origin for origin in call.origins if origin.tp not in tps]
            if not call.origins and not call.is_publishing:
                self._forget(call)
                dropped += 1
        return dropped

    def _wait(self, call: OpenCall) -> None:
        self._waiting[call.key] = call
        self._groups.setdefault(call.group, {})[call.key] = call
        self._tenants.setdefault(call.request.tenant, {})[call.key] = call
        self.waiting_bytes += call.size_bytes

    def _unwait(self, call: OpenCall) -> None:
        if self._waiting.pop(call.key, None) is None:
            return
        self.waiting_bytes -= call.size_bytes
        _drop(self._groups, call.group, call.key)
        _drop(self._tenants, call.request.tenant, call.key)
        _drop(self._new, call.group, call.key)

    def _forget(self, call: OpenCall) -> None:
        self._unwait(call)
        self._open.pop(call.key, None)
        for one_id in call.cancelled_by:
            keys = self._of.get(one_id)
            if keys is not None:
                keys.discard(call.key)
                if not keys:
                    del self._of[one_id]


def _drop(table: dict[K, dict[CallKey, OpenCall]], key: K, call_key: CallKey) -> None:
    calls = table.get(key, {})
    calls.pop(call_key, None)
    if not calls:
        table.pop(key, None)
