"""What the producer writes down itself: calls submitted, calls taken, outcomes it acted on.

One JSON object per line, flushed as it is written, so that the file tells what the producer knew
at any moment, whatever happened next. The auditor reads the file and nothing of this process.
"""

import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from services.cli.session import MeshAccess
from services.cli.tally import Tally
from shared.contracts.messages import CallOutcome, ReplyTo, StageRequest
from shared.contracts.topics import STAGE_RESULTS
from shared.ports import Clock, Consumer, TopicPartition
from shared.runtime.client import MeshClient, Submitted
from shared.runtime.publishing import Publisher


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.

    Attributes:
        what: `submitting`, `taken` (acknowledged), `acted` (on an outcome), `gave_up`; of a
            producer process also `resumed` (it has read its past) and `done` (nothing is left).
        at_s: When, Unix seconds.
        request_id: The call.
        query_id: Its query.
        kind: How the call ended.
        attempt: Which attempt ended.
        instance_id: Where.
        finished_at_s: When it finished there, mesh clock: tells two outcomes apart.
        ready_at_s: When the broker took the call, mesh clock.
    """

    what: str
    at_s: float
    request_id: str = ""
    query_id: str = ""
    kind: str = ""
    attempt: int = 0
    instance_id: str = ""
    finished_at_s: float | None = None
    ready_at_s: float | None = None


class Journal:
    """Appends entries to a file.

    Args:
        path: The file; one of an earlier run is replaced.
        goes_on: Append to what an earlier life of the same run wrote instead.
    """

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        self._file = path.open("ab" if goes_on else "wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, what: str, **fields: str | float | None) -> None:
        """Append one entry, now."""
        entry = msgspec.convert({"what": what, "at_s": time.time(), **fields}, Entry)
        self._file.write(msgspec.json.encode(entry) + b"\n")


def read_journal(path: Path) -> list[Entry]:
    """Return the entries of a file in order; a last line cut off by a crash is left out.

    A file that is not there is one that nothing was written to.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=Entry) for line in lines if line.endswith(b"\n")]


class JournalledTally(Tally):
    """Notes every outcome that the producer acts on, at the moment it does.

    Args:
        journal: Where.
        acted: Calls that an earlier life acted on: repeating that is no second act.
    """

    def __init__(self, journal: Journal, acted: Collection[str] = ()) -> None:
        super().__init__()
        self._journal = journal
        self._acted = acted

    def call_ended(self, outcome: CallOutcome, now_s: float) -> None:
        """Take an outcome, and write it down."""
        if outcome.request_id not in self._acted:
            self._write(outcome)
        super().call_ended(outcome, now_s)

    def _write(self, outcome: CallOutcome) -> None:
        self._journal.write(
            "acted",
            request_id=outcome.request_id,
            query_id=outcome.query_id,
            kind=outcome.kind,
            attempt=outcome.attempt,
            instance_id=outcome.instance_id,
            finished_at_s=outcome.times.finished_at_s,
        )


class JournalledClient(MeshClient):
    """Notes every call before it is submitted, and when the broker has taken it."""

    def __init__(
        self,
        consumer: Consumer,
        publisher: Publisher,
        clock: Clock,
        reply_to: ReplyTo,
        journal: Journal,
    ) -> None:
        super().__init__(consumer, publisher, clock, reply_to)
        self._journal = journal

    async def submit(self, request: StageRequest) -> Submitted:
        """Submit a call and write it down; see `MeshClient.submit`."""
        ids = {"request_id": request.request_id, "query_id": request.query_id}
        self._journal.write("submitting", **ids)
        submitted = await super().submit(request)
        self._journal.write("taken", **ids, ready_at_s=submitted.ready_at_s)
        return submitted


@asynccontextmanager
async def journalled_client(
    access: MeshAccess, journal: Journal, partition: int
) -> AsyncIterator[JournalledClient]:
    """Open a client on a reply partition; its `receive` has to be run."""
    tp = TopicPartition(access.topics.name(STAGE_RESULTS), partition)
    async with access.broker.partition_consumer([tp], start="end") as consumer:
        await consumer.position(tp)  # fixes the start before anything is submitted
        yield JournalledClient(
            consumer,
            Publisher(access.broker, access.topics, access.clock),
            access.clock,
            ReplyTo(topic=STAGE_RESULTS, partition=partition),
            journal,
        )


def count_acted(entries: list[Entry]) -> Counter[str]:
    """Return how many outcomes of each call the producer acted on."""
    return Counter(entry.request_id for entry in entries if entry.what == "acted")
