"""Which waiting calls go where now, which are refused, which go on waiting.

The decision itself is `shared.scheduling.dispatch.plan`; here the waiting calls are put before it
group by group (equal model and needs), so that a group that cannot move costs nothing and blocks
no other. A call no live instance may take waits while an eligible one was heard of lately, or,
as long as no instance at all is live, up to the same grace; then it is refused. A call whose prompt
is likely too long for all that are live waits likewise, and then goes to the largest.
"""

from collections.abc import Sequence
from itertools import islice

import msgspec

from services.dispatcher.answers import Verdict
from services.dispatcher.call_book import CallBook, GroupKey, OpenCall
from services.dispatcher.control import Cancellations, Control, pool_of
from services.dispatcher.fleet_state import FleetState, OwnAssignments
from services.dispatcher.gate import Gate
from services.dispatcher.intake import QueryMemory
from services.dispatcher.params import DispatcherParams
from services.dispatcher.preparation import Prepared, prepare
from shared.errors import NoEligibleInstance, Overloaded, QueueFull
from shared.ports import Clock
from shared.scheduling.dispatch import Assignment, is_eligible, plan, room_tokens
from shared.scheduling.policy import InstanceView, WaitingCall

OFFER_AT_LEAST = 64
CANCELLED = Verdict(kind="cancelled", reason="cancelled", detail="the query was cancelled")


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """A call that goes to an instance.

    Attributes:
        call: The call.
        prepared: Its budget and predictions.
        assignment: Where it goes and why.
        own: Where the assignment is acknowledged or released.
        policy: Name of the policy that chose.
    """

    call: OpenCall
    prepared: Prepared
    assignment: Assignment
    own: OwnAssignments
    policy: str


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the waiting calls; those not named go on waiting."""

    bindings: list[Binding]
    verdicts: list[tuple[OpenCall, Verdict]]


class Planner:
    """Plans over the open calls; nothing here waits.

    Args:
        book: The open calls.
        fleet: The instances.
        control: Policies, predictor, speeds.
        gate: Says which queries are turned away.
        cancellations: Queries that are cancelled.
        memory: SLOs chosen for queries.
        clock: Time.
        params: Grace and bounds.
    """

    def __init__(
        self,
        book: CallBook,
        fleet: FleetState,
        control: Control,
        gate: Gate,
        cancellations: Cancellations,
        memory: QueryMemory,
        clock: Clock,
        params: DispatcherParams,
    ) -> None:
        self._book = book
        self._fleet = fleet
        self._control = control
        self._gate = gate
        self._cancellations = cancellations
        self._memory = memory
        self._clock = clock
        self._params = params

    def decide(self) -> Decisions:
        """Decide for all waiting calls; those named in the result no longer wait."""
        decisions = Decisions(bindings=[], verdicts=[])
        for one_id in self._cancellations.take_due():
            for call in self._book.waiting_of(one_id):
                self._refuse(call, CANCELLED, decisions)
        for group in self._book.groups():
            self._decide_group(group, decisions)
        self._shed(decisions)
        return decisions

    def _decide_group(self, group: GroupKey, decisions: Decisions) -> None:
        live = self._fleet.views(
            self._clock.monotonic_s(), self._control.speeds, self._control.hits
        )
        views = [view for view in live if _offers(group, view)]
        if not views:
            self._refuse_hopeless(group, decisions, is_any_live=bool(live))
            return
        self._turn_away(group, views, decisions)
        room = sum(max(0, view.queue_bound - view.num_waiting) for view in views)
        if room == 0:
            return
        limit = max(OFFER_AT_LEAST, room)
        calls = list(islice(self._book.waiting_in(group), limit))
        self._plan(group, calls, views, decisions)
        self._rotate(group, calls)

    def _turn_away(
        self, group: GroupKey, views: Sequence[InstanceView], decisions: Decisions
    ) -> None:
        """Ask the gate about the calls that have just come."""
        for call in self._book.take_new(group):
            if not self._params.admission:
                continue
            prepared = self._prepared(call, views)
            if not any(is_eligible(prepared.call, view) for view in views):
                continue  # no room would help it: it is refused for what it is, or waits
            reason = self._gate.judge(prepared, views)
            if reason is not None:
                self._refuse(call, _verdict(reason, call), decisions)

    def _plan(
        self,
        group: GroupKey,
        calls: Sequence[OpenCall],
        views: Sequence[InstanceView],
        decisions: Decisions,
    ) -> None:
        policy = self._control.policy(pool_of(group[0], (view.spec for view in views)))
        prepared = {call.request.request_id: self._prepared(call, views) for call in calls}
        by_id = {call.request.request_id: call for call in calls}
        result = plan(
            policy,
            [
                waiting
                for waiting in (prepared[request_id].call for request_id in by_id)
                if not self._awaits_room(waiting, views)
            ],
            views,
            self._fleet.prefixes(),
            self._clock.now_s(),
            demotes=self._params.admission,
        )
        for assignment in result.assignments:
            request_id = assignment.call.request_id
            self._bind(by_id[request_id], prepared[request_id], assignment, policy.name, decisions)
        for waiting, reason in result.rejections:
            call = by_id[waiting.request_id]
            if reason == NoEligibleInstance.reason and self._may_come_back(call):
                continue
            self._refuse(call, _verdict(reason, call), decisions)

    def _bind(
        self,
        call: OpenCall,
        prepared: Prepared,
        assignment: Assignment,
        policy: str,
        decisions: Decisions,
    ) -> None:
        self._book.begin_publish(call)
        own = self._fleet.reserve(assignment.choice.instance_id, call.key, assignment.cost.t_comp_s)
        decisions.bindings.append(
            Binding(call=call, prepared=prepared, assignment=assignment, own=own, policy=policy)
        )

    def _prepared(self, call: OpenCall, views: Sequence[InstanceView]) -> Prepared:
        """Return a call's predictions; its budget freezes the first time it is looked at."""
        if call.prepared is None:
            call.prepared = prepare(
                call.request, views, self._control.predictor, self._params, self._memory
            )
            call.request = call.prepared.request
        return call.prepared

    def _refuse_hopeless(self, group: GroupKey, decisions: Decisions, *, is_any_live: bool) -> None:
        now_s = self._clock.monotonic_s()
        since_s = now_s - self._params.no_instance_grace_s
        if any(_offers(group, view) for view in self._fleet.heard_within(since_s, now_s)):
            return
        is_certain = self._fleet.has_listened(since_s, now_s)
        for call in list(self._book.waiting_in(group)):
            if is_any_live or (is_certain and call.since_s <= since_s):
                self._refuse(call, _verdict(NoEligibleInstance.reason, call), decisions)

    def _may_come_back(self, call: OpenCall) -> bool:
        """Return whether an eligible instance that is not live was heard of within the grace."""
        now_s = self._clock.monotonic_s()
        since_s = now_s - self._params.no_instance_grace_s
        waiting = call.prepared.call if call.prepared else None
        return waiting is not None and any(
            is_eligible(waiting, view) for view in self._fleet.heard_within(since_s, now_s)
        )

    def _awaits_room(self, waiting: WaitingCall, views: Sequence[InstanceView]) -> bool:
        """Return whether a call likely needs a larger instance that is away and may come back.

        A smaller one might refuse it, which is final.
        """
        wanted = waiting.expected_context_tokens
        if any(room_tokens(view.spec) >= wanted for view in views):
            return False
        now_s = self._clock.monotonic_s()
        return any(
            room_tokens(view.spec) >= wanted and is_eligible(waiting, view)
            for view in self._fleet.heard_within(now_s - self._params.no_instance_grace_s, now_s)
        )

    def _rotate(self, group: GroupKey, offered: Sequence[OpenCall]) -> None:
        """Put calls that were looked at in vain behind those that were not."""
        left = [call for call in offered if not call.is_publishing]
        if len(left) < self._book.num_waiting_in(group):
            for call in left:
                self._book.send_to_back(call)

    def _shed(self, decisions: Decisions) -> None:
        """Refuse waiting calls beyond the bounds: the newest of the tenant that has the most."""
        while self._book.num_waiting:
            tenant, count = self._book.most_waiting()
            if (
                self._book.num_waiting <= self._params.pending_bound
                and self._book.waiting_bytes <= self._params.pending_bytes
                and count <= self._params.tenant_pending_bound
            ):
                return
            call = self._book.newest_waiting(tenant)
            self._refuse(call, _verdict(QueueFull.reason, call), decisions)

    def _refuse(self, call: OpenCall, verdict: Verdict, decisions: Decisions) -> None:
        self._gate.turned_away(call.request)
        self._book.begin_publish(call)
        decisions.verdicts.append((call, verdict))


def _offers(group: GroupKey, view: InstanceView) -> bool:
    model, features = group
    spec = view.spec
    return (model == spec.model or model in spec.adapters) and all(
        feature in spec.features for feature in features
    )


def _verdict(reason: str, call: OpenCall) -> Verdict:
    request = call.request
    details = {
        NoEligibleInstance.reason: f"no live instance offers model {request.model!r}"
        + (f" with {', '.join(request.needs.features)}" if request.needs.features else "")
        + (f" and {_context_needed(call.prepared.call)}" if call.prepared else ""),
        QueueFull.reason: "every eligible instance and the dispatcher's own queue are full",
        Overloaded.reason: "the query cannot be done in time beside those let in before it",
    }
    detail = details.get(reason, "the policy lets no such call in at present")
    return Verdict(kind="rejected", reason=reason, detail=detail)


def _context_needed(waiting: WaitingCall) -> str:
    if waiting.expected_context_tokens:
        return f"a context of at least {waiting.context_tokens} tokens (a low count, from its text)"
    return f"a context of {waiting.context_tokens} tokens"
