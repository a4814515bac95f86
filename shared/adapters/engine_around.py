"""An engine around another one: what a wrapper does not change passes through."""

from collections.abc import AsyncGenerator

from shared.contracts.messages import BoundCall
from shared.domain.instance import InstanceSpec
from shared.ports import Engine, EngineEvent


class EngineAround:
    """Implements `Engine` on another one; subclasses change a part of it.

    Args:
        engine: What runs the calls.
        spec: A description to give instead of the engine's own.
    """

    def __init__(self, engine: Engine, spec: InstanceSpec | None = None) -> None:
        self._engine = engine
        self._spec = spec

    @property
    def spec(self) -> InstanceSpec:
        """Return the instance's description."""
        return self._spec or self._engine.spec

    def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Run one call; see `Engine.generate`."""
        return self._engine.generate(call, engine_id)

    def has_room_for(self, call: BoundCall) -> bool:
        """Return whether the call would be batched now."""
        return self._engine.has_room_for(call)

    async def room_changed(self) -> None:
        """Return when there may be room; see `Engine.room_changed`."""
        await self._engine.room_changed()

    def kv_used_tokens(self) -> int:
        """Return the KV cache in use, tokens."""
        return self._engine.kv_used_tokens()

    def foreign_s(self) -> float:
        """Return the load from outside the mesh, mesh seconds of work."""
        return self._engine.foreign_s()

    async def wait_dead(self) -> None:
        """Return when the engine has died."""
        await self._engine.wait_dead()
