"""One producer's run against a mesh, wherever it runs."""

import asyncio
import secrets
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.cli.driver import ReplayDriver
from services.cli.tally import Tally
from shared.contracts.topics import STAGE_RESULTS, Topics
from shared.domain.trace import TraceQuery
from shared.ports import Broker, Clock
from shared.runtime.client import MeshClient, open_client


@dataclass(frozen=True, kw_only=True)
class MeshAccess:
    """What a producer needs of a mesh."""

    broker: Broker
    clock: Clock
    topics: Topics


def new_run_id(seed: int) -> str:
    """Return an id that no other run has: replays on one Kafka must not meet."""
    return f"run{seed}-{secrets.token_hex(4)}"


@asynccontextmanager
async def receiving_client(access: MeshAccess, run_id: str) -> AsyncIterator[MeshClient]:
    """Open a client on a reply partition chosen by the run's id, and read outcomes meanwhile."""
    count = await access.broker.partitions_of(access.topics.name(STAGE_RESULTS))
    partition = zlib.crc32(run_id.encode()) % count
    done = asyncio.Event()
    async with (
        open_client(access.broker, access.topics, access.clock, partition=partition) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(client.receive(done), name="receive-outcomes")
        try:
            yield client
        finally:
            done.set()


async def drive(
    access: MeshAccess,
    queries: Sequence[TraceQuery],
    tally: Tally,
    stop: asyncio.Event,
    run_id: str,
) -> None:
    """Inject queries, drive each to its end, and count what comes back.

    Args:
        access: The mesh.
        queries: With arrivals and SLOs.
        tally: Where outcomes are counted, while they come.
        stop: Set to end the run early; open queries are cancelled then.
        run_id: Unique on this mesh.
    """
    async with receiving_client(access, run_id) as client:
        await ReplayDriver(client, access.clock, tally, run_id).run(queries, stop)
