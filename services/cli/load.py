"""A stream of single calls through a mesh, timed on the way: what the mesh itself costs.

Each call is its own query. Two durations per call, both on the mesh clock at time scale 1: from
just before it is produced until a worker hands it to its engine, and from the engine's end until
its outcome is consumed.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from services.cli.session import MeshAccess, receiving_client
from shared.contracts.codec import mint_request_id
from shared.contracts.messages import CallOutcome, SimulatedLengths, StageRequest
from shared.ports import Clock
from shared.runtime.client import MeshClient
from shared.scheduling.attainment import percentile

MAX_WAIT_S = 30.0


class LoadParams(msgspec.Struct, frozen=True, kw_only=True):
    """What to send.

    Attributes:
        rate: Calls per second; 0: as many as `concurrency` allows.
        duration_s: How long to send, wall seconds.
        warmup_s: Calls produced before this are not timed, wall seconds.
        concurrency: Calls in flight at rate 0.
        prompt_bytes: Size of each prompt, bytes.
    """

    rate: float
    duration_s: float
    warmup_s: float
    concurrency: int = 128
    prompt_bytes: int = 2_000


class LoadResult(msgspec.Struct, kw_only=True):
    """What came back.

    Attributes:
        submitted: Calls produced.
        completed: Calls with a completed outcome.
        not_completed: Calls with another outcome.
        elapsed_s: From the first call's production to the last outcome, wall seconds.
        to_engine_s: Produced to handed to the engine, seconds per timed call.
        to_result_s: Engine done to outcome consumed, seconds per timed call.
    """

    submitted: int = 0
    completed: int = 0
    not_completed: int = 0
    elapsed_s: float = 0.0
    to_engine_s: list[float] = []
    to_result_s: list[float] = []

    @property
    def calls_per_s(self) -> float:
        """Completed calls per wall second."""
        return self.completed / self.elapsed_s if self.elapsed_s > 0 else 0.0


def milliseconds(values_s: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p95 and p99 of seconds, in milliseconds."""
    if not values_s:
        return {"p50": None, "p95": None, "p99": None}
    return {f"p{p}": round(percentile(values_s, p) * 1_000, 3) for p in (50, 95, 99)}


class LoadDriver:
    """Sends calls and times them.

    Args:
        client: How calls are submitted.
        clock: Mesh clock, time scale 1.
        params: What to send.
        run_id: Put before every query id.
    """

    def __init__(self, client: MeshClient, clock: Clock, params: LoadParams, run_id: str) -> None:
        self._client = client
        self._clock = clock
        self._params = params
        self._run_id = run_id
        self._prompt = "x" * params.prompt_bytes
        self.result = LoadResult()

    async def run(self, stop: asyncio.Event) -> None:
        """Send for the duration, then wait for what is under way."""
        started_s = self._clock.monotonic_s()
        async with asyncio.TaskGroup() as group:
            if self._params.rate > 0:
                await self._at_rate(group, started_s, stop)
            else:
                for index in range(self._params.concurrency):
                    group.create_task(self._in_turn(started_s, stop), name=f"lane-{index}")

    async def _at_rate(
        self, group: asyncio.TaskGroup, started_s: float, stop: asyncio.Event
    ) -> None:
        num = 0
        while not stop.is_set():
            due_s = started_s + num / self._params.rate
            if due_s - started_s >= self._params.duration_s:
                return
            await self._clock.sleep_wall(max(0.0, due_s - self._clock.monotonic_s()))
            group.create_task(self._one(started_s), name=f"call-{num}")
            num += 1

    async def _in_turn(self, started_s: float, stop: asyncio.Event) -> None:
        end_s = started_s + self._params.duration_s
        while not stop.is_set() and self._clock.monotonic_s() < end_s:
            await self._one(started_s)

    async def _one(self, started_s: float) -> None:
        result = self.result
        result.submitted += 1
        request = self._request(result.submitted)
        is_timed = self._clock.monotonic_s() - started_s >= self._params.warmup_s
        produced_s = self._clock.now_s()
        submitted = await self._client.submit(request)
        outcome = await submitted.outcome
        consumed_s = self._clock.now_s()
        result.elapsed_s = self._clock.monotonic_s() - started_s
        if outcome.kind != "completed":
            result.not_completed += 1
            return
        result.completed += 1
        if is_timed:
            self._time(outcome, produced_s, consumed_s)

    def _time(self, outcome: CallOutcome, produced_s: float, consumed_s: float) -> None:
        times = outcome.times
        if times.started_at_s is not None and times.finished_at_s is not None:
            self.result.to_engine_s.append(times.started_at_s - produced_s)
            self.result.to_result_s.append(consumed_s - times.finished_at_s)

    def _request(self, number: int) -> StageRequest:
        query_id = f"{self._run_id}-{number}"
        return StageRequest(
            request_id=mint_request_id(query_id, "bench", 0, 0),
            query_id=query_id,
            workflow="bench",
            stage="bench",
            model="default",
            prompt=self._prompt,
            slo_s=60.0,
            simulated=SimulatedLengths(input_tokens=500, output_tokens=1),
        )


async def send_load(
    access: MeshAccess, params: LoadParams, run_id: str, stop: asyncio.Event
) -> LoadResult:
    """Send a load through a mesh and return what came back."""
    async with receiving_client(access, run_id) as client:
        driver = LoadDriver(client, access.clock, params, run_id)
        await driver.run(stop)
        return driver.result


def load_json(result: LoadResult) -> dict[str, Any]:
    """Return the part of the benchmark's JSON that the load gives."""
    return {
        "calls_per_s": round(result.calls_per_s, 2),
        "request_to_engine_ms": milliseconds(result.to_engine_s),
        "engine_to_result_ms": milliseconds(result.to_result_s),
        "calls": {
            "submitted": result.submitted,
            "completed": result.completed,
            "not_completed": result.not_completed,
            "timed": len(result.to_engine_s),
        },
    }
