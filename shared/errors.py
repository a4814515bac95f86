"""The error tree.

    MeshError
    ├── ConfigError          the user must change a setting or a file; exit code 2
    │   └── AccessRefused      a server does not let this user in, or do this
    ├── ContractError        a message that cannot be read; dead-letter, never retry
    │   └── FutureVersion    written by a newer release than this one
    ├── TransientError       the same attempt may succeed later
    │   ├── BrokerUnavailable
    │   └── StateUnavailable
    ├── UnknownTopic         a topic that was never created, or was deleted
    ├── StaleAssignment      a partition that belongs to another member by now
    ├── Fenced               a newer life of the same owner has begun
    ├── RejectedError        refused before it was queued
    │   ├── InvalidCall
    │   ├── NoEligibleInstance
    │   ├── TooLarge
    │   ├── QueueFull
    │   └── Overloaded
    ├── EvictedError         given up after it was queued
    │   ├── DeadlinePassed
    │   └── InstanceLost
    └── EngineError
        ├── GenerationFailed   this call failed; the engine lives; try elsewhere
        │   ├── CallRefused    the engine cannot run this call, now or later; not tried again
        │   ├── EngineUnavailable  it takes no call now: not reached, too busy, or failing
        │   └── WrongServer    it refuses the key, or has no such path
        ├── StreamBroken       what came later does not continue the text already forwarded
        └── EngineDead         the engine is gone; the worker must exit

Every class has a constant `reason`: a low-cardinality word used in outcomes, metrics and dead
letters. Ids and places are attributes or part of the message, never part of `reason`.
Adapters translate the errors of their client library at the boundary (`raise ... from exc`).
"""

from typing import ClassVar


class MeshError(Exception):
    """Root of everything hexflow raises on purpose."""

    reason: ClassVar[str] = "error"


class ConfigError(MeshError):
    """A setting, file or argument the user has to change; the message says how."""

    reason = "config"


class AccessRefused(ConfigError):
    """A server refuses a password, a certificate, or a right; the message says which.

    Somebody else may put it right (a rotated password arrives, a right is granted), so a service
    tries again a few times before it ends.
    """

    reason = "access_refused"


class ContractError(MeshError):
    """Bytes that are no valid message of the type expected.

    Args:
        detail: What is wrong, with the path of the field when one is known.
        request_id: The call's id when it could still be read, else None.
    """

    reason = "undecodable"

    def __init__(self, detail: str, *, request_id: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.request_id = request_id


class FutureVersion(ContractError):
    """A message of a version this release does not know."""

    reason = "future_version"


class TransientError(MeshError):
    """Something that may work when tried again."""

    reason = "transient"


class BrokerUnavailable(TransientError):
    """The message broker does not answer."""

    reason = "broker_unavailable"


class StateUnavailable(TransientError):
    """The state store does not answer."""

    reason = "state_unavailable"


class UnknownTopic(MeshError):
    """The topic or partition does not exist; `hexflow topics` creates the mesh's own."""

    reason = "unknown_topic"


class StaleAssignment(MeshError):
    """A partition has moved to another member of the group; its work here is void."""

    reason = "stale_assignment"


class Fenced(MeshError):
    """A newer life of the same owner has begun; this one must drop its work."""

    reason = "fenced"


class RejectedError(MeshError):
    """Refused before it was queued; the caller learns why at once."""

    reason = "rejected"


class InvalidCall(RejectedError):
    """A readable message that asks for something impossible."""

    reason = "invalid_call"


class NoEligibleInstance(RejectedError):
    """No live instance offers the call's model and needs."""

    reason = "no_eligible_instance"


class TooLarge(RejectedError):
    """The message is above the largest size the mesh carries."""

    reason = "too_large"


class QueueFull(RejectedError):
    """A queue is at its bound."""

    reason = "queue_full"


class Overloaded(RejectedError):
    """The query cannot be done by its deadline beside those that were let in before it."""

    reason = "overloaded"


class EvictedError(MeshError):
    """Given up after it was queued."""

    reason = "evicted"


class DeadlinePassed(EvictedError):
    """The query's deadline plus grace passed before the call could run."""

    reason = "deadline_passed"


class InstanceLost(EvictedError):
    """The call's instances died under it more often than it is given to another."""

    reason = "instance_lost"


class EngineError(MeshError):
    """An inference engine failed."""

    reason = "engine_error"


class GenerationFailed(EngineError):
    """One generation failed; the engine lives on."""

    reason = "generation_failed"


class CallRefused(GenerationFailed):
    """The engine refused the call itself (too long, a wrong value); no other try would help."""

    reason = "call_refused"


class EngineUnavailable(GenerationFailed):
    """The engine took no call now: it cannot be reached, has too much to do, or fails itself."""

    reason = "engine_unavailable"


class WrongServer(GenerationFailed):
    """The engine's server refuses the key, or has no such path: until somebody changes that."""


class StreamBroken(EngineError):
    """Text that was forwarded cannot be continued; the reader must start over or stop."""

    reason = "stream_broken"


class EngineDead(EngineError):
    """The engine is gone and will not come back inside this process."""

    reason = "engine_dead"
