"""The producers that are shown to newcomers, run as they stand on real Kafka."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.embedded import EmbeddedMesh, EmbeddedParams, open_mesh_on
from services.cli.up import sample_producer
from services.cli.workload import load_fleet
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker, KafkaParams
from tests.support.servers import KafkaServer

pytestmark = [pytest.mark.real, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "producers.md"
FLEET = load_fleet("hetero-1")


@pytest.fixture
async def mesh(kafka_server: KafkaServer) -> AsyncIterator[EmbeddedMesh]:
    """Return a mesh on the topics that newcomers meet, those with the default prefix."""
    clock = SystemClock(time_scale=20.0)
    params = EmbeddedParams(fleet=FLEET, tunes=False, time_scale=20.0)
    async with (
        KafkaBroker.open(KafkaParams(bootstrap_servers=kafka_server.bootstrap)) as broker,
        open_mesh_on(broker, clock, params) as running,
    ):
        yield running


async def output_of(script: Path, *words: str) -> list[str]:
    """Run a script to its end and return the lines it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), *words, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().splitlines()


async def test_the_producer_of_the_page_runs(
    mesh: EmbeddedMesh, kafka_server: KafkaServer, tmp_path: Path
):
    """Two drafts and the check that waits for them are answered, each once."""
    assert mesh.topics.prefix == "hexflow."
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "producer.py"
    script.write_text(code)
    lines = await output_of(script, kafka_server.bootstrap)
    assert [line.split()[0] for line in lines] == ["completed"] * 3


async def test_the_producer_that_up_prints_runs(
    mesh: EmbeddedMesh, kafka_server: KafkaServer, tmp_path: Path
):
    """What `hexflow up` prints can be copied into a file as it stands, and prints an outcome."""
    text = sample_producer(kafka_server.bootstrap, FLEET, mesh.topics)
    assert max(len(line) for line in text.splitlines()) < 80
    start, end = text.index("import asyncio"), text.index("Or a whole workload")
    script = tmp_path / "ask.py"
    script.write_text(text[start:end])
    (line,) = await output_of(script)
    kind, instance_id, *_ = line.split()
    assert kind == "completed"
    assert instance_id in {spec.instance_id for spec in FLEET}
