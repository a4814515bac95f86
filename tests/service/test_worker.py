"""The worker from record to outcome, on an in-memory broker, Valkey and a simulated engine."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.adapters.embedded_redis import EmbeddedRedis
from tests.support.worker_bench import Bench, bound_call, open_bench


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """Return a Valkey that this module's tests share."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
async def bench(redis_url: str) -> AsyncIterator[Bench]:
    """Return a bench with keys of its own."""
    async with open_bench(redis_url, f"{uuid.uuid4().hex}:") as opened:
        yield opened


async def test_every_call_gets_one_outcome(bench: Bench) -> None:
    """Each call ends completed exactly once, with the engine's numbers."""
    names = [f"call-{index}" for index in range(30)]
    async with bench.worker() as worker:
        await bench.send(*(bound_call(name, output_tokens=7) for name in names))
        await bench.outcomes_once(30)
        await worker.drained()
    outcomes = await bench.outcomes()
    assert sorted(outcome.request_id for outcome in outcomes) == sorted(names)
    assert {outcome.kind for outcome in outcomes} == {"completed"}
    assert {outcome.usage.output_tokens for outcome in outcomes} == {7}
