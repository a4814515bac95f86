"""A producer that can be killed: a process that goes on from its journal when it is started again.

What it knows at its start is its journal and its reply partition, which it reads from the
beginning. A call that was acted on is not acted on again; one that the broker took is waited for
and not sent again; one whose acknowledgement the journal lacks is sent again, under the same id,
unless its outcome is there already.

`python -m services.cli.chaos.producer PLAN.json`, with the mesh's settings in the environment.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec

from services.cli.chaos.journal import (
    Entry,
    Journal,
    JournalledClient,
    JournalledTally,
    read_journal,
)
from services.cli.driver import ReplayDriver, mesh_query_id
from services.cli.processes import mesh_variables
from services.cli.remote import connect
from services.cli.session import MeshAccess
from shared.adapters.clock import SystemClock
from shared.adapters.local_process import LocalProcess
from shared.contracts.codec import decode
from shared.contracts.messages import CallOutcome, CallTimes, OutcomeKind, ReplyTo, StageRequest
from shared.contracts.topics import STAGE_RESULTS
from shared.domain.trace import TraceQuery
from shared.errors import ContractError
from shared.ports import Clock, Consumer, TopicPartition
from shared.runtime.client import Submitted
from shared.runtime.lifecycle import run_blocking, serve_until_signal
from shared.runtime.publishing import Publisher
from shared.runtime.settings import MeshSettings, load

NAME = "producer"
PARTITION = 1
"""Of the results: the other producer of a run reads another one."""
DRAIN_S = 10.0
POLL_S = 0.05


class ProducerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer process does.

    Attributes:
        run_id: Put before every query id.
        queries: What it asks, with arrivals from its start on.
        journal: Path of its journal.
    """

    run_id: str
    queries: tuple[TraceQuery, ...]
    journal: str


class ResumingClient(JournalledClient):
    """Goes on where an earlier life was.

    Args:
        consumer: Reads the reply partition from its beginning.
        publisher: Publishes requests.
        clock: Mesh clock.
        reply_to: The reply partition.
        journal: Of this producer.
        past: What earlier lives wrote there.
    """

    def __init__(
        self,
        consumer: Consumer,
        publisher: Publisher,
        clock: Clock,
        reply_to: ReplyTo,
        journal: Journal,
        past: Sequence[Entry],
    ) -> None:
        super().__init__(consumer, publisher, clock, reply_to, journal)
        self._taken = {one.request_id: one for one in past if one.what == "taken"}
        self._acted = {one.request_id: one for one in past if one.what == "acted"}
        self._kept: dict[str, CallOutcome] = {}

    async def submit(self, request: StageRequest) -> Submitted:
        """Submit a call, unless the mesh has it or has answered it already."""
        request_id = request.request_id
        taken, kept = self._taken.get(request_id), self._kept.get(request_id)
        if taken is None and kept is None:
            return await super().submit(request)
        ready_at_s = taken.ready_at_s if taken is not None else None
        if taken is None and kept is not None:
            ready_at_s = kept.times.ready_at_s
            ids = {"request_id": request_id, "query_id": request.query_id}
            self._journal.write("taken", **ids, ready_at_s=ready_at_s)
        return Submitted(ready_at_s=ready_at_s or 0.0, outcome=self._outcome_of(request_id))

    async def catch_up(self) -> None:
        """Read what the reply partition holds by now."""
        ends = await self._consumer.end_offsets()
        while any([await self._consumer.position(tp) < end for tp, end in ends.items()]):
            for record in await self._consumer.fetch(timeout_s=1.0):
                self._take(record.value)

    def _take(self, value: bytes | None) -> None:
        outcome = _read(value)
        if outcome is not None and outcome.request_id not in self._pending:
            self._kept.setdefault(outcome.request_id, outcome)  # the first one counts
        super()._take(value)

    def _outcome_of(self, request_id: str) -> "asyncio.Future[CallOutcome]":
        acted, kept = self._acted.get(request_id), self._kept.get(request_id)
        known = _as_written(acted) if acted is not None else kept
        if known is None:
            loop = asyncio.get_running_loop()
            return self._pending.setdefault(request_id, loop.create_future())
        future: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        future.set_result(known)
        return future


def _read(value: bytes | None) -> CallOutcome | None:
    try:
        return decode(value or b"", CallOutcome)
    except ContractError:
        return None


def _as_written(acted: Entry) -> CallOutcome:
    """Return an outcome as far as the journal tells."""
    return CallOutcome(
        request_id=acted.request_id,
        query_id=acted.query_id,
        kind=cast("OutcomeKind", acted.kind),
        attempt=acted.attempt,
        times=CallTimes(finished_at_s=acted.finished_at_s),
    )


async def produce(plan: ProducerPlan, settings: MeshSettings, stop: asyncio.Event) -> None:
    """Ask everything of a plan that is not answered yet; returns when all of it is."""
    path = Path(plan.journal)
    past = read_journal(path)
    acted = {one.request_id for one in past if one.what == "acted"}
    clock = SystemClock(time_scale=settings.time_scale)
    async with connect(settings, f"hexflow-{NAME}") as broker:
        access = MeshAccess(broker=broker, clock=clock, topics=settings.topics.topics())
        await Publisher(broker, access.topics, clock).learn_time(NAME, stop.is_set)
        with Journal(path, goes_on=True) as journal:
            async with _resuming_client(access, journal, past) as client:
                await client.catch_up()
                journal.write("resumed")
                await _drive(client, clock, JournalledTally(journal, acted), plan, past, stop)
            if not stop.is_set():
                journal.write("done")


async def _drive(
    client: ResumingClient,
    clock: Clock,
    tally: JournalledTally,
    plan: ProducerPlan,
    past: Sequence[Entry],
    stop: asyncio.Event,
) -> None:
    begun = {entry.query_id for entry in past}
    queries = [
        msgspec.structs.replace(query, arrival_s=0.0)
        if mesh_query_id(plan.run_id, query.query_id) in begun
        else query
        for query in plan.queries
    ]
    received = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(client.receive(received), name="receive-outcomes")
        await ReplayDriver(client, clock, tally, plan.run_id).run(queries, stop)
        received.set()


@asynccontextmanager
async def _resuming_client(
    access: MeshAccess, journal: Journal, past: Sequence[Entry]
) -> AsyncIterator[ResumingClient]:
    tp = TopicPartition(access.topics.name(STAGE_RESULTS), PARTITION)
    async with access.broker.partition_consumer([tp], start="beginning") as consumer:
        yield ResumingClient(
            consumer,
            Publisher(access.broker, access.topics, access.clock),
            access.clock,
            ReplyTo(topic=STAGE_RESULTS, partition=PARTITION),
            journal,
            past,
        )


class ProducerProcess:
    """The process, as the one who kills it sees it.

    Args:
        settings: The mesh's.
        run_id: Put before every query id.
        queries: What it asks.
        folder: For its plan, journal and log.
    """

    def __init__(
        self, settings: MeshSettings, run_id: str, queries: Sequence[TraceQuery], folder: Path
    ) -> None:
        self.journal_path = folder / f"{NAME}.jsonl"
        self.journal_path.unlink(missing_ok=True)
        plan_path = folder / f"{NAME}.json"
        plan = ProducerPlan(
            run_id=run_id, queries=tuple(queries), journal=str(self.journal_path.resolve())
        )
        plan_path.write_bytes(msgspec.json.encode(plan))
        self._is_down = False
        self._process = LocalProcess(
            NAME,
            [sys.executable, "-m", __name__, str(plan_path.resolve())],
            folder / f"{NAME}.log",
            {**os.environ, **mesh_variables(settings)},
        )

    def start(self) -> None:
        """Start it, or start it again; blocks."""
        self._process.start()
        self._is_down = False

    def kill(self) -> None:
        """End it with SIGKILL; blocks."""
        self._is_down = True
        self._process.kill()

    def entries(self) -> list[Entry]:
        """Return what it wrote down so far."""
        return read_journal(self.journal_path)

    @property
    def is_done(self) -> bool:
        """Whether everything was asked and answered."""
        return any(entry.what == "done" for entry in self.entries())

    def num_in_flight(self) -> int:
        """Return how many of its calls the mesh has that it has not acted on."""
        entries = self.entries()
        acted = {entry.request_id for entry in entries if entry.what == "acted"}
        return len({one.request_id for one in entries if one.what == "taken"} - acted)

    async def resumed_at_s(self, after_s: float, within_s: float) -> float:
        """Return when it had read its past, Unix seconds; now when it does not within a bound."""
        give_up_s = time.monotonic() + within_s
        while time.monotonic() < give_up_s:
            for entry in self.entries():
                if entry.what == "resumed" and entry.at_s > after_s:
                    return entry.at_s
            await asyncio.sleep(POLL_S)
        return time.time()

    async def run(self, stop: asyncio.Event, on_ended: Callable[[str], None]) -> None:
        """Run it until it is done or `stop` is set; one that ends by itself is started again.

        Args:
            stop: Set to end early.
            on_ended: Told the end of its log when it ended although nobody killed it.
        """
        await asyncio.to_thread(self.start)
        try:
            while not stop.is_set() and not self.is_done:
                if not self._process.is_running and not self._is_down and not self.is_done:
                    on_ended(self._process.log_tail(3))
                    await asyncio.to_thread(self.start)
                await asyncio.sleep(POLL_S)
        finally:
            await asyncio.to_thread(self._process.stop, DRAIN_S)


def main(words: Sequence[str]) -> int:
    """Run the process; returns its exit code."""
    plan = msgspec.json.decode(Path(words[0]).read_bytes(), type=ProducerPlan)

    async def until(stop: asyncio.Event) -> None:
        await produce(plan, load(MeshSettings), stop)

    return run_blocking(serve_until_signal(until, DRAIN_S))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
