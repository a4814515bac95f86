"""What dispatchers believed of instances' speeds, read off the costs they used.

A call's expected cost is its latency model's, for the lengths expected of it, times what its
dispatcher believed of the instance's speed: learned, or seen by itself. So the belief of every
instant is in the events; nothing has to be assumed about how a dispatcher comes to it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

from shared.contracts.messages import LatencyEvent
from shared.contracts.query_window import QueryRecord
from shared.domain.instance import InstanceSpec
from shared.scheduling.latency import service_s

STEADY = 5
NOTABLE = math.log(1.1)
BOUNDS = (0.01, 100.0)


class Believed(NamedTuple):
    """From an instant on an instance was believed to be so many times slower than its profile."""

    at_s: float
    instance_id: str
    factor: float


def believed_speeds(
    records: Iterable[QueryRecord], fleet: Mapping[str, InstanceSpec]
) -> list[Believed]:
    """Return what was believed and when it changed, in order of time.

    A belief counts once the median of five calls in a row differs by a tenth.

    Args:
        records: Queries of the window.
        fleet: The instances, as they reported themselves.
    """
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        for event in record.calls.values():
            spec = fleet.get(event.instance_id)
            at_s = event.times.dispatched_at_s
            if spec is not None and at_s is not None and event.t_comp_s > 0.0:
                seen[event.instance_id].append((at_s, _factor(event, spec)))
    found: list[Believed] = []
    for instance_id, factors in seen.items():
        found += _steps(instance_id, sorted(factors))
    return sorted(found)


def _factor(event: LatencyEvent, spec: InstanceSpec) -> float:
    lowest, highest = BOUNDS
    profiled_s = service_s(
        spec,
        input_tokens=max(1, event.usage.input_tokens),
        cached_tokens=event.expected_cached_tokens,
        output_tokens=event.predicted_output_tokens,
    )
    return max(lowest, min(highest, event.t_comp_s / profiled_s))


def _steps(instance_id: str, factors: list[tuple[float, float]]) -> list[Believed]:
    found: list[Believed] = []
    for start in range(max(1, len(factors) - STEADY + 1)):
        some = factors[start : start + STEADY]
        factor = median(value for _, value in some)
        if not found or abs(math.log(factor / found[-1].factor)) > NOTABLE:
            found.append(Believed(some[0][0], instance_id, factor))
    return found
