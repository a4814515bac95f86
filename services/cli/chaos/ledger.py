"""What the raw topics say: when each call was asked for, bound, and ended.

Read with a reader of its own, record by record, without any of the services' bookkeeping. Times
are Unix seconds: append times of the broker, and the workers' own times divided by the time scale.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from shared.contracts.codec import decode_any
from shared.contracts.epochs import epoch_of
from shared.contracts.messages import BoundCall, CallOutcome, InstanceState, Message, StageRequest
from shared.contracts.topics import INSTANCE_STATES, STAGE_REQUESTS, STAGE_RESULTS, Topics
from shared.errors import BrokerUnavailable, ContractError
from shared.ports import Broker, Consumer, Record, TopicPartition

RETRY_S = 0.2


class _Timed(Protocol):
    @property
    def at_s(self) -> float: ...


T = TypeVar("T", bound=_Timed)


class Asked(NamedTuple):
    """A record of a call on `stage-requests`."""

    at_s: float
    partition: int
    attempt: int


class Bound(NamedTuple):
    """A record of a call on an instance's topic."""

    at_s: float
    instance_id: str
    dispatcher_id: str
    offset: int


class Ended(NamedTuple):
    """A record of a call on `stage-results`; what the worker said of times, where it did."""

    at_s: float
    kind: str
    attempt: int
    instance_id: str
    queued_s: float
    started_s: float
    finished_s: float
    finished_at_s: float | None


@dataclass(slots=True)
class CallStory:
    """Everything written about one call, each list in order of its topic."""

    asked: list[Asked] = field(default_factory=list)
    bound: list[Bound] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


class Load(NamedTuple):
    """What an instance said of itself."""

    at_s: float
    num_running: int
    num_waiting: int
    epoch: int
    accounted_offset: int


class Ledger:
    """The stories of a run's calls.

    Args:
        topics: Names.
        run_id: Calls of other runs are left out.
        time_scale: Mesh seconds per wall second.
    """

    def __init__(self, topics: Topics, run_id: str, time_scale: float) -> None:
        self.calls: dict[str, CallStory] = {}
        self.loads: dict[str, list[Load]] = {}
        self._topics = topics
        self._run_id = run_id
        self._scale = time_scale

    def take(self, record: Record) -> None:
        """Take one record of any of the topics."""
        try:
            message = decode_any(
                record.value or b"", StageRequest, BoundCall, CallOutcome, InstanceState
            )
        except ContractError:
            return
        self._note(record, message)

    def _note(self, record: Record, message: Message) -> None:
        at_s = record.append_unix_s
        if isinstance(message, InstanceState):
            load = Load(
                at_s,
                message.num_running,
                message.num_waiting,
                epoch_of(record.offset, message),
                message.accounted_offset,
            )
            self.loads.setdefault(message.instance_id, []).append(load)
        elif isinstance(message, StageRequest) and message.query_id.startswith(self._run_id):
            asked = Asked(at_s, record.tp.partition, message.attempt)
            self._story(message.request_id).asked.append(asked)
        elif isinstance(message, BoundCall) and message.request.query_id.startswith(self._run_id):
            instance_id = self._topics.short(record.tp.topic).removeprefix("instance.")
            bound = Bound(at_s, instance_id, message.dispatcher_id, record.offset)
            self._story(message.request.request_id).bound.append(bound)
        elif isinstance(message, CallOutcome) and message.query_id.startswith(self._run_id):
            self._story(message.request_id).ended.append(self._ended(at_s, message))

    def _story(self, request_id: str) -> CallStory:
        return self.calls.setdefault(request_id, CallStory())

    def _ended(self, at_s: float, outcome: CallOutcome) -> Ended:
        times = outcome.times
        return Ended(
            at_s,
            outcome.kind,
            outcome.attempt,
            outcome.instance_id,
            (times.queued_at_s or 0.0) / self._scale,
            (times.started_at_s or 0.0) / self._scale,
            (times.finished_at_s or 0.0) / self._scale,
            times.finished_at_s,
        )

    def held_by(self, instance_id: str, at_s: float) -> list[str]:
        """Return the calls that an instance held at a moment: bound there, finished later."""
        return [
            request_id
            for request_id, story in self.calls.items()
            if (last := _last_before(story.bound, at_s)) is not None
            and last.instance_id == instance_id
            and not _is_ended(story, at_s)
        ]

    def owners(self, at_s: float) -> dict[int, str]:
        """Return per partition of `stage-requests` who bound its latest call before a moment."""
        latest: dict[int, Bound] = {}
        for story in self.calls.values():
            last = _last_before(story.bound, at_s)
            if last is None or not story.asked:
                continue
            partition = story.asked[-1].partition
            if partition not in latest or latest[partition].at_s < last.at_s:
                latest[partition] = last
        return {partition: bound.dispatcher_id for partition, bound in latest.items()}

    def unbound(self, partitions: Sequence[int], at_s: float) -> list[str]:
        """Return the calls asked for in these partitions and not bound at a moment."""
        return [
            request_id
            for request_id, story in self.calls.items()
            if (asked := _last_before(story.asked, at_s)) is not None
            and asked.partition in partitions
            and ((last := _last_before(story.bound, at_s)) is None or last.at_s < asked.at_s)
            and not _is_ended(story, at_s)
        ]

    def load_at(self, instance_id: str, at_s: float) -> Load:
        """Return what an instance last said of itself before a moment."""
        found = _last_before(self.loads.get(instance_id, []), at_s)
        return found or Load(0.0, 0, 0, -1, -1)

    def taken_up_s(self, instance_id: str, offset: int, after_s: float) -> float | None:
        """Return when a later life of an instance first counted a record of its topic as its own.

        Args:
            instance_id: The instance.
            offset: Of the record.
            after_s: Lives that began before do not count, Unix seconds.
        """
        epoch = self.load_at(instance_id, after_s).epoch
        times = (
            load.at_s
            for load in self.loads.get(instance_id, [])
            if load.at_s > after_s and load.epoch > epoch and load.accounted_offset >= offset
        )
        return min(times, default=None)


def _last_before(items: Sequence[T], at_s: float) -> T | None:
    index = bisect_right([item.at_s for item in items], at_s)
    return items[index - 1] if index else None


def _is_ended(story: CallStory, at_s: float) -> bool:
    return bool(story.ended) and (
        story.ended[0].at_s <= at_s or 0 < story.ended[0].finished_s <= at_s
    )


async def raw_partitions(
    broker: Broker, topics: Topics, instances: Sequence[str]
) -> list[TopicPartition]:
    """Return the partitions that tell of calls."""
    names = [topics.name(topic) for topic in (STAGE_REQUESTS, STAGE_RESULTS, INSTANCE_STATES)]
    names += [topics.instance(instance_id) for instance_id in instances]
    return [
        TopicPartition(name, index)
        for name in names
        for index in range(await broker.partitions_of(name))
    ]


async def follow(consumer: Consumer, ledger: Ledger, stop: asyncio.Event) -> None:
    """Read records into a ledger until `stop` is set, through outages."""
    while not stop.is_set():
        try:
            records = await consumer.fetch(timeout_s=RETRY_S)
        except BrokerUnavailable:
            await asyncio.sleep(RETRY_S)
            continue
        for record in records:
            ledger.take(record)


async def read_all(consumer: Consumer, ledger: Ledger) -> None:
    """Read everything there is now into a ledger."""
    ends = await consumer.end_offsets()
    while any([await consumer.position(tp) < end for tp, end in ends.items()]):
        for record in await consumer.fetch(timeout_s=1.0):
            ledger.take(record)
