"""What the tuner knows besides the window: the fleet, and what is on `control` already.

Of each key of `control` the highest revision counts, whatever the order of arrival, and whoever
wrote it: a standby that takes over goes on from there.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from shared.contracts.codec import decode_any
from shared.contracts.messages import (
    AlphaUpdate,
    ControlMessage,
    InstanceState,
    RecoveryProbe,
    SpeedUpdate,
    WorkflowProfile,
)
from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.errors import ContractError
from shared.ports import Record
from shared.runtime.metrics import Metrics
from shared.scheduling.profiles import default_shapes

MAX_REMEMBERED = 10_000
MAX_SAID = 1_000


class _Revised(Protocol):
    @property
    def revision(self) -> int: ...


Update = TypeVar("Update", bound=_Revised)


def _keep_newest(table: dict[str, Update], key: str, update: Update) -> bool:
    known = table.get(key)
    is_newer = known is None or update.revision > known.revision
    if is_newer:
        table[key] = update
    return is_newer


def next_revision(known: _Revised | None) -> int:
    """Return the revision of an update that replaces another."""
    return 1 if known is None else known.revision + 1


class Tables:
    """Followed topics as tables.

    Args:
        metrics: Shows what is in force.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.fleet: dict[str, InstanceSpec] = {}
        self.ever_seen: dict[str, None] = {}
        self.alphas: dict[str, AlphaUpdate] = {}
        self.profiles: dict[str, WorkflowProfile] = {}
        self.speeds: dict[str, SpeedUpdate] = {}
        self.said: list[ControlMessage] = []

    def on_state(self, record: Record) -> None:
        """Take a record of `instance-states`."""
        try:
            state = decode_any(record.value or b"", InstanceState, RecoveryProbe)
        except ContractError:
            return  # a tombstone, or garbage that the dispatcher already counts
        if not isinstance(state, InstanceState):
            return
        self.ever_seen[state.instance_id] = None
        if len(self.ever_seen) > MAX_REMEMBERED:
            del self.ever_seen[next(iter(self.ever_seen))]
        if state.phase in {"draining", "gone"}:
            self.fleet.pop(state.instance_id, None)
        else:
            self.fleet[state.instance_id] = state.spec
            self._show_speed(state.instance_id)

    def on_control(self, record: Record) -> None:
        """Take a record of `control`."""
        try:
            update = decode_any(record.value or b"", AlphaUpdate, WorkflowProfile, SpeedUpdate)
        except ContractError:
            return
        if isinstance(update, AlphaUpdate | WorkflowProfile | SpeedUpdate):
            self.take(update)

    def take(self, update: ControlMessage) -> None:
        """Take what was said, by this tuner or another; a second time it changes nothing."""
        if isinstance(update, AlphaUpdate):
            is_newer = _keep_newest(self.alphas, update.pool, update)
            self._metrics.alpha.set(self.alphas[update.pool].alpha, pool=update.pool)
        elif isinstance(update, WorkflowProfile):
            is_newer = _keep_newest(self.profiles, update.shape.workflow, update)
        else:
            is_newer = _keep_newest(self.speeds, update.instance_id, update)
            self._show_speed(update.instance_id)
        if is_newer:
            self.said.append(update)
            del self.said[:-MAX_SAID]

    def _show_speed(self, instance_id: str) -> None:
        known = self.speeds.get(instance_id)
        self._metrics.speed.set(1.0 if known is None else known.factor, target=instance_id)

    def shapes(self) -> dict[str, WorkflowShape]:
        """Return what is expected of each workflow now."""
        learned = {name: profile.shape for name, profile in self.profiles.items()}
        return {**default_shapes(), **learned}

    def members_of(self, pool: str) -> tuple[InstanceSpec, ...]:
        """Return a pool's instances, sorted by id."""
        return tuple(spec for _, spec in sorted(self.fleet.items()) if spec.model == pool)


def pool_of(model: str, specs: Iterable[InstanceSpec]) -> str:
    """Return the pool that serves a model: its base model's name (of several, the first)."""
    bases = {spec.model for spec in specs if model == spec.model or model in spec.adapters}
    return model if model in bases or not bases else min(bases)
