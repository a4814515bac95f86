"""What the services need from the world, as protocols: Clock, Broker, UrgencySet, Engine.

Each port has one contract suite in `tests/contract`, run on the embedded and on the real adapter.
Adapters raise only the errors named here; client libraries' own errors never pass.
"""

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import msgspec

from shared.contracts.messages import BoundCall, Usage
from shared.contracts.topics import TopicSpec
from shared.domain.instance import InstanceSpec


class Clock(Protocol):
    """Time. Mesh seconds are wall seconds multiplied by the time scale (1 in production)."""

    @property
    def time_scale(self) -> float:
        """Mesh seconds per wall second."""
        ...

    def now_s(self) -> float:
        """Return the current instant on the mesh clock, seconds (compares across hosts).

        Never decreases within a process, whatever the host's clock or the broker's does.
        """
        ...

    def wall_unix_s(self) -> float:
        """Return this host's wall clock, Unix seconds (feeds append times and logs only).

        It is anchored when the clock is made and goes on steadily; a jump of the host's clock does
        not move it.
        """
        ...

    def monotonic_s(self) -> float:
        """Return wall seconds on a clock that never jumps, for durations and time-outs."""
        ...

    def mesh_s(self, wall_unix_s: float) -> float:
        """Return the mesh instant of a broker append time (Unix seconds)."""
        ...

    def observe_append(self, append_unix_s: float, sent_s: float, acked_s: float) -> None:
        """Learn this host's offset from the broker's clock from one produce acknowledgement.

        Observations that cannot be true are ignored.

        Args:
            append_unix_s: Append time of the record, Unix seconds on the broker's clock.
            sent_s: `monotonic_s()` when the record was sent.
            acked_s: `monotonic_s()` when its acknowledgement arrived.
        """
        ...

    async def sleep(self, mesh_seconds: float) -> None:
        """Wait for a duration given in mesh seconds."""
        ...

    async def sleep_wall(self, seconds: float) -> None:
        """Wait for a duration given in wall seconds (heartbeats, back-off)."""
        ...


class TopicPartition(msgspec.Struct, frozen=True, order=True):
    """One partition of a topic (full name)."""

    topic: str
    partition: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One record as read from the broker.

    Attributes:
        tp: Where it is.
        offset: Its offset.
        append_unix_s: Broker's append time, Unix seconds.
        key: Record key.
        value: Record value; None is a tombstone on compacted topics.
        headers: Record headers.
    """

    tp: TopicPartition
    offset: int
    append_unix_s: float
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """Where a published record ended up.

    Attributes:
        tp: Its partition.
        offset: Its offset.
        append_unix_s: Broker's append time, Unix seconds.
    """

    tp: TopicPartition
    offset: int
    append_unix_s: float


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A committed position: the next offset to read and up to 4,096 bytes of metadata."""

    offset: int
    metadata: str = ""


StartAt = Literal["committed", "beginning", "end"]
RevokedHook = Callable[[Collection[TopicPartition]], Awaitable[None]]
AssignedHook = Callable[[Collection[TopicPartition]], Awaitable[None]]


class Consumer(Protocol):
    """Reads records; single reader, never blocks its group while the caller works elsewhere.

    A cancelled or failed call leaves the consumer usable and loses no record. An outage of the
    broker does not end it: it goes on where it was when the broker is back. After its context is
    left it owns no partition.
    """

    async def fetch(self, *, max_records: int = 500, timeout_s: float = 0.2) -> list[Record]:
        """Return records in offset order per partition, at most `max_records`.

        Waits up to `timeout_s` wall seconds for the first; an empty list means none came. No
        partition starves another. An offset that the partition does not have (forgotten, or beyond
        the end) leads to its beginning. What a hook raised in the background is raised here.

        Raises:
            BrokerUnavailable: The broker does not answer; call again later.
            UnknownTopic: The topic of a fixed partition was deleted.
            ConfigError: The broker refuses this client.
        """
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions read at present."""
        ...

    async def position(self, tp: TopicPartition) -> int:
        """Return the offset of the next record that `fetch` will return for a partition.

        Raises:
            BrokerUnavailable: The broker does not answer.
            StaleAssignment: The partition is not read here.
        """
        ...

    async def end_offsets(self) -> dict[TopicPartition, int]:
        """Return, for every assigned partition, the offset after its last record.

        Raises:
            BrokerUnavailable: The broker does not answer.
        """
        ...

    async def beginning_offsets(self) -> dict[TopicPartition, int]:
        """Return the first available offset of every assigned partition.

        Raises:
            BrokerUnavailable: The broker does not answer.
        """
        ...

    async def committed(self, tp: TopicPartition) -> Committed | None:
        """Return the group's committed position, or None when there is none.

        Raises:
            BrokerUnavailable: The broker does not answer.
        """
        ...

    async def commit(self, positions: Mapping[TopicPartition, Committed]) -> None:
        """Commit positions for the group; each replaces the partition's former one.

        Raises:
            BrokerUnavailable: Not committed; safe to repeat.
            StaleAssignment: A partition is no longer ours; drop its work. Nothing was committed.
            ValueError: There is no group, or metadata has more than 4,096 bytes.
        """
        ...

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Make `offset` the next one read; records already buffered are dropped.

        Raises:
            StaleAssignment: The partition is not read here.
            ValueError: The offset is negative.
        """
        ...

    def pause(self, *tps: TopicPartition) -> None:
        """Stop returning records of these partitions; the group membership stays.

        Partitions that are not read here (any more) are passed over, here and in `resume`. A
        partition that moves away and comes back is not paused.
        """
        ...

    def resume(self, *tps: TopicPartition) -> None:
        """Return records of these partitions again."""
        ...


class Broker(Protocol):
    """Kafka, as far as the services rely on it."""

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Ack:
        """Append one record; returns when it is acknowledged by all in-sync replicas.

        Concurrent calls from one task order are appended in that order per partition. Without
        `partition` the key chooses it as Kafka's default partitioner does (murmur2).

        The call is bounded in time and outlasts a short outage of the broker. A record may be
        appended twice, never in part. A cancelled call may or may not have appended its record.

        Raises:
            TooLarge: Above the largest record size (of the topic, or of this client).
            UnknownTopic: The topic or partition does not exist; nothing was created.
            BrokerUnavailable: Not acknowledged in time. It may still be appended.
            ConfigError: The broker refuses this client.
            ValueError: No key, where a tombstone or a compacted topic needs one.
        """
        ...

    def group_consumer(
        self,
        topics: Sequence[str],
        group: str,
        *,
        on_assigned: AssignedHook | None = None,
        on_revoked: RevokedHook | None = None,
    ) -> AbstractAsyncContextManager[Consumer]:
        """Read topics as a member of a group; partitions move between members.

        Starts at the committed position, else at the beginning. `on_revoked` is awaited before a
        partition moves on, and may still commit it; `on_assigned` after it has arrived and before
        its first record is returned, for the first time while the context is entered. Both may run
        in another task than the reader's, must end well within the session time-out, and must not
        call `fetch`. Leaving the context calls neither.

        Raises:
            UnknownTopic: A topic does not exist.
            BrokerUnavailable: The broker does not answer.
        """
        ...

    def partition_consumer(
        self,
        partitions: Sequence[TopicPartition],
        *,
        start: StartAt,
        group: str | None = None,
    ) -> AbstractAsyncContextManager[Consumer]:
        """Read fixed partitions; with `group`, positions can be committed under that id.

        `start="committed"` begins at the group's position, else at the beginning; `start="end"` at
        the end as it is while the context is entered.

        Raises:
            UnknownTopic: A topic or partition does not exist.
            BrokerUnavailable: The broker does not answer.
        """
        ...

    async def partitions_of(self, topic: str) -> int:
        """Return the number of partitions of a topic.

        Raises:
            UnknownTopic: It does not exist.
        """
        ...

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create what is missing; returns the names created. Existing topics are left alone.

        When it returns, every partition can be used.

        Raises:
            BrokerUnavailable: The broker does not answer; safe to repeat.
            ConfigError: The broker refuses this client, or a setting.
        """
        ...

    async def describe_topics(self) -> dict[str, TopicSpec]:
        """Return every topic with its real partitions, retention and size limit.

        Whether a topic holds text is not known to every broker; it may be reported as False.
        """
        ...

    async def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics; missing ones are ignored."""
        ...


class Token(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identifies one delivery of a call to one life of an owner: (epoch, offset, attempt).

    It never comes from a Redis counter, so a wiped or rewound Redis cannot confuse it. A higher
    token fences every lower one.
    """

    epoch: int
    offset: int
    attempt: int


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One waiting call in an urgency set.

    Attributes:
        request_id: The call.
        score: Queue position, smallest first; ties by `arrival`, then request_id.
        arrival: Order of arrival (the offset on the instance's topic), >= 0.
        token: Identifies this delivery.
    """

    request_id: str
    score: float
    arrival: int
    token: Token


class UrgencySet(Protocol):
    """A priority queue in the state store, kept by one owner (an instance's worker).

    Entries are waiting, parked (a retry that is due later; it keeps its score) or claimed, all of
    one epoch: the highest that any method was told. Every method is one atomic step and raises
    StateUnavailable when the store does not answer; it may have taken effect then, and each is
    safe to repeat.

    Bound: the set never refuses an entry, because an owner that repairs it adds entries that were
    accepted long ago. Whoever accepts calls checks the bound first (`sizes`, or its own count) and
    raises QueueFull.

    Repair: the store is an index and may lose everything (FLUSHALL), or its last second (a crash).
    About every second, and not while a claim of its own is under way, the owner
      1. adds what it holds that is neither running nor among `members` with its token,
      2. releases what is among `claimed` but neither running nor finished (a claim whose reply
         was lost),
      3. acks what is among `members` but finished.
    A claim may return a call that runs or is finished already; the owner then ignores it, or acks
    it.
    """

    async def begin(self, epoch: int) -> None:
        """Start a new life of the owner: entries of lower epochs are dropped and fenced.

        To begin the current epoch again changes nothing.

        Raises:
            Fenced: A higher epoch has begun already.
        """
        ...

    async def add(self, entries: Sequence[QueueEntry]) -> list[bool]:
        """Add entries of one epoch; per entry, whether it waits now because of this call.

        An entry already waiting, parked or claimed with the same or a higher token is left as
        it is (so healing can add again what it is unsure of); a lower token is replaced, also
        while claimed. An epoch above the set's begins here: a store that was wiped or went back
        in time does not know the owner's.

        Raises:
            Fenced: The entries' epoch is below the set's; nothing was added.
        """
        ...

    async def claim(self, epoch: int, *, limit: int, now_s: float) -> list[QueueEntry]:
        """Take up to `limit` entries, smallest score first, and mark them claimed.

        Parked entries due by `now_s` become waiting first. Equal scores come by arrival, then
        request_id. An epoch above the set's begins here, as in `add`. Repeated after a lost
        reply it takes further entries; the repair above releases the first ones.

        Raises:
            Fenced: `epoch` is below the set's.
        """
        ...

    async def ack(self, request_id: str, token: Token) -> bool:
        """Forget an entry whose outcome is published, whatever its state; whether it was there.

        An entry with a lower token goes too, one with a higher token stays (False).
        """
        ...

    async def park(self, request_id: str, token: Token, *, due_s: float) -> bool:
        """Put a claimed entry aside until `due_s` (mesh clock) for a retry; its score stays.

        False when no such entry is claimed or parked with exactly this token.
        """
        ...

    async def release(self, request_id: str, token: Token) -> bool:
        """Make a claimed entry waiting again at its old place.

        False when no such entry is claimed or waiting with exactly this token.
        """
        ...

    async def remove(self, request_ids: Sequence[str]) -> list[str]:
        """Remove waiting and parked entries; returns the ids removed (claimed ones stay)."""
        ...

    async def members(self) -> dict[str, Token]:
        """Return every entry in any state."""
        ...

    async def claimed(self) -> dict[str, Token]:
        """Return the claimed entries."""
        ...

    async def waiting(self, *, limit: int) -> list[QueueEntry]:
        """Return the first waiting entries in order, without claiming them."""
        ...

    async def sizes(self) -> tuple[int, int, int]:
        """Return how many entries are (waiting, parked, claimed)."""
        ...

    async def drop(self) -> None:
        """Delete the set with its epoch: its owner is gone, or the broker's history is lost."""
        ...


class SharedUrgencySet(UrgencySet, Protocol):
    """An urgency set with several claimers, whose claims expire unless they are renewed.

    The epoch is the set's, not a claimer's. Every claimer passes the same mesh clock.
    """

    async def claim_leased(
        self, epoch: int, *, limit: int, now_s: float, lease_s: float
    ) -> list[QueueEntry]:
        """Claim as `claim` does, until `now_s + lease_s` (mesh seconds).

        Raises:
            Fenced: `epoch` is below the set's.
        """
        ...

    async def renew(
        self, held: Sequence[tuple[str, Token]], *, now_s: float, lease_s: float
    ) -> list[bool]:
        """Extend leases to `now_s + lease_s`; False: lost, another claimer may have it."""
        ...

    async def reclaim(self, *, now_s: float, limit: int = 500) -> list[QueueEntry]:
        """Make claims whose lease ended by `now_s` wait again, at their old place.

        Their tokens' attempt rises by one, which fences the claimer that lost them. Any claimer
        may call it. Returns them as they are now.
        """
        ...


class StateStore(Protocol):
    """The state store: urgency sets and capped streams of token chunks."""

    def urgency_set(self, name: str) -> SharedUrgencySet:
        """Return the urgency set of an owner (an instance id) or of several claimers."""
        ...

    async def append_chunk(self, request_id: str, attempt: int, index: int, text: str) -> None:
        """Append one chunk of streamed text to the call's capped stream (expires by itself).

        Chunks of one call come in order of (attempt, index), each >= 0. One that is there
        already, or is overtaken by a later one, is dropped without an error.
        """
        ...

    def chunks(
        self, request_id: str, *, after: str = "0-0", timeout_s: float = 1.0
    ) -> AsyncIterator[tuple[str, int, int, str]]:
        """Yield (position, attempt, index, text) as they come; ends after a quiet time-out."""
        ...

    async def ping(self) -> float:
        """Return the round-trip time, wall seconds."""
        ...


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

    async def wait_dead(self) -> None:
        """Return when the engine has died (never, while it lives)."""
        ...
