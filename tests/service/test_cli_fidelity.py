"""`hexflow fidelity`: experiments and runs in turn, on an engine through the whole mesh."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from rich.console import Console

from services.cli.console import mesh_error_in, print_json
from services.cli.fidelity import FidelityPlan, compare
from services.cli.fidelity_results import LoadResult, fidelity_figure, fidelity_json, load_text
from services.cli.fidelity_runs import real_run, small_queries, with_arrivals
from services.cli.real_engines import EngineChoice, Fleet
from shared.adapters.replayed_prompts import ReplayedPrompts
from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.messages import BoundCall, SimulatedLengths
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.errors import EngineUnavailable
from shared.ports import Clock, Engine

WITHIN_S = 300.0
SPEC = InstanceSpec(
    instance_id="cpu-0",
    gpu="CPU",
    max_num_seqs=2,
    max_context_tokens=256,
    max_batched_tokens=256,
    latency=LatencyModel(prefill_s_per_token=1e-4, weights_s=1e-3),
)
PLAN = FidelityPlan(engines=EngineChoice(), loads=(0.3, 0.6), num_queries=5, repeats=2, seed=0)


class Reading(ReplayedPrompts):
    """A simulated engine that goes by the words of a prompt, as a real one does."""

    def generate(self, call: BoundCall, engine_id: str):
        """Run one call."""
        request = call.request
        words = len((request.prompt or "").split()) or request.simulated.input_tokens
        lengths = request.simulated or SimulatedLengths(
            input_tokens=words, output_tokens=request.max_tokens or 1
        )
        request = msgspec.structs.replace(request, simulated=lengths)
        return self._engine.generate(msgspec.structs.replace(call, request=request), engine_id)


async def compared(stop: asyncio.Event, *, stops_at: int = 0) -> tuple[list[LoadResult], int]:
    """Return what was found, and how often the engine was opened.

    Args:
        stop: The user's wish.
        stops_at: The opening at which the user has it; 0: never.
    """
    num_opened = 0

    @asynccontextmanager
    async def opened(spec: InstanceSpec, clock: Clock) -> AsyncIterator[Engine]:
        nonlocal num_opened
        num_opened += 1
        if num_opened == stops_at:
            stop.set()
        async with SimulatedEngine.open(spec, clock) as engine:
            yield Reading(engine)

    fleet = Fleet(specs=(SPEC,), open_engine=opened)
    console = Console(quiet=True)
    async with asyncio.timeout(WITHIN_S):
        return await compare(fleet, PLAN, console, stop), num_opened


async def test_profiles_and_runs_alternate(capsys: pytest.CaptureFixture[str]):
    """Each load has a profile before and after each of its runs, and errors that are numbers."""
    results, num_opened = await compared(asyncio.Event())
    assert [one.load for one in results] == [0.3, 0.6]
    assert num_opened == 5 + 4, "five profiles, four runs"
    experiment = results[0].profile.num_calls // 3
    for one in results:
        assert len(one.real) == 2
        assert one.profile.num_calls == 3 * experiment
        assert 0 <= one.noise < 1
        assert {len(run.calls) for run in one.real} == {len(one.simulated.calls)}
    capsys.readouterr()  # what the services logged
    print_json(fidelity_json(results))
    told = json.loads(capsys.readouterr().out)["loads"]
    assert told[1]["profile"]["calls"] == 3 * experiment
    assert load_text(results[1]).startswith("60%: median call ")
    assert len(fidelity_figure(results).axes) == 2


async def test_a_run_on_an_engine_that_fails_ends_early():
    """What an engine does that fails call after call tells nothing of its speed."""

    class Failing(Reading):
        async def generate(self, call: BoundCall, engine_id: str):
            """Fail."""
            del call, engine_id
            raise EngineUnavailable("the server cannot be reached")
            yield  # pragma: no cover - what makes it a generator

    @asynccontextmanager
    async def opened(spec: InstanceSpec, clock: Clock) -> AsyncIterator[Engine]:
        async with SimulatedEngine.open(spec, clock) as engine:
            yield Failing(engine)

    queries = with_arrivals(small_queries(SPEC, 20, 0), SPEC, 0.1, 0)
    async with asyncio.timeout(WITHIN_S):
        try:
            await real_run(queries, SPEC, opened, asyncio.Event())
        except BaseException as exc:  # noqa: BLE001 - the mesh's own group around it
            told = mesh_error_in(exc)
    assert "fails call after call" in str(told)


@pytest.mark.parametrize(("stops_at", "num_real"), [(2, None), (3, 1), (4, 1)])
async def test_what_was_measured_before_a_stop_is_told(stops_at: int, num_real: int | None):
    """Within a profile or a run; a run alone has no noise, so its load is void."""
    results, num_opened = await compared(asyncio.Event(), stops_at=stops_at)
    assert num_opened == stops_at
    assert [len(one.real) for one in results] == ([] if num_real is None else [num_real])
    assert all(one.is_void for one in results if len(one.real) < 2)
