"""`hexflow bench overload`: what a mesh still does in time when more is asked than it can do.

The whole embedded mesh runs in virtual time (`virtual_time`): dispatcher, workers, their queues in
the state store, engines by the simulator's model. Each load is a run of its own with the same seed.
Goodput counts queries that arrived after the first part of a run, when the queues were filling.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from services.cli.console import finite, print_json, stderr_console, stdout_console
from services.cli.embedded import EmbeddedMesh, EmbeddedParams, open_in_virtual_time
from services.cli.options import FleetOption, JsonOption, VerboseOption, configure_logs
from services.cli.progress import live_progress
from services.cli.session import drive
from services.cli.tally import Tally
from services.cli.virtual_time import VirtualTimeLoop
from services.cli.workload import WorkloadParams, build_workload, load_fleet
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.runtime.metrics import Metrics
from shared.scheduling.attainment import QueryEnd, percentile
from shared.scheduling.policies import DEFAULT_POLICY

DEFAULT_LOADS = "0.5,0.75,1,1.5,2,4"
WARM_UP = 0.25
LOOK_S = 5.0


class OverloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        fleet: The instances.
        loads: Rates as multiples of the fleet's estimated capacity.
        seconds: Time in which queries arrive, per load, workload seconds.
        policy: Registry name.
        alpha: Its α.
        admission: Whether queries are turned away.
        seed: Of queries and arrivals.
    """

    fleet: tuple[InstanceSpec, ...]
    loads: tuple[float, ...]
    seconds: float
    policy: str
    alpha: float
    admission: bool
    seed: int


class Peaks(msgspec.Struct, kw_only=True):
    """Largest numbers seen in a run.

    Attributes:
        waiting_calls: Calls waiting in dispatcher and workers.
        open_queries: Queries that had not ended, as the producer knows.
    """

    waiting_calls: int = 0
    open_queries: int = 0


class LoadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one load.

    Attributes:
        load: Rate as a multiple of the estimated capacity.
        rate_qps: Queries per second.
        submitted: Queries.
        rejected: Of these, turned away.
        late: Of these, completed too late.
        goodput_qps: Queries in time per second, of those that arrived after the warm-up.
        met_of_admitted: Share of the queries let in that were in time.
        told_s: P95 of the time until a rejected query was told, seconds.
        peaks: Largest queues.
        kinds: Queries per kind of end.
        wall_s: Wall seconds the run took.
    """

    load: float
    rate_qps: float
    submitted: int
    rejected: int
    late: int
    goodput_qps: float
    met_of_admitted: float
    told_s: float
    peaks: Peaks
    kinds: dict[str, int]
    wall_s: float


class TimedTally(Tally):
    """A tally that also keeps how long rejected queries waited for their answer."""

    def __init__(self) -> None:
        super().__init__()
        self.told_s: list[float] = []

    def query_ended(self, kind: str, end: QueryEnd | None) -> None:
        """Take the end of a query."""
        super().query_ended(kind, end)
        if kind == "rejected" and end is not None:
            self.told_s.append(end.latency_s)


async def run_load(plan: OverloadPlan, load: float) -> LoadOutcome:
    """Run one load on a mesh of its own."""
    queries, rate_qps = _queries(plan, load)
    started_s = time.monotonic()
    params = EmbeddedParams(
        fleet=plan.fleet,
        policy=plan.policy,
        alpha=plan.alpha,
        admission=plan.admission,
        tunes=False,
        drain_s=2.0,
    )
    tally, peaks = TimedTally(), Peaks()
    async with open_in_virtual_time(params) as mesh:
        began_s = mesh.clock.now_s()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(mesh, tally, peaks), name="watch-queues")
            async with live_progress(stderr_console(), f"load {load:g}", len(queries), tally):
                await drive(mesh, queries, tally, asyncio.Event(), f"over{plan.seed}")
            watch.cancel()
    wall_s = time.monotonic() - started_s
    return _outcome(load, rate_qps, tally, peaks, began_s, plan.seconds, wall_s)


def _queries(plan: OverloadPlan, load: float) -> tuple[tuple[TraceQuery, ...], float]:
    capacity = build_workload(WorkloadParams(limit=300, seed=plan.seed), plan.fleet).capacity_qps
    rate_qps = load * capacity
    count = max(1, round(rate_qps * plan.seconds))
    params = WorkloadParams(limit=count, rate_qps=rate_qps, seed=plan.seed)
    return build_workload(params, plan.fleet).queries, rate_qps


async def _watch(mesh: EmbeddedMesh, tally: Tally, peaks: Peaks) -> None:
    """Look at the queues again and again, until cancelled."""
    while True:
        waiting = sum(_num_waiting(probe.metrics) for probe in mesh.services.values())
        peaks.waiting_calls = max(peaks.waiting_calls, waiting)
        peaks.open_queries = max(peaks.open_queries, tally.num_active)
        await mesh.clock.sleep(LOOK_S)


def _num_waiting(metrics: Metrics) -> int:
    samples = (one for family in metrics.registry.collect() for one in family.samples)
    return round(sum(one.value for one in samples if one.name == "hexflow_calls_waiting"))


def _outcome(
    load: float,
    rate_qps: float,
    tally: TimedTally,
    peaks: Peaks,
    began_s: float,
    seconds: float,
    wall_s: float,
) -> LoadOutcome:
    from_s, until_s = began_s + WARM_UP * seconds, began_s + seconds
    steady = [end for end in tally.ends if from_s <= end.arrival_s < until_s]
    completed = [end for end in tally.ends if end.completed]
    admitted = tally.queries["submitted"] - tally.queries["rejected"]
    return LoadOutcome(
        load=load,
        rate_qps=rate_qps,
        submitted=tally.queries["submitted"],
        rejected=tally.queries["rejected"],
        late=sum(not end.met for end in completed),
        goodput_qps=sum(end.met for end in steady) / (until_s - from_s),
        met_of_admitted=sum(end.met for end in completed) / max(1, admitted),
        told_s=percentile(tally.told_s, 95) if tally.told_s else 0.0,
        peaks=peaks,
        kinds={kind: count for kind, count in sorted(tally.queries.items()) if count},
        wall_s=wall_s,
    )


def overload_json(plan: OverloadPlan, found: Sequence[LoadOutcome]) -> dict[str, Any]:
    """Return the JSON object of `hexflow bench overload --json`."""
    best = max(one.goodput_qps for one in found)
    return {
        "policy": plan.policy,
        "admission": plan.admission,
        "seconds": plan.seconds,
        "seed": plan.seed,
        "max_goodput_qps": finite(best),
        "loads": [
            {**msgspec.to_builtins(one), "of_max_goodput": finite(one.goodput_qps / best)}
            for one in found
        ],
    }


def overload_table(found: Sequence[LoadOutcome]) -> Table:
    """Return the loads for people."""
    table = Table(title="goodput under overload", title_justify="left")
    names = ("load", "qps", "goodput", "of best", "rejected", "late", "of admitted in time", "told")
    for name in (*names, "most waiting"):
        table.add_column(name, justify="right")
    best = max(one.goodput_qps for one in found) or 1.0
    for one in found:
        table.add_row(
            f"{one.load:g}",
            f"{one.rate_qps:.2f}",
            f"{one.goodput_qps:.3f}",
            f"{one.goodput_qps / best:.0%}",
            str(one.rejected),
            str(one.late),
            f"{one.met_of_admitted:.1%}",
            f"{one.told_s:.2f} s",
            str(one.peaks.waiting_calls),
        )
    return table


def parse_loads(text: str) -> tuple[float, ...]:
    """Return the loads of `1,1.5,4`.

    Raises:
        BadParameter: One is no number above 0.
    """
    try:
        loads = tuple(float(word) for word in text.split(","))
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} is no list of numbers") from exc
    if not all(0 < load <= 100 for load in loads):
        raise typer.BadParameter("a load must be above 0 and at most 100")
    return loads


def command(
    loads: Annotated[
        str, typer.Option(help="Rates, as multiples of the fleet's estimated capacity.")
    ] = DEFAULT_LOADS,
    seconds: Annotated[
        float, typer.Option(min=60, help="How long queries arrive, workload seconds.")
    ] = 1_200.0,
    fleet: FleetOption = "hetero-1",
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = DEFAULT_POLICY,
    alpha: Annotated[float, typer.Option(min=0, max=1)] = 0.1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    admission: Annotated[
        bool, typer.Option(help="Turn away what cannot be done in time, as services do by default.")
    ] = True,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure goodput at and beyond capacity, in virtual time: some minutes for the default loads.

    All services run as they are, on an event loop whose time jumps whenever everything waits.
    """
    configure_logs(verbose=verbose)
    plan = OverloadPlan(
        fleet=load_fleet(fleet),
        loads=parse_loads(loads),
        seconds=seconds,
        policy=policy,
        alpha=alpha,
        admission=admission,
        seed=seed,
    )
    found = []
    for load in plan.loads:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            found.append(runner.run(run_load(plan, load)))
    if json:
        print_json(overload_json(plan, found))
    else:
        stdout_console().print(overload_table(found))
