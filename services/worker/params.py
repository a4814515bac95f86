"""What the worker's core needs to know, without settings or environment."""

from dataclasses import dataclass

from shared.runtime.settings import MAX_ATTEMPTS

MIB = 1024 * 1024
LOOK_PAST = 4
MAX_PASSES = 16
"""As in the simulator."""


@dataclass(frozen=True, kw_only=True)
class WorkerParams:
    """How one worker behaves. Durations are wall seconds unless they say mesh.

    Raises:
        ValueError: A bound is not positive.
    """

    instance_id: str
    """The instance."""
    capacity: int
    """Most calls the engine is given at a time."""
    queue_bound: int = 10_000
    """Most calls held waiting; at the bound the worker stops reading its topic."""
    queue_bytes: int = 256 * MIB
    """Most bytes of records held; likewise."""
    max_attempts: int = MAX_ATTEMPTS
    """Attempts of a call that may fail or lose their instance until it ends failed."""
    look_past: int = LOOK_PAST
    """While the engine has no room for the most urgent call, so many that lack room at a time are
    looked past for one that fits; each is passed over `MAX_PASSES` times at most."""
    evict_after_s: float = 3_600.0
    """Mesh seconds after its query's deadline when a call is given up (a merely late one runs)."""
    stall_floor_s: float = 600.0
    """Mesh seconds without a result before a generation may count as failed."""
    stall_factor: float = 30.0
    """... but never before this many times its expected service time."""
    suspect_s: float = 5.0
    """Without progress for so long, and for several expected service times, the waiting calls are
    given to other instances."""
    stall_wall_s: float = 30.0
    """... and never before this many wall seconds, as scaled time magnifies every hiccup."""
    failure_threshold: int = 3
    """After so many failed generations in a row one call at a time is tried, with pauses."""
    failure_pause_s: float = 0.5
    """First of these pauses; each failure doubles it, up to `longest_failure_pause_s`."""
    longest_failure_pause_s: float = 5.0
    """Longest of these pauses."""
    heartbeat_s: float = 1.0
    """Longest time between two state reports."""
    coalesce_s: float = 0.05
    """Shortest time between two state reports."""
    commit_s: float = 0.5
    """Time between commits while offsets move."""
    recommit_s: float = 3_600.0
    """Time between commits while they do not (committed offsets of idle groups expire)."""
    heal_s: float = 1.0
    """Time between comparisons of memory and state store."""
    recheck_s: float = 0.25
    """Time between questions to an engine that had no room, when nothing happens meanwhile."""
    drain_s: float = 25.0
    """Longest time that running calls get to finish on drain; then they are handed back."""
    linger_s: float = 0.5
    """How long a draining worker still forwards late arrivals at least."""
    abort_s: float = 4.0
    """Longest time to hand back what the drain's bound or the engine's death cut off."""
    standby_s: float = 3.0
    """A fenced worker begins anew once the other life was silent for this long."""
    num_remembered: int = 50_000
    """Ended calls whose later deliveries are recognised."""

    def __post_init__(self) -> None:
        for name in ("capacity", "queue_bound", "queue_bytes", "max_attempts"):
            if getattr(self, name) < 1:
                msg = f"{name} must be at least 1"
                raise ValueError(msg)
