"""`hexflow bench admission`: does an engine do as much when only its knee of calls is let in?

The same queries come at twice what a real engine can do, in turn with the mesh's own admission (the
knee of its profile, and only what is batched at once) and with none (the engine gets every call at
once). Held back calls can be reordered, moved and cancelled; this tells what that costs.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import mean
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from services.cli.console import EXIT_INTERRUPTED, print_json, stderr_console, stdout_console
from services.cli.engine_options import (
    CoreOption,
    ModelOption,
    OneOpenAIOption,
    RealEngineOption,
    on_one_core,
)
from services.cli.fidelity_runs import (
    RecordingTally,
    knee_qps,
    real_run,
    small_queries,
    with_arrivals,
)
from services.cli.interrupts import run_until_stopped
from services.cli.options import JsonOption, VerboseOption, configure_logs
from services.cli.progress import live_progress
from services.cli.real_engines import EngineChoice, Fleet, OpenEngine, open_real
from shared.adapters.engine_around import EngineAround
from shared.contracts.messages import BoundCall
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.ports import Clock, Engine
from shared.scheduling.attainment import percentile

OVERLOAD = 2.0
EVERYTHING = 10_000
LOOK_S = 0.1


class Unlimited(EngineAround):
    """An engine that has room for every call."""

    def has_room_for(self, call: BoundCall) -> bool:
        """Return True: the call may wait inside the engine."""
        del call
        return True


class AdmissionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        engines: The real engine; of several the first.
        num_queries: Queries per run.
        repeats: Runs with and without admission, in turn.
        seed: Of the workload.
    """

    engines: EngineChoice
    num_queries: int
    repeats: int
    seed: int


class Arm(msgspec.Struct, kw_only=True):
    """The runs with admission, or those without.

    Attributes:
        tokens_per_s: Generated tokens per second of every run, from the first call to the last end.
        call_p50_s: Median time of its calls from ready to end, seconds.
        num_waiting: Calls waiting inside the engine by its own count, at every look.
    """

    tokens_per_s: list[float] = []
    call_p50_s: list[float] = []
    num_waiting: list[int] = []

    def waiting_p99(self) -> float | None:
        """Return the P99 of the calls waiting inside; None: the engine does not tell."""
        return percentile(self.num_waiting, 99) if self.num_waiting else None

    def noise(self) -> float:
        """Return half the range of the runs' throughput over their mean."""
        return (max(self.tokens_per_s) - min(self.tokens_per_s)) / (2 * mean(self.tokens_per_s))


class AdmissionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        spec: The instance; `max_num_seqs` is how many calls admission lets in.
        admitted: With admission.
        unlimited: Without.
    """

    spec: InstanceSpec
    admitted: Arm
    unlimited: Arm

    @property
    def ratio(self) -> float:
        """Throughput with admission over that without."""
        return mean(self.admitted.tokens_per_s) / mean(self.unlimited.tokens_per_s)


async def measure_admission(
    plan: AdmissionPlan, console: Console, stop: asyncio.Event
) -> AdmissionResult:
    """Run the same queries with and without admission, in turn.

    Raises:
        ConfigError: The engine cannot be had.
        TransientError: The engine did not answer every query.
    """
    telling = msgspec.structs.replace(plan.engines, tells_load=True)
    async with open_real(telling, console) as engines:
        spec = engines.specs[0]
        queries = small_queries(spec, plan.num_queries, plan.seed)
        arriving = with_arrivals(queries, spec, OVERLOAD * knee_qps(queries, spec), plan.seed)
        result = AdmissionResult(spec=spec, admitted=Arm(), unlimited=Arm())
        freely = msgspec.structs.replace(spec, max_num_seqs=EVERYTHING)
        arms = (
            ("admitted", result.admitted, spec, engines.open_engine),
            ("unlimited", result.unlimited, freely, _unlimited(engines.open_engine)),
        )
        for repeat in range(plan.repeats):
            for name, arm, as_spec, open_engine in arms:
                label = f"{name}, run {repeat + 1} of {plan.repeats}"
                await _run(arm, as_spec, arriving, open_engine, engines, console, label, stop)
                if stop.is_set():
                    return result
    return result


async def _run(
    arm: Arm,
    spec: InstanceSpec,
    queries: tuple[TraceQuery, ...],
    open_engine: OpenEngine,
    engines: Fleet,
    console: Console,
    label: str,
    stop: asyncio.Event,
) -> None:
    tally = RecordingTally()
    async with live_progress(console, label, len(queries), tally), asyncio.TaskGroup() as group:
        looking = group.create_task(_look(engines, spec, arm), name="look")
        timings = await real_run(queries, spec, open_engine, stop, tally)
        looking.cancel()
    if stop.is_set():
        return
    times = [outcome.times for outcome in tally.outcomes]
    began_s = min(one.ready_at_s for one in times if one.ready_at_s is not None)
    ended_s = max(one.finished_at_s for one in times if one.finished_at_s is not None)
    tokens = sum(outcome.usage.output_tokens for outcome in tally.outcomes)
    arm.tokens_per_s.append(tokens / (ended_s - began_s))
    arm.call_p50_s.append(timings.call_latency_s(50))


async def _look(engines: Fleet, spec: InstanceSpec, arm: Arm) -> None:
    """Read the engine's own count of waiting calls, where it has metrics that tell."""
    while (load := await engines.read_load(spec.instance_id)) is not None:
        arm.num_waiting.append(load.num_waiting)
        await asyncio.sleep(LOOK_S)


def _unlimited(open_engine: OpenEngine) -> OpenEngine:
    @asynccontextmanager
    async def opened(spec: InstanceSpec, clock: Clock) -> AsyncIterator[Engine]:
        async with open_engine(spec, clock) as engine:
            yield Unlimited(engine, spec)

    return opened


def admission_json(result: AdmissionResult) -> dict[str, Any]:
    """Return the command's JSON object."""

    def arm(one: Arm) -> dict[str, Any]:
        return {
            "tokens_per_s": [round(value, 3) for value in one.tokens_per_s],
            "call_p50_s": [round(value, 3) for value in one.call_p50_s],
            "waiting_inside_p99": one.waiting_p99(),
            "repeat_noise": round(one.noise(), 4),
        }

    return {
        "instance": result.spec.instance_id,
        "calls_at_a_time": result.spec.max_num_seqs,
        "overload": OVERLOAD,
        "throughput_ratio": round(result.ratio, 4),
        "admitted": arm(result.admitted),
        "unlimited": arm(result.unlimited),
    }


def admission_table(result: AdmissionResult) -> Table:
    """Return both arms for people."""
    table = Table(
        title=f"{result.spec.instance_id}, {result.spec.max_num_seqs} calls at a time let in; "
        f"throughput with admission ÷ without: {result.ratio:.3f}",
        title_justify="left",
    )
    for name in ("", "tokens/s", "± between runs", "median call", "P99 waiting in the engine"):
        table.add_column(name, justify="right" if name else "left")
    for name, arm in (("with admission", result.admitted), ("without", result.unlimited)):
        waiting = arm.waiting_p99()
        table.add_row(
            name,
            f"{mean(arm.tokens_per_s):.2f}",
            f"{arm.noise():.1%}" if len(arm.tokens_per_s) > 1 else "one run",
            f"{mean(arm.call_p50_s):.2f} s",
            "not told" if waiting is None else f"{waiting:g}",
        )
    return table


def command(
    engine: RealEngineOption = None,
    openai: OneOpenAIOption = None,
    model: ModelOption = "",
    queries: Annotated[int, typer.Option(min=5, help="Queries per run.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turn.")] = 2,
    core: CoreOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload.")] = 0,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure what holding calls back costs a real engine in throughput, at twice its capacity."""
    configure_logs(verbose=verbose)
    choice = on_one_core(
        engine,
        openai,
        core,
        "a simulated engine admits as its model says: --engine or --openai",
        model=model,
    )
    plan = AdmissionPlan(engines=choice, num_queries=queries, repeats=repeats, seed=seed)
    result = run_until_stopped(lambda stop: measure_admission(plan, stderr_console(), stop))
    if not result.admitted.tokens_per_s or not result.unlimited.tokens_per_s:
        raise typer.Exit(EXIT_INTERRUPTED)
    if json:
        print_json(admission_json(result))
    else:
        stdout_console().print(admission_table(result))
