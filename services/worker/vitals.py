"""One worker's entries in the health of its process."""

import structlog

from shared.errors import MeshError
from shared.runtime.health import Health

BROKER = "broker"
STORE = "state_store"
MAX_SILENCE_S = 90.0  # a publish alone may take 30 s while the broker is away
log = structlog.get_logger(__name__)


class Vitals:
    """Pulses, readiness, and which servers do not answer.

    Args:
        health: The process's health.
        instance_id: Whose entries, as several workers may share a process.
    """

    def __init__(self, health: Health, instance_id: str) -> None:
        self._health = health
        self._instance_id = instance_id
        self._troubles: set[str] = set()

    def beat(self, loop: str) -> None:
        """Note that a loop made a turn."""
        self._health.beat(f"{self._instance_id}/{loop}", MAX_SILENCE_S)

    def retire(self, *loops: str) -> None:
        """Forget loops that ended on purpose."""
        for loop in loops:
            self._health.retire(f"{self._instance_id}/{loop}")

    def block(self, cause: str, detail: str) -> None:
        """Make the process unready for a cause."""
        self._health.block(f"{self._instance_id}/{cause}", detail)

    def ready(self) -> None:
        """Note that a life has begun."""
        self.clear("start")
        self.clear("standby")
        self._health.clear()

    def clear(self, cause: str) -> None:
        """Remove a cause."""
        self._health.clear(f"{self._instance_id}/{cause}")

    def trouble(self, cause: str, error: MeshError) -> None:
        """Note that a server does not answer; logged when it begins."""
        self.block(cause, str(error))
        if cause not in self._troubles:
            self._troubles.add(cause)
            log.warning("server_unavailable", server=cause, error=str(error))

    def is_troubled(self, cause: str) -> bool:
        """Return whether a server did not answer when it was last asked."""
        return cause in self._troubles

    def recovered(self, cause: str) -> None:
        """Note that a server answers; logged when a trouble ends."""
        if cause in self._troubles:
            self._troubles.discard(cause)
            self.clear(cause)
            log.info("server_available", server=cause)
