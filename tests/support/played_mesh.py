"""A mesh that a test plays: it answers calls from `stage-requests` as a function says."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from shared.contracts.codec import decode_any, encode
from shared.contracts.messages import CallOutcome, CallTimes, StageRequest, Usage
from shared.contracts.topics import STAGE_REQUESTS, Topics
from shared.ports import Broker, Clock, TopicPartition

Answer = Callable[[StageRequest], Sequence[CallOutcome]]


def completed(request: StageRequest, text: str = "", clock: Clock | None = None) -> CallOutcome:
    """Return the outcome of a call that ran, with a count of its bytes as tokens."""
    now_s = clock.now_s() if clock is not None else 0.0
    return CallOutcome(
        request_id=request.request_id,
        query_id=request.effective_query_id,
        kind="completed",
        text=text,
        instance_id="played",
        usage=Usage(input_tokens=10, output_tokens=max(1, len(text) // 4)),
        times=CallTimes(ready_at_s=now_s, finished_at_s=now_s),
    )


class PlayedMesh:
    """Reads every call and publishes what `answer` returns; an empty answer leaves it open.

    Args:
        broker: Where.
        clock: Its clock.
        topics: Names.
        answer: What to answer.
    """

    def __init__(self, broker: Broker, clock: Clock, topics: Topics, answer: Answer) -> None:
        self.broker = broker
        self.clock = clock
        self.topics = topics
        self.answer = answer
        self.requests: list[StageRequest] = []

    async def publish(self, request: StageRequest, outcome: CallOutcome) -> None:
        """Publish an outcome where the request wants it."""
        await self.broker.publish(
            self.topics.name(request.reply_to.topic),
            encode(outcome),
            key=outcome.query_id.encode(),
            partition=request.reply_to.partition,
        )

    async def serve(self) -> None:
        """Answer calls until cancelled."""
        name = self.topics.name(STAGE_REQUESTS)
        count = await self.broker.partitions_of(name)
        partitions = [TopicPartition(name, index) for index in range(count)]
        async with self.broker.partition_consumer(partitions, start="beginning") as consumer:
            while True:
                for record in await consumer.fetch(timeout_s=0.5):
                    request = decode_any(record.value or b"", StageRequest)
                    ready_s = self.clock.mesh_s(record.append_unix_s)
                    request = msgspec.structs.replace(request, ready_at_s=ready_s)
                    self.requests.append(request)
                    for outcome in self.answer(request):
                        await self.publish(request, outcome)


@asynccontextmanager
async def playing(
    broker: Broker, clock: Clock, topics: Topics, answer: Answer
) -> AsyncIterator[PlayedMesh]:
    """Play a mesh while the block runs."""
    mesh = PlayedMesh(broker, clock, topics, answer)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(mesh.serve(), name="played-mesh")
        try:
            yield mesh
        finally:
            task.cancel()


class FakeChunks:
    """The chunk streams of a state store, in memory."""

    def __init__(self) -> None:
        self.streams: dict[str, list[tuple[int, int, str]]] = {}
        self.members: dict[str, str] = {}

    async def announce(self, kind: str, name: str, text: str, *, lease_s: float) -> None:
        """Keep what was said last."""
        del kind, lease_s
        self.members[name] = text

    async def append_chunk(self, request_id: str, attempt: int, index: int, text: str) -> None:
        """Append a chunk unless a later one is there."""
        stream = self.streams.setdefault(request_id, [])
        if not stream or (attempt, index) > stream[-1][:2]:
            stream.append((attempt, index, text))

    async def chunks(
        self, request_id: str, *, after: str = "0-0", timeout_s: float = 1.0
    ) -> AsyncIterator[tuple[str, int, int, str]]:
        """Yield chunks as `StateStore.chunks` does."""
        low = tuple(int(part) for part in after.split("-"))
        waited_s = 0.0
        while waited_s < timeout_s:
            found = [
                one for one in self.streams.get(request_id, ()) if (one[0] + 1, one[1] + 1) > low
            ]
            for attempt, index, text in found:
                low = (attempt + 1, index + 1)
                yield f"{low[0]}-{low[1]}", attempt, index, text
            await asyncio.sleep(0.01)
            waited_s = 0.0 if found else waited_s + 0.01
