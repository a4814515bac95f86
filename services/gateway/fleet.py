"""What the instances say of themselves, as `instance-states` and `control` tell it."""

from collections.abc import Iterator
from typing import Any

import msgspec

from services.gateway.problems import model_not_found, unavailable
from shared.contracts.epochs import epoch_of
from shared.contracts.messages import InstanceState, SpeedUpdate
from shared.ports import Clock

ANY_MODEL = "default"
SILENT_S = 15.0
MAX_INSTANCES = 10_000


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The last state of an instance.

    Attributes:
        state: What it said.
        epoch: The life that said it.
    """

    state: InstanceState
    epoch: int


class Fleet:
    """The instances heard of, and what the tuner learned of them.

    Args:
        clock: Mesh clock; a state older than 15 wall seconds counts as silence.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, Seen] = {}
        self.speeds: dict[str, SpeedUpdate] = {}

    def take(self, offset: int, state: InstanceState) -> None:
        """Take a state; those of an earlier life are passed over."""
        epoch = epoch_of(offset, state)
        known = self._seen.get(state.instance_id)
        if known is not None and known.epoch > epoch:
            return
        if known is None and len(self._seen) >= MAX_INSTANCES:
            return
        self._seen[state.instance_id] = Seen(state=state, epoch=epoch)

    def forget(self, instance_id: str) -> None:
        """Drop an instance whose record was withdrawn."""
        self._seen.pop(instance_id, None)
        self.speeds.pop(instance_id, None)

    def states(self) -> list[InstanceState]:
        """Return every instance's last state, by id."""
        return [self._seen[instance_id].state for instance_id in sorted(self._seen)]

    def is_live(self, state: InstanceState) -> bool:
        """Return whether an instance serves and was heard of lately."""
        age_s = (self._clock.now_s() - state.at_s) / self._clock.time_scale
        return state.phase == "serving" and age_s < SILENT_S

    def serving(self, model: str) -> Iterator[InstanceState]:
        """Return the live instances that offer a model."""
        for seen in self._seen.values():
            spec = seen.state.spec
            if (model == spec.model or model in spec.adapters) and self.is_live(seen.state):
                yield seen.state

    def has_any(self) -> bool:
        """Return whether any instance is live."""
        return any(self.is_live(seen.state) for seen in self._seen.values())

    def named(self, model: str) -> str:
        """Return the name under which a model is offered: its own.

        Where nobody offers `default` it stands for the only model there is.

        Raises:
            Problem: 404 with the nearest name, or 503 where no instance is live at all.
        """
        if any(True for _ in self.serving(model)):
            return model
        own = {state.spec.model for state in self.states() if self.is_live(state)}
        if not own:
            raise unavailable("every instance")
        if model == ANY_MODEL and len(own) == 1:
            return own.pop()
        raise model_not_found(model, self.offered())

    def features(self, model: str) -> frozenset[str]:
        """Return the abilities that the model's live instances declare."""
        return frozenset(name for state in self.serving(model) for name in state.spec.features)

    def offered(self) -> frozenset[str]:
        """Return every model and adapter that a live instance offers."""
        live = [state for state in self.states() if self.is_live(state)]
        return frozenset(name for one in live for name in (one.spec.model, *one.spec.adapters))

    def models(self) -> list[dict[str, Any]]:
        """Return every model and adapter that a live instance offers, as OpenAI lists them."""
        found: dict[str, dict[str, Any]] = {}
        for state in self.states():
            if not self.is_live(state):
                continue
            for name in (state.spec.model, *state.spec.adapters):
                entry = found.setdefault(name, _model(name, state))
                entry["hexflow"]["instances"].append(state.instance_id)
        return [found[name] for name in sorted(found)]


def _model(name: str, state: InstanceState) -> dict[str, Any]:
    spec = state.spec
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "hexflow",
        "max_model_len": spec.max_context_tokens,
        "parent": spec.model if name != spec.model else None,
        "hexflow": {"instances": []},
    }
