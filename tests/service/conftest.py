"""Fixtures that several service tests share."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.adapters.embedded_redis import EmbeddedRedis
from tests.support.helm import Helm, helm_program
from tests.support.servers import MissingServerError, do_without
from tests.support.worker_bench import Bench, open_bench


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """Return a Valkey that tests share; each uses keys of its own."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
async def bench(valkey_url: str) -> AsyncIterator[Bench]:
    """Return the surroundings of one worker."""
    async with open_bench(valkey_url, f"{uuid.uuid4().hex}:") as opened:
        yield opened


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Return Helm, or do without."""
    try:
        return Helm(helm_program())
    except MissingServerError as missing:
        do_without(missing)
