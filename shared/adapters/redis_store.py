"""The state store on Redis or Valkey: urgency sets, streams of token chunks, and who is there.

Chunks: one stream per call; a chunk's position is `attempt + 1`-`index + 1`, so appending is
idempotent, and a chunk of an attempt that was overtaken is dropped by the server itself.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

from shared.adapters.redis_client import RedisClient, RedisParams, load_script
from shared.adapters.urgency_set import RedisUrgencySet

__all__ = ["RedisParams", "RedisStore"]

# Readers take turns on the connections that wait, so none is held longer than this.
_LONGEST_WAIT_S = 0.25
_CHUNKS_PER_READ = 256
_MAX_ANNOUNCED = 1_000


class RedisStore:
    """Implements `StateStore`; made by `open`.

    Args:
        client: Runs the commands.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, params: RedisParams) -> AsyncIterator[Self]:
        """Connect, check that the server answers, and close at the end.

        Raises:
            ConfigError: The server refuses the credentials, or a TLS file cannot be read.
            StateUnavailable: It does not answer.
        """
        async with RedisClient.open(params) as client:
            yield cls(client)

    def urgency_set(self, name: str) -> RedisUrgencySet:
        """Return the urgency set of an owner (an instance id).

        Raises:
            ValueError: The name has characters that keys cannot hold.
        """
        return RedisUrgencySet(self._client, name)

    async def append_chunk(self, request_id: str, attempt: int, index: int, text: str) -> None:
        """Append one chunk of streamed text; see `StateStore.append_chunk`."""
        params = self._client.params
        await self._client.run(
            load_script("append_chunk", with_prelude=False),
            (self._stream(request_id),),
            (f"{attempt + 1}-{index + 1}", params.chunk_entries, params.chunk_ttl_s, text),
        )

    async def chunks(
        self, request_id: str, *, after: str = "0-0", timeout_s: float = 1.0
    ) -> AsyncIterator[tuple[str, int, int, str]]:
        """Yield chunks as they come; see `StateStore.chunks`."""
        quiet_since_s = time.monotonic()
        while True:
            left_s = quiet_since_s + timeout_s - time.monotonic()
            wait_s = min(left_s, _LONGEST_WAIT_S)
            found = await self.read_chunks({request_id: after}, wait_s=wait_s)
            for chunk in found.get(request_id, ()):
                after = chunk[0]
                yield chunk
            if found:
                quiet_since_s = time.monotonic()
            elif left_s <= _LONGEST_WAIT_S:
                return

    async def read_chunks(
        self, after: Mapping[str, str], *, wait_s: float
    ) -> dict[str, list[tuple[str, int, int, str]]]:
        """Return new chunks of many calls at once; see `StateStore.read_chunks`."""
        named = {self._stream(request_id).encode(): request_id for request_id in after}
        wait_ms = max(1, round(wait_s * 1_000))  # BLOCK 0 would wait for ever
        reply = await self._client.blocking(
            "XREAD",
            "COUNT",
            _CHUNKS_PER_READ,
            "BLOCK",
            wait_ms,
            "STREAMS",
            *named,
            *after.values(),
            wait_s=wait_ms / 1_000,
        )
        return {
            named[bytes(key)]: [_chunk(*entry) for entry in entries] for key, entries in reply or ()
        }

    async def announce(self, kind: str, name: str, text: str, *, lease_s: float) -> None:
        """Say that a member of a kind is there; see `StateStore.announce`."""
        lease_ms = max(1, round(lease_s * 1_000))
        script = load_script("announce", with_prelude=False)
        await self._client.run(script, self._members(kind), (name, text, lease_ms))

    async def announced(self, kind: str) -> dict[str, str]:
        """Return who of a kind is there; see `StateStore.announced`."""
        script = load_script("announced", with_prelude=False)
        reply = await self._client.run(script, self._members(kind), (_MAX_ANNOUNCED,))
        texts = [part.decode(errors="replace") for part in reply]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    async def check_rights(self) -> None:
        """Find out whether this user may do everything that the scripts do.

        Raises:
            AccessRefused: It may not; the message says what.
            StateUnavailable: The server does not answer.
        """
        script = load_script("check_rights", with_prelude=False)
        await self._client.run(script, (f"{self._client.params.prefix}rights",))

    async def ping(self) -> float:
        """Return the round-trip time, wall seconds."""
        return await self._client.ping()

    def _members(self, kind: str) -> tuple[str, str]:
        base = f"{self._client.params.prefix}{{announced:{kind}}}"  # braces: on one cluster node
        return f"{base}:ends", f"{base}:texts"

    def _stream(self, request_id: str) -> str:
        return f"{self._client.params.prefix}chunks:{request_id}"


def _chunk(position: bytes, fields: Mapping[bytes, bytes]) -> tuple[str, int, int, str]:
    after = position.decode()
    attempt, index = (int(part) - 1 for part in after.split("-"))
    return after, attempt, index, fields[b"text"].decode()
