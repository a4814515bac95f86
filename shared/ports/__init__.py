"""What the services need from the world, as protocols: Clock, Broker, UrgencySet, Engine.

Each port has one contract suite in `tests/contract`, run on the embedded and on the real adapter.
Adapters raise only the errors named here; client libraries' own errors never pass.
"""

from shared.ports.broker import (
    Ack,
    AssignedHook,
    Broker,
    Committed,
    Consumer,
    Record,
    RevokedHook,
    StartAt,
    TopicPartition,
)
from shared.ports.clock import (
    Clock,
)
from shared.ports.engine import (
    Chunk,
    Engine,
    EngineEvent,
    Finished,
    FirstToken,
)
from shared.ports.state import (
    QueueEntry,
    SharedUrgencySet,
    StateStore,
    Token,
    UrgencySet,
)

__all__ = [
    "Ack",
    "AssignedHook",
    "Broker",
    "Chunk",
    "Clock",
    "Committed",
    "Consumer",
    "Engine",
    "EngineEvent",
    "Finished",
    "FirstToken",
    "QueueEntry",
    "Record",
    "RevokedHook",
    "SharedUrgencySet",
    "StartAt",
    "StateStore",
    "Token",
    "TopicPartition",
    "UrgencySet",
]
