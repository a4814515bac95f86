"""What the doctor saw of a mesh, at two moments."""

import msgspec

from services.cli.topics import Finding as TopicFinding
from shared.contracts.messages import DeadLetter, InstanceState


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says of itself.

    Attributes:
        first: What it had said last when the examination began.
        last: ... and when it ended.
        age_s: Time since its last word, wall seconds by the broker's clock.
        phase_age_s: Time since it began its present phase, wall seconds.
        clock_s: What its clock shows above the broker's, wall seconds, by the settings' scale.
    """

    first: InstanceState
    last: InstanceState
    age_s: float
    phase_age_s: float
    clock_s: float


class PartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """How far the reader of a partition is.

    Attributes:
        service: Who reads it, for people.
        topic: Full name.
        partition: Which.
        first_lag: Records not handed on when the examination began.
        last_lag: ... and when it ended.
        moved: Whether the reader committed anything in between.
        instance_id: The instance whose worker reads it; empty for the dispatchers.
        first_end: Offset after the last record when the examination began.
        num_forgotten: Unfinished records that retention has deleted.
        oldest_s: Age of the oldest record not handed on, wall seconds; 0 when none.
    """

    service: str
    topic: str
    partition: int
    first_lag: int
    last_lag: int
    moved: bool
    instance_id: str = ""
    first_end: int = 0
    num_forgotten: int = 0
    oldest_s: float = 0.0


class DeadLetterView(msgspec.Struct, frozen=True, kw_only=True):
    """What is on `dead-letters`.

    Attributes:
        first_end: Records ever written when the examination began.
        last_end: ... and when it ended.
        recent: Records of the last ten minutes.
        last: The latest of them.
    """

    first_end: int = 0
    last_end: int = 0
    recent: int = 0
    last: DeadLetter | None = None


class RedisView(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis says of itself.

    Attributes:
        error: Why it cannot be used; empty when it can.
        prefix: Put before every key.
        eviction: Its `maxmemory-policy`; empty when it does not tell.
        append_only: Its `appendonly`; empty when it does not tell.
        has_keys: Whether there are keys with the mesh's prefix.
    """

    error: str = ""
    prefix: str = ""
    eviction: str = ""
    append_only: str = ""
    has_keys: bool = True


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything.

    Attributes:
        address: Kafka's.
        prefix: Of the topics.
        time_scale: Mesh seconds per wall second, by the settings.
        watched_s: Time between the two looks, wall seconds.
        kafka_error: Why Kafka cannot be used; empty when it can.
        redis: Redis.
        topics: A finding per topic.
        other_prefixes: Prefixes of other meshes on this Kafka.
        instances: By id.
        partitions: Readers' progress.
        dead_letters: Messages that nobody could handle.
        dispatcher_age_s: Time since a dispatcher's last probe, wall seconds; None: never any.
        host_clock_s: What this host's clock shows above the broker's, wall seconds; None: unknown.
    """

    address: str
    prefix: str
    time_scale: float = 1.0
    watched_s: float = 0.0
    kafka_error: str = ""
    redis: RedisView = RedisView()
    topics: tuple[TopicFinding, ...] = ()
    other_prefixes: tuple[str, ...] = ()
    instances: dict[str, InstanceView] = {}
    partitions: tuple[PartitionView, ...] = ()
    dead_letters: DeadLetterView = DeadLetterView()
    dispatcher_age_s: float | None = None
    host_clock_s: float | None = None
