"""A killed producer goes on from its journal: nothing is acted on twice, nothing is sent twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.cli.chaos.journal import Entry, Journal, JournalledTally, read_journal
from services.cli.chaos.producer import PARTITION, ResumingClient, _resuming_client
from services.cli.session import MeshAccess
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.codec import decode, encode
from shared.contracts.messages import CallOutcome, CallTimes, StageRequest
from shared.contracts.topics import STAGE_REQUESTS, STAGE_RESULTS, Topics
from shared.ports import TopicPartition

TOPICS = Topics(prefix="p.", request_partitions=1, result_partitions=2)


class Bench:
    """A broker, and what a producer wrote down before it was killed."""

    def __init__(self, folder: Path) -> None:
        self.clock = SystemClock()
        self.broker = MemoryBroker(self.clock)
        self.path = folder / "producer.jsonl"

    async def end(self, call: str, kind: str = "completed", instance: str = "first") -> None:
        """Publish an outcome as a worker would."""
        outcome = CallOutcome(
            request_id=call,
            query_id="q",
            kind=kind,
            instance_id=instance,
            times=CallTimes(ready_at_s=5.0, finished_at_s=6.0),
        )
        name = TOPICS.name(STAGE_RESULTS)
        await self.broker.publish(name, encode(outcome), partition=PARTITION)

    async def sent(self) -> list[str]:
        """Return the calls on `stage-requests`."""
        tp = TopicPartition(TOPICS.name(STAGE_REQUESTS), 0)
        async with self.broker.partition_consumer([tp], start="beginning") as consumer:
            records = await consumer.fetch(timeout_s=0)
        return [decode(record.value, StageRequest).request_id for record in records]

    def acted(self) -> list[str]:
        """Return the calls that were acted on, by all lives together."""
        return [entry.request_id for entry in read_journal(self.path) if entry.what == "acted"]

    @asynccontextmanager
    async def next_life(self) -> AsyncIterator[tuple[ResumingClient, JournalledTally]]:
        """Open the client of the life after the kill, which has read its past."""
        past = read_journal(self.path)
        known = {entry.request_id for entry in past if entry.what == "acted"}
        access = MeshAccess(broker=self.broker, clock=self.clock, topics=TOPICS)
        done = asyncio.Event()
        with Journal(self.path, goes_on=True) as journal:
            async with _resuming_client(access, journal, past) as client:
                await client.catch_up()
                async with asyncio.TaskGroup() as group:
                    group.create_task(client.receive(done))
                    yield client, JournalledTally(journal, known)
                    done.set()


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    """Return a producer's past: `a` acted on, `b` and `d` taken, `c` and `e` perhaps sent."""
    found = Bench(tmp_path)
    await found.broker.create_topics(TOPICS.specs())
    with Journal(found.path) as journal:
        for call in "abcde":
            journal.write("submitting", request_id=call, query_id="q")
            if call in "abd":
                journal.write("taken", request_id=call, query_id="q", ready_at_s=4.0)
        journal.write("acted", request_id="a", query_id="q", kind="completed", finished_at_s=6.0)
    for call in "abc":
        await found.end(call)
        await found.end(call, "failed", "second")
    return found


def request(call: str) -> StageRequest:
    """Return a call."""
    return StageRequest(request_id=call, query_id="q", model="m", prompt="x")


async def test_every_call_is_acted_on_once_and_only_unknown_ones_are_sent(bench: Bench):
    """What the journal or the reply partition knows is not sent again; first outcomes count."""
    async with bench.next_life() as (client, tally), asyncio.timeout(60):
        for call in "abc":
            outcome = await (await client.submit(request(call))).outcome
            assert outcome.kind == "completed"
            tally.call_ended(outcome, 7.0)
        waiting = [(await client.submit(request(call))).outcome for call in "de"]
        assert not any(future.done() for future in waiting)
        for call in "de":
            await bench.end(call)
        for future in waiting:
            tally.call_ended(await future, 8.0)
    assert await bench.sent() == ["e"]
    assert sorted(bench.acted()) == ["a", "b", "c", "d", "e"]
    taken = [entry for entry in read_journal(bench.path) if entry.what == "taken"]
    assert sorted(entry.request_id for entry in taken) == ["a", "b", "c", "d", "e"]


async def test_a_second_kill_changes_nothing(bench: Bench):
    """The third life knows what the second acted on."""
    for _ in range(2):
        async with bench.next_life() as (client, tally), asyncio.timeout(60):
            for call in "ab":
                submitted = await client.submit(request(call))
                assert submitted.ready_at_s == 4.0
                tally.call_ended(await submitted.outcome, 7.0)
    assert await bench.sent() == []
    assert sorted(bench.acted()) == ["a", "b"]


def test_the_journal_of_all_lives_is_one_file(tmp_path: Path):
    """A life that goes on appends."""
    path = tmp_path / "journal.jsonl"
    for call, goes_on in (("a", False), ("b", True)):
        with Journal(path, goes_on=goes_on) as journal:
            journal.write("taken", request_id=call)
    assert [entry.request_id for entry in read_journal(path)] == ["a", "b"]
    assert all(isinstance(entry, Entry) for entry in read_journal(path))
