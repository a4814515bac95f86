"""Who gets a call: filter the eligible instances, cost the call on each, let the policy choose.

The paper's score of instance m for a call is

    score(m) = (1 - α) · β / t_queue(m) - α · t_comp(m)          highest wins

t_queue(m) is the sum of t_comp of the calls bound to m and not finished, floored at 0.05 s; β is
this call's mean t_comp over the pool, squared, which gives both terms the unit of seconds.

Source: HexGen-Flow (arXiv 2505.05286), workload-balanced dispatching.
"""

import hashlib
import heapq
from collections.abc import Callable, Mapping, Sequence

import msgspec

from shared.domain.instance import InstanceSpec
from shared.errors import NoEligibleInstance
from shared.scheduling.admission import demoted, is_hopeless
from shared.scheduling.latency import service_s
from shared.scheduling.policy import Choice, Cost, InstanceView, Policy, WaitingCall
from shared.scheduling.prefix import PrefixCacheModel

T_QUEUE_FLOOR_S = 0.05
MAX_EXPLAINED = 4


def flow_score(alpha: float, beta_s2: float, t_queue_s: float, t_comp_s: float) -> float:
    """Return the paper's score of an instance, highest wins (leaf).

    Args:
        alpha: Weight of the compute term, in [0, 1].
        beta_s2: Scale of the queue term, seconds squared.
        t_queue_s: Work bound to the instance and not finished, seconds, > 0 (floored).
        t_comp_s: Expected service time of the call there, seconds.
    """
    return (1.0 - alpha) * beta_s2 / t_queue_s - alpha * t_comp_s


def floored_queue_s(backlog_s: float, floor_s: float = 0.05) -> float:
    """Return t_queue: the backlog, at least the floor (leaf)."""
    if backlog_s < floor_s:
        return floor_s
    return backlog_s


def beta_s2(mean_t_comp_s: float) -> float:
    """Return β for a call whose mean t_comp over the pool is given, seconds squared (leaf)."""
    return mean_t_comp_s * mean_t_comp_s


def tie_order(call_key: int, instance_key: int) -> int:
    """Return a number that orders equal scores differently for every call (leaf).

    Breaking ties by instance id would send every call of an idle fleet to the same instance.
    Different instances never get equal numbers.

    Args:
        call_key: Any number in [0, 2**31) that stands for the call.
        instance_key: Likewise for the instance.
    """
    mixed = (call_key ^ instance_key) & 0x7FFFFFFF
    mixed = (mixed * 0x2C1B3C6D) & 0x7FFFFFFF
    mixed ^= mixed >> 13
    mixed = (mixed * 0x297A2D39) & 0x7FFFFFFF
    return mixed ^ (mixed >> 15)


def text_key(text: str) -> int:
    """Return a stable number in [0, 2**31) that stands for an id in `tie_order`."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def tie_break(request_id: str, instance_id: str) -> int:
    """Return `tie_order` of two ids."""
    return tie_order(text_key(request_id), text_key(instance_id))


def is_eligible(call: WaitingCall, view: InstanceView) -> bool:
    """Return whether the instance offers the call's model and needs."""
    spec = view.spec
    return (
        (call.model == spec.model or call.model in spec.adapters)
        and all(feature in spec.features for feature in call.features)
        and call.context_tokens <= room_tokens(spec)
    )


def room_tokens(spec: InstanceSpec) -> int:
    """Return the longest prompt plus output that an instance can hold, tokens."""
    return min(spec.max_context_tokens, spec.kv_tokens)


def highest(
    call: WaitingCall, views: Sequence[InstanceView], score: Callable[[InstanceView], float]
) -> tuple[InstanceView, float]:
    """Return the view with the highest score and that score; ties by `tie_break`."""
    return max(
        ((view, score(view)) for view in views),
        key=lambda pair: (pair[1], tie_break(call.request_id, pair[0].spec.instance_id)),
    )


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A decision: this call goes to that instance.

    Attributes:
        call: The call.
        choice: The instance and the numbers behind the choice.
        cost: Expected cost there.
        queue_score: Position in the instance's queue, smallest first.
        others: The other instances that looked quickest: instance_id -> (backlog, t_comp), seconds.
        is_hopeless: Whether its query can no longer be in time, so that it goes behind the others.
    """

    call: WaitingCall
    choice: Choice
    cost: Cost
    queue_score: float
    others: dict[str, tuple[float, float]] = {}
    is_hopeless: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a set of waiting calls.

    Attributes:
        assignments: Calls bound now, in order.
        rejections: (call, reason word) of calls that no instance may ever take.
        unassigned: Calls that stay waiting here.
    """

    assignments: list[Assignment]
    rejections: list[tuple[WaitingCall, str]]
    unassigned: list[WaitingCall]


def cost_on(call: WaitingCall, view: InstanceView, prefixes: PrefixCacheModel | None) -> Cost:
    """Return the expected cost of a call on an instance."""
    cached = prefixes.expected_cached_tokens(call.prefix, call.input_tokens) if prefixes else 0
    cached = int(cached * view.hit_factor)
    t_comp_s = service_s(
        view.spec,
        input_tokens=call.input_tokens,
        cached_tokens=cached,
        output_tokens=call.output_tokens,
        speed_factor=view.speed_factor,
    )
    return Cost(t_comp_s=t_comp_s, cached_tokens=cached)


def plan(
    policy: Policy,
    calls: Sequence[WaitingCall],
    views: Sequence[InstanceView],
    prefixes: Mapping[str, PrefixCacheModel],
    now_s: float,
    *,
    demotes: bool = False,
) -> Plan:
    """Decide for every waiting call: assign, reject or leave waiting.

    Calls are taken in the order given; each assignment adds to its instance's load before the
    next call is looked at, and to the instance's prefix model. Instances whose queue is at its
    bound are not offered; a call whose eligible instances are all full stays waiting.

    Args:
        policy: Who decides.
        calls: The waiting calls.
        views: All live instances that take calls.
        prefixes: instance_id -> prefix model, updated in place for assigned calls.
        now_s: Present instant, seconds.
        demotes: Whether calls whose query can no longer be in time go behind the others.
    """
    current = {view.spec.instance_id: view for view in sorted(views, key=_by_id)}
    result = Plan(assignments=[], rejections=[], unassigned=[])
    for call in calls:
        eligible = _preferred(call, [view for view in current.values() if is_eligible(call, view)])
        if not eligible:
            result.rejections.append((call, NoEligibleInstance.reason))
            continue
        refusal = policy.admit(call, eligible, now_s)
        if refusal is not None:
            result.rejections.append((call, refusal))
            continue
        eligible = [view for view in eligible if view.num_waiting < view.queue_bound]
        if not eligible:
            result.unassigned.append(call)
            continue
        costs = {
            view.spec.instance_id: cost_on(call, view, prefixes.get(view.spec.instance_id))
            for view in eligible
        }
        choice = policy.choose(call, eligible, costs, now_s)
        if choice is None:
            result.unassigned.append(call)
            continue
        cost = costs[choice.instance_id]
        others = _runners_up(choice.instance_id, eligible, costs)
        current[choice.instance_id] = _with_call(current[choice.instance_id], cost)
        if choice.instance_id in prefixes:
            prefixes[choice.instance_id].touch(call.prefix)
        score = policy.queue_score(call, cost.t_comp_s)
        is_late = demotes and is_hopeless(now_s, call.deadline_s, cost.t_comp_s + call.remaining_s)
        result.assignments.append(
            Assignment(
                call=call,
                choice=choice,
                cost=cost,
                queue_score=demoted(score) if is_late else score,
                others=others,
                is_hopeless=is_late,
            )
        )
    return result


def _runners_up(
    chosen: str, eligible: Sequence[InstanceView], costs: Mapping[str, Cost]
) -> dict[str, tuple[float, float]]:
    """Return what the quickest instances not chosen had to offer, for the explanation."""
    offers = (
        (view.backlog_s + costs[view.spec.instance_id].t_comp_s, view.spec.instance_id, view)
        for view in eligible
        if view.spec.instance_id != chosen
    )
    return {
        instance_id: (view.backlog_s, costs[instance_id].t_comp_s)
        for _, instance_id, view in heapq.nsmallest(MAX_EXPLAINED, offers)
    }


def _preferred(call: WaitingCall, eligible: list[InstanceView]) -> list[InstanceView]:
    """Leave out the instances too small for the call or that failed it, unless there is no other.

    A prompt that proves too long is refused by the engine for good, so one whose length is only
    predicted goes where the prediction fits, or else where there is most room. An instance that
    fails at once looks idle, and without this would get its failures again.
    """
    if call.expected_context_tokens and eligible:
        most = max(room_tokens(view.spec) for view in eligible)
        wanted = min(call.expected_context_tokens, most)
        eligible = [view for view in eligible if room_tokens(view.spec) >= wanted]
    if not call.avoid:
        return eligible
    return [view for view in eligible if view.spec.instance_id not in call.avoid] or eligible


def _by_id(view: InstanceView) -> str:
    return view.spec.instance_id


def _with_call(view: InstanceView, cost: Cost) -> InstanceView:
    return msgspec.structs.replace(
        view, backlog_s=view.backlog_s + cost.t_comp_s, num_waiting=view.num_waiting + 1
    )
