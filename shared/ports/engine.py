"""One inference engine."""

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from shared.contracts.messages import BoundCall, Usage
from shared.domain.instance import InstanceSpec


class FirstToken(msgspec.Struct, frozen=True):
    """The engine produced a call's first token."""


class Chunk(msgspec.Struct, frozen=True):
    """A piece of generated text."""

    text: str


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A call is complete.

    Attributes:
        text: The whole generated text.
        usage: Token counts by the engine.
        finish_reason: `stop`, `length`, ...
        message: Whole assistant message where the engine gives one.
    """

    text: str
    usage: Usage
    finish_reason: str = "stop"
    message: dict[str, object] | None = None


EngineEvent = FirstToken | Chunk | Finished


class Engine(Protocol):
    """One inference engine."""

    @property
    def spec(self) -> InstanceSpec:
        """Return the instance's description with flags resolved by the engine."""
        ...

    def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Run one call: FirstToken once, Chunks if the call streams, then Finished.

        Closing the iterator early (or cancelling the task that reads it) aborts the generation
        and frees its memory.

        Args:
            call: What to run.
            engine_id: Unique per attempt: `request_id:attempt`.

        Raises:
            GenerationFailed: This call failed; others go on.
            EngineDead: The engine is gone.
        """
        ...

    def has_room_for(self, call: BoundCall) -> bool:
        """Return whether the call would be batched now instead of waiting inside the engine."""
        ...

    async def room_changed(self) -> None:
        """Return when `has_room_for` may answer differently than when this was called.

        It may return too often, never too late. An engine that cannot tell waits a short while.
        """
        ...

    def kv_used_tokens(self) -> int:
        """Return the KV cache in use, tokens."""
        ...

    def foreign_s(self) -> float:
        """Return the load that others than the mesh put on the engine, mesh seconds of work."""
        ...

    async def wait_dead(self) -> None:
        """Return when the engine has died (never, while it lives)."""
        ...
