"""Topic names, keys, partitions and retention; `hexflow topics` creates exactly these.

Names here carry no prefix; `Topics.name()` adds the mesh's one configurable prefix.
"""

import msgspec

STAGE_REQUESTS = "stage-requests"
STAGE_RESULTS = "stage-results"
LATENCY_EVENTS = "latency-events"
INSTANCE_STATES = "instance-states"
CONTROL = "control"
CANCELLATIONS = "cancellations"
DEAD_LETTERS = "dead-letters"
QUERIES = "queries"
QUERY_RESULTS = "query-results"
INSTANCE_PREFIX = "instance."

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
DAY_S = 86_400


class TopicSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a topic is created.

    Attributes:
        name: Full name, with prefix.
        partitions: Number of partitions.
        compacted: Keep the last record per key instead of deleting by age.
        retention_s: Age after which records are deleted, seconds (not compacted topics).
        max_message_bytes: Largest record, bytes.
        holds_text: Whether prompts or answers travel here.
    """

    name: str
    partitions: int
    compacted: bool = False
    retention_s: int = DAY_S
    max_message_bytes: int = MAX_MESSAGE_BYTES
    holds_text: bool = False


class Topics(msgspec.Struct, frozen=True, kw_only=True):
    """The mesh's topics under one prefix.

    Attributes:
        prefix: Put before every topic name.
        request_partitions: Partitions of `stage-requests` and `queries`: at least the number of
            dispatchers.
        result_partitions: Partitions of the results topics: at least the number of producers
            that wait for results at the same time.
        state_partitions: Partitions of `instance-states`.
        retention_s: Age after which text topics are deleted, seconds.
        max_message_bytes: Largest record, bytes.
    """

    prefix: str = "hexflow."
    request_partitions: int = 12
    result_partitions: int = 12
    state_partitions: int = 4
    retention_s: int = DAY_S
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def name(self, topic: str) -> str:
        """Return the full name of a topic."""
        return self.prefix + topic

    def short(self, full_name: str) -> str:
        """Return a full topic name without the prefix."""
        return full_name.removeprefix(self.prefix)

    def group(self, name: str) -> str:
        """Return the full name of a consumer group: meshes that share a cluster share no group."""
        return self.prefix + name

    def worker_group(self, instance_id: str) -> str:
        """Return the group under which an instance's worker commits its positions."""
        return self.group(f"worker-{instance_id}")

    def instance(self, instance_id: str) -> str:
        """Return the full name of an instance's topic."""
        return self.name(INSTANCE_PREFIX + instance_id)

    def instance_spec(self, instance_id: str) -> TopicSpec:
        """Return how an instance's topic is created: one partition, so offsets are its order."""
        return TopicSpec(
            name=self.instance(instance_id),
            partitions=1,
            retention_s=self.retention_s,
            max_message_bytes=self.max_message_bytes,
            holds_text=True,
        )

    def specs(self) -> tuple[TopicSpec, ...]:
        """Return every topic but the instances' own."""

        def text(name: str, partitions: int) -> TopicSpec:
            return TopicSpec(
                name=self.name(name),
                partitions=partitions,
                retention_s=self.retention_s,
                max_message_bytes=self.max_message_bytes,
                holds_text=True,
            )

        return (
            text(QUERIES, self.request_partitions),
            text(QUERY_RESULTS, self.result_partitions),
            text(STAGE_REQUESTS, self.request_partitions),
            text(STAGE_RESULTS, self.result_partitions),
            text(DEAD_LETTERS, 1),
            TopicSpec(name=self.name(LATENCY_EVENTS), partitions=1, retention_s=7 * DAY_S),
            TopicSpec(
                name=self.name(INSTANCE_STATES), partitions=self.state_partitions, compacted=True
            ),
            TopicSpec(name=self.name(CONTROL), partitions=1, compacted=True),
            TopicSpec(name=self.name(CANCELLATIONS), partitions=1),
        )
