"""What was in force and what was true while a window happened, as a replay wants it.

A window is replayed as it was under everything that was in force at each of its instants: α and
shapes as they were published, speeds as dispatchers believed them, and the speeds that instances
really had. So nothing that is published makes older queries worthless as evidence.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from shared.contracts.messages import AlphaUpdate, ControlMessage, SpeedUpdate, WorkflowProfile
from shared.domain.profile import WorkflowShape
from shared.runtime.believed_speeds import Believed
from shared.scheduling.shapes import default_shapes
from shared.simulation.scenario import Change
from shared.simulation.speed_fit import SpeedFit
from shared.simulation.window_replay import Past

CACHE_IS_LOST_BELOW = 0.1
MAX_COLD = 20


def past_of(
    said: Sequence[ControlMessage],
    believed: Iterable[Believed],
    pool: str,
    alpha: float,
    from_s: float,
    now_s: float,
) -> Past:
    """Return what was in force in a window.

    Args:
        said: What was published.
        believed: What dispatchers believed of speeds, in order of time.
        pool: Whose α.
        alpha: α before anything was published.
        from_s: When the window begins, mesh clock.
        now_s: Present instant, mesh clock.
    """
    believed = [*believed]
    seen = {one.instance_id for one in believed}
    # No call tells what was believed of an instance that got none: then it is what was said of it.
    for update in said:
        if isinstance(update, SpeedUpdate) and update.instance_id not in seen:
            believed.append(Believed(-math.inf, update.instance_id, 1.0))
            believed.append(Believed(update.at_s, update.instance_id, update.factor))
    shapes: dict[str, WorkflowShape] = default_shapes()
    hits: dict[str, float] = {}
    later: list[Change] = []
    later_shapes = shapes
    for update in sorted(said, key=_at_s):
        is_later = update.at_s > from_s
        if isinstance(update, AlphaUpdate):
            if update.pool == pool and is_later:
                later.append(Change(at_s=update.at_s - from_s, alpha=update.alpha))
            elif update.pool == pool:
                alpha = update.alpha
        elif isinstance(update, WorkflowProfile):
            later_shapes = {**later_shapes, update.shape.workflow: update.shape}
            if is_later:
                later.append(Change(at_s=update.at_s - from_s, shapes=later_shapes))
            else:
                shapes = later_shapes
        elif is_later:
            hit = {update.instance_id: update.hit_factor}
            later.append(Change(at_s=update.at_s - from_s, hit_factors=hit))
        else:
            hits = hits | {update.instance_id: update.hit_factor}
    speeds, changes = _speeds(sorted(believed), from_s)
    return Past(
        alpha=alpha,
        shapes=shapes,
        believed_factors=speeds,
        hit_factors=hits,
        changes=tuple(sorted((*later, *changes), key=_when)),
        seen_until_s=now_s - from_s,
    )


def _speeds(believed: Iterable[Believed], from_s: float) -> tuple[dict[str, float], list[Change]]:
    """Return what was believed of each instance first, and what changed later."""
    first: dict[str, float] = {}
    changes = []
    for one in believed:
        if one.at_s <= from_s or one.instance_id not in first:
            first[one.instance_id] = one.factor
        else:
            factor = {one.instance_id: one.factor}
            changes.append(Change(at_s=one.at_s - from_s, believed_factors=factor))
    return first, changes


def _when(change: Change) -> float:
    return change.at_s


def _at_s(update: ControlMessage) -> float:
    return update.at_s


class Truth:
    """How fast instances are and were, and which cached nothing, as far as their calls tell."""

    def __init__(self) -> None:
        self._factors: dict[str, float] = {}
        self._before: dict[str, tuple[float, float]] = {}
        self._cold: list[tuple[float, frozenset[str]]] = [(0.0, frozenset())]

    def take_speeds(self, fits: Mapping[str, SpeedFit]) -> None:
        """Take what calls say of instances' speeds."""
        for instance_id, fit in fits.items():
            if fit.changed_at_s is not None:
                was = self._factors.get(instance_id, 1.0)
                self._before[instance_id] = (fit.changed_at_s, was)
            self._factors[instance_id] = fit.factor

    def take_hits(self, hits: Mapping[str, float], since_s: float) -> None:
        """Take the shares of expected cache hits that happened since an instant, mesh clock."""
        known = self._cold[-1][1]
        unheard = {one for one in known if one not in hits}
        cold = unheard | {one for one, share in hits.items() if share < CACHE_IS_LOST_BELOW}
        if cold != known:
            self._cold.append((since_s, frozenset(cold)))
            del self._cold[:-MAX_COLD]

    def speeds_at(self, at_s: float) -> dict[str, float]:
        """Return instance_id -> how much slower than its profile it was at an instant."""
        earlier = {key: factor for key, (until_s, factor) in self._before.items() if at_s < until_s}
        return {**self._factors, **earlier}

    def cold_at(self, at_s: float) -> tuple[str, ...]:
        """Return the instances that found nothing in their cache at an instant."""
        found = [cold for since_s, cold in self._cold if since_s <= at_s]
        return tuple(sorted(found[-1])) if found else ()

    def changes(self, from_s: float) -> tuple[Change, ...]:
        """Return the changes after an instant, counted from it."""
        speeds = {at_s for at_s, _ in self._before.values() if at_s > from_s}
        caches = {at_s for at_s, _ in self._cold if at_s > from_s}
        return tuple(
            Change(
                at_s=at_s - from_s,
                speed_factors=self.speeds_at(at_s) if at_s in speeds else None,
                cold=self.cold_at(at_s) if at_s in caches else None,
            )
            for at_s in sorted(speeds | caches)
        )
