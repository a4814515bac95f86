"""Engines and workers that are killed, and a mesh of two real engines."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from services.cli.embedded import EmbeddedParams, open_embedded
from services.cli.fidelity_runs import RecordingTally, small_queries, with_arrivals
from services.cli.session import drive
from shared.adapters.embedded_redis import EmbeddedRedis
from shared.adapters.engine_guard import descendants
from shared.adapters.replayed_prompts import ReplayedPrompts
from shared.domain.instance import InstanceSpec
from shared.errors import EngineDead
from shared.ports import Clock, Engine
from tests.support.engines import SPEC as LLAMACPP_SPEC
from tests.support.engines import llamacpp_engine, llamacpp_server, real_call
from tests.support.processes import is_alive
from tests.support.worker_bench import INSTANCE, open_bench
from tests.vllm.support import SPEC, vllm_engine

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0
WORKER = """
import asyncio
from tests.vllm.support import vllm_engine
from tests.support.engines import real_call

async def main():
    async with vllm_engine() as engine:
        async for event in engine.generate(real_call("a", stream=True, output_tokens=400), "a:0"):
            print("generating", flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_an_engine_killed_mid_generation_loses_no_call() -> None:
    """The worker notices, hands back what ran and what waited, and ends with EngineDead."""
    spec = msgspec.structs.replace(SPEC, instance_id=INSTANCE)
    with EmbeddedRedis() as redis:
        async with (
            open_bench(redis.url, f"{uuid.uuid4().hex}:", time_scale=1.0) as bench,
            vllm_engine(spec) as engine,
        ):
            bench.engine = engine  # type: ignore[assignment]
            async with bench.worker() as worker:
                names = {f"c{n}" for n in range(10)}
                await bench.send(*(real_call(name, output_tokens=400) for name in names))
                await bench.running(4)
                await _until_used(engine)
                for one in descendants([os.getpid()]):
                    if _is_engine_core(one.pid):
                        os.kill(one.pid, signal.SIGKILL)
                error = await worker.crash()
            back = {request.request_id for request in await bench.handed_back()}
            ended = {outcome.request_id for outcome in await bench.outcomes()}
    assert isinstance(error, EngineDead)
    assert back | ended == names
    assert not back & ended


def test_a_worker_killed_leaves_no_engine_behind(tmp_path: Path) -> None:
    """SIGKILL of the worker ends every process of its engine, generating or not."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as worker:
        assert worker.stdout is not None
        assert any(line.startswith("generating") for line in worker.stdout)
        parts = descendants([worker.pid])
        assert any(_is_engine_core(one.pid) for one in parts)
        worker.kill()
    give_up_s = time.monotonic() + WITHIN_S
    while any(is_alive(one.pid) for one in parts):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


async def test_a_mesh_of_two_real_engines_ends_every_call_once(tmp_path: Path) -> None:
    """VLLM beside llama.cpp: a workload of real prompts, exactly one outcome per call."""
    with llamacpp_server(tmp_path / "log") as server:

        @asynccontextmanager
        async def open_engine(spec: InstanceSpec, _: Clock) -> AsyncIterator[Engine]:
            if spec.instance_id == LLAMACPP_SPEC.instance_id:
                async with llamacpp_engine(server.url) as engine:
                    yield ReplayedPrompts(engine)
            else:
                async with vllm_engine(spec) as engine:
                    yield ReplayedPrompts(engine)

        fleet = (SPEC, LLAMACPP_SPEC)
        queries = small_queries(LLAMACPP_SPEC, 12, seed=3)
        arriving = with_arrivals(queries, LLAMACPP_SPEC, 2.0, seed=3)
        tally = RecordingTally()
        params = EmbeddedParams(fleet=fleet, tunes=False, open_engine=open_engine)
        async with open_embedded(params) as mesh:
            await drive(mesh, arriving, tally, asyncio.Event(), "two")
    num_calls = sum(query.num_calls for query in queries)
    assert (tally.queries["completed"], tally.calls["completed"]) == (12, num_calls)
    assert tally.calls["duplicates"] == 0
    ids = [outcome.request_id for outcome in tally.outcomes]
    assert len(ids) == len(set(ids)) == num_calls
    assert set(tally.instances) == {spec.instance_id for spec in fleet}
    assert all(outcome.usage.output_tokens > 0 for outcome in tally.outcomes)


def _is_engine_core(pid: int) -> bool:
    try:
        return b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def _until_used(engine: Engine) -> None:
    async with asyncio.timeout(WITHIN_S):
        while engine.kv_used_tokens() < 100:
            await asyncio.sleep(0.01)
