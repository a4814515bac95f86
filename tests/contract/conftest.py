"""What several contract suites use."""

from collections.abc import AsyncIterator

import pytest

from tests.support.openai_server import FakeServer, fake_server


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    """Return a fake OpenAI-compatible server that does what it is told."""
    async with fake_server() as server:
        yield server
