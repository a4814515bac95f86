"""Entries of urgency sets for tests, and servers that lose their memory."""

from redis.asyncio import Redis

from shared.ports import QueueEntry, Token

Snapshot = dict[bytes, bytes]


def entry(
    request_id: str,
    score: float = 0.0,
    *,
    arrival: int = 0,
    epoch: int = 1,
    offset: int | None = None,
    attempt: int = 0,
) -> QueueEntry:
    """Return an entry whose offset is its arrival, unless told otherwise."""
    token = Token(epoch, arrival if offset is None else offset, attempt)
    return QueueEntry(request_id=request_id, score=score, arrival=arrival, token=token)


def ids(entries: list[QueueEntry]) -> list[str]:
    """Return the request ids in order."""
    return [one.request_id for one in entries]


async def snapshot(raw: Redis, prefix: str) -> Snapshot:
    """Return everything stored under a prefix."""
    return {key: await raw.dump(key) or b"" async for key in raw.scan_iter(f"{prefix}*")}


async def turn_back(raw: Redis, prefix: str, past: Snapshot) -> None:
    """Make a server hold what it held, as one does that lost the end of its append-only file."""
    for key in await snapshot(raw, prefix):
        await raw.delete(key)
    for key, value in past.items():
        await raw.restore(key, 0, value)
