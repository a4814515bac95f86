"""One speed factor per instance: how much slower it is than its profiled latency model.

The single coefficients of a latency model are not identifiable from a window, one factor on top of
them is. It cannot be read off a call's service time either, which depends on what else was in the
batch; so the instance's own calls are run through its batching model again, each handed in at the
instant at which it really was, with the lengths it really had, under several factors. The factor
wanted is the one at which the median of observed ÷ modelled service time is one. The median leaves
up to half of the calls free to be outliers.

Only completed calls are known: those running now, and those of queries that left the window, were
in the batch too and are missing. So calls near either end of the window load the model but have no
say: those within the 95th percentile of the service times.

Prompt tokens found in the prefix cache are left out of the prompt: what was really cached is known.
"""

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from shared.domain.instance import TIMES, InstanceSpec, LatencyModel
from shared.errors import InvalidCall
from shared.scheduling.attainment import percentile
from shared.scheduling.changepoints import latest_change
from shared.simulation.batching import BatchingInstance

LOWEST, HIGHEST = 0.05, 50.0
STEPS = 12
ENOUGH_STEPS = 0.01
MAX_CALLS = 800
LEAST_CALLS = 20
MARGIN_SHARE = 0.2


class RanCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as an engine really ran it.

    Attributes:
        started_s: Handed to the engine, seconds.
        finished_s: Last token, seconds.
        input_tokens: Prompt tokens that were computed: those found cached are left out.
        output_tokens: Generated tokens.
    """

    started_s: float
    finished_s: float
    input_tokens: int
    output_tokens: int


class SpeedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One instance and the calls it ran.

    Attributes:
        spec: The instance as it described itself.
        calls: What ran on it.
        known: Speed factor in force.
    """

    spec: InstanceSpec
    calls: tuple[RanCall, ...]
    known: float = 1.0


class SpeedFit(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance's calls say of its speed.

    Attributes:
        factor: Observed time divided by the model's, > 0.
        num_calls: Calls it rests on: those since the latest change of speed.
        changed_at_s: When the speed changed within the calls, seconds; None: it did not.
    """

    factor: float
    num_calls: int
    changed_at_s: float | None = None


def fit_speed(
    spec: InstanceSpec, calls: Sequence[RanCall], *, known: float = 1.0
) -> SpeedFit | None:
    """Return the speed of an instance, or None where too few calls ran on it.

    Args:
        spec: The instance as it described itself.
        calls: Calls it completed, any order; the latest `MAX_CALLS` are used.
        known: The factor believed in so far, where the search begins.
    """
    recent = sorted(calls, key=_started_s)[-MAX_CALLS:]
    if len(recent) < LEAST_CALLS or not any(_has_say(recent)):
        return None
    factor = _fitted(spec, recent, known)
    ratios = _ratios(spec, recent, factor)
    cut = latest_change([ratio for _, ratio in ratios])
    if cut is None:
        return SpeedFit(factor=factor, num_calls=len(recent))
    changed_at_s = ratios[cut][0]
    later = [call for call in recent if call.started_s >= changed_at_s]
    if sum(_has_say(later)) < LEAST_CALLS:
        return SpeedFit(factor=factor, num_calls=len(recent))
    return SpeedFit(
        factor=_fitted(spec, later, factor), num_calls=len(later), changed_at_s=changed_at_s
    )


def _fitted(spec: InstanceSpec, calls: Sequence[RanCall], known: float) -> float:
    """Return the factor at which half of the calls took longer than the model says."""
    low, high = math.log(LOWEST), math.log(HIGHEST)
    at = math.log(min(HIGHEST, max(LOWEST, known)))
    for _ in range(STEPS):
        ratio = median(ratio for _, ratio in _ratios(spec, calls, math.exp(at)))
        step = math.log(ratio)
        if abs(step) < ENOUGH_STEPS:
            break
        # Monotone: a slower model has smaller ratios. The step overshoots where calls overlap.
        low, high = (at, high) if step > 0 else (low, at)
        at = min(high, max(low, at + step))
        if at in (low, high):
            at = (low + high) / 2.0
    return math.exp(at)


def _ratios(
    spec: InstanceSpec, calls: Sequence[RanCall], factor: float
) -> list[tuple[float, float]]:
    """Return (started, observed ÷ modelled service time) per call with a say, by start."""
    modelled = _modelled_s(spec, calls, factor)
    return [
        (call.started_s, max(1e-9, call.finished_s - call.started_s) / max(1e-9, service_s))
        for call, service_s, has_say in zip(calls, modelled, _has_say(calls), strict=True)
        if service_s > 0.0 and has_say
    ] or [(calls[0].started_s, 1.0)]


def _has_say(calls: Sequence[RanCall]) -> list[bool]:
    """Return which calls ran among calls that are all known."""
    if not calls:
        return []
    first_s = min(call.started_s for call in calls)
    last_s = max(call.started_s for call in calls)
    margin_s = min(
        percentile([call.finished_s - call.started_s for call in calls], 95),
        MARGIN_SHARE * (last_s - first_s),
    )
    return [
        call.started_s >= first_s + margin_s and call.finished_s <= last_s - margin_s
        for call in calls
    ]


def _modelled_s(spec: InstanceSpec, calls: Sequence[RanCall], factor: float) -> list[float]:
    """Return every call's service time in the batching model; 0 where it cannot run."""
    instance = BatchingInstance(msgspec.structs.replace(spec, latency=_slowed(spec, factor)))
    ends = [0.0] * len(calls)

    def take(now_s: float) -> None:
        for event in instance.advance(now_s):
            if event.kind == "finished":
                ends[event.handle] = event.at_s

    for handle, call in enumerate(calls):
        while instance.next_event_s() <= call.started_s:
            take(instance.next_event_s())
        try:
            instance.add(
                handle,
                now_s=call.started_s,
                input_tokens=call.input_tokens,
                output_tokens=call.output_tokens,
            )
        except InvalidCall:
            continue
    while math.isfinite(instance.next_event_s()):
        take(instance.next_event_s())
    return [
        max(0.0, end - call.started_s) if end else 0.0
        for call, end in zip(calls, ends, strict=True)
    ]


def _slowed(spec: InstanceSpec, factor: float) -> LatencyModel:
    model = spec.latency
    return msgspec.structs.replace(model, **{name: getattr(model, name) * factor for name in TIMES})


def _started_s(call: RanCall) -> float:
    return call.started_s
