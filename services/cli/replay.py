"""`hexflow replay`: a producer that drives a workload through a mesh."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from services.cli.caveats import scale_caveats
from services.cli.console import EXIT_INTERRUPTED, print_json, stderr_console, stdout_console
from services.cli.embedded import EmbeddedParams, open_embedded
from services.cli.interrupts import run_until_stopped
from services.cli.options import (
    AlphaOption,
    JsonOption,
    PolicyOption,
    VerboseOption,
    configure_logs,
    mesh_settings,
    parse_scales,
)
from services.cli.progress import live_progress, warn_when_stalled
from services.cli.remote import open_remote
from services.cli.report import RunInfo, instance_table, run_json, summary_table
from services.cli.session import MeshAccess, drive, new_run_id
from services.cli.tally import Tally
from services.cli.workload import Workload, WorkloadParams, build_workload, load_fleet
from shared.domain.instance import InstanceSpec
from shared.errors import ConfigError
from shared.runtime.settings import MeshSettings
from shared.scheduling.policies import DEFAULT_ALPHA, DEFAULT_POLICY

DEFAULT_TIME_SCALE = 10.0
DEFAULT_FLEET = "hetero-1"
STALL_WALL_S = 20.0
STALL_MESH_S = 120.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where and what to replay.

    Attributes:
        workload: What.
        kafka: Settings of a mesh that runs already; None: an embedded one is started.
        fleet: Name or file of the fleet; None: the built-in default, or what runs.
        policy: Policy of the embedded mesh.
        alpha: Its initial α.
        time_scale: Mesh seconds per wall second; None: the default, or what runs.
    """

    workload: WorkloadParams
    kafka: MeshSettings | None = None
    fleet: str | None = None
    policy: str | None = None
    alpha: float | None = None
    time_scale: float | None = None


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay came to."""

    info: RunInfo
    tally: Tally


async def replay(plan: ReplayPlan, stop: asyncio.Event) -> ReplayResult:
    """Replay a workload and return what came back.

    Raises:
        ConfigError: A name, file or value is wrong.
        MeshError: The mesh cannot be reached, or nothing serves there.
    """
    async with AsyncExitStack() as stack:
        if plan.kafka is None:
            access, fleet = await _embedded(plan, stack)
        else:
            remote = await stack.enter_async_context(open_remote(plan.kafka, plan.time_scale))
            access = remote
            fleet = load_fleet(plan.fleet) if plan.fleet else remote.fleet
        workload = build_workload(plan.workload, fleet)
        return await _run(plan, workload, access, stop)


async def _embedded(
    plan: ReplayPlan, stack: AsyncExitStack
) -> tuple[MeshAccess, tuple[InstanceSpec, ...]]:
    fleet = load_fleet(plan.fleet or DEFAULT_FLEET)
    build_workload(plan.workload, fleet)  # says what is wrong before anything is started
    params = EmbeddedParams(
        fleet=fleet,
        policy=plan.policy or DEFAULT_POLICY,
        alpha=plan.alpha if plan.alpha is not None else DEFAULT_ALPHA,
        time_scale=plan.time_scale or DEFAULT_TIME_SCALE,
    )
    return await stack.enter_async_context(open_embedded(params)), fleet


async def _run(
    plan: ReplayPlan, workload: Workload, access: MeshAccess, stop: asyncio.Event
) -> ReplayResult:
    console, tally, started_s = stderr_console(), Tally(), time.monotonic()
    policy = "" if plan.kafka else plan.policy or DEFAULT_POLICY
    label = policy or workload.name
    quiet_s = max(STALL_WALL_S, STALL_MESH_S / access.clock.time_scale)
    async with (
        live_progress(console, label, len(workload.queries), tally),
        asyncio.TaskGroup() as group,
    ):
        watcher = group.create_task(warn_when_stalled(console, tally, quiet_s), name="stall")
        await drive(access, workload.queries, tally, stop, new_run_id(plan.workload.seed))
        watcher.cancel()
    info = RunInfo(
        workload=workload.name,
        policy=policy,
        fleet=plan.fleet or ("the running mesh" if plan.kafka else DEFAULT_FLEET),
        rate_qps=workload.rate_qps,
        capacity_qps=workload.capacity_qps,
        time_scale=access.clock.time_scale,
        seed=plan.workload.seed,
        wall_s=round(time.monotonic() - started_s, 3),
        interrupted=stop.is_set(),
    )
    return ReplayResult(info=info, tally=tally)


def _where(
    *, embedded: bool, kafka: str | None, redis: str | None, policy: str | None, alpha: float | None
) -> MeshSettings | None:
    if kafka is None:
        if redis is not None:
            raise ConfigError("--redis goes with --kafka; the embedded mesh brings its own store")
        return None
    if embedded:
        raise ConfigError("--embedded and --kafka exclude each other")
    if policy is not None or alpha is not None:
        raise ConfigError(
            "--policy and --alpha belong to the mesh, and the one on Kafka runs already: set them "
            "where its dispatchers are started (hexflow up --policy, or DISPATCHER_POLICY)"
        )
    return mesh_settings(kafka=kafka, redis=redis)


@app.command()
def command(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TRACE]", help="Trace file: hexflow's own format, or the authors' JSON."
        ),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(metavar="natural|stress", help="Generate the workload instead."),
    ] = None,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Run a mesh in this process (the default).")
    ] = False,
    kafka: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Drive the mesh that runs on this Kafka, instead of one in this process.",
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="That mesh's Redis; a replay needs none, so optional."),
    ] = None,
    fleet: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="hetero-1 (default), hetero-2, homogeneous or a fleet file; with --kafka: the "
            "fleet whose isolated times the SLOs are multiples of (default: the running one).",
        ),
    ] = None,
    policy: PolicyOption = None,
    alpha: AlphaOption = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Queries per workload second, on average; default: half the fleet's estimated "
            "capacity."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most queries to replay.")] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1_000.0,
            help="Workload seconds per wall second; default 10, with --kafka the mesh's own.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, SLOs and generated queries.")] = 0,
    slo_scales: Annotated[
        str,
        typer.Option(
            help="SLOs as multiples of a query's isolated time, equally often; default: what the "
            "trace records, else 3,4,6,8,10."
        ),
    ] = "",
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="poisson, bursty, step, recorded, gamma:CV or step:RATExSECONDS,...; default: as "
            "recorded in the trace, else poisson."
        ),
    ] = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Drive a workload through a mesh and report what came back.

    Each query's next stage is submitted when the outcomes it waits for have been consumed,
    siblings in parallel. All numbers come from consumed outcomes; times are workload seconds.
    Ctrl-C cancels the open queries and reports what there is.
    """
    if trace is None and generate is None:
        raise ConfigError("name a trace file, or give --generate natural or --generate stress")
    configure_logs(verbose=verbose)
    plan = ReplayPlan(
        workload=WorkloadParams(
            trace=trace,
            mode=generate,
            limit=limit,
            rate_qps=rate,
            arrivals=arrivals,
            slo_scales=parse_scales(slo_scales),
            seed=seed,
        ),
        kafka=_where(embedded=embedded, kafka=kafka, redis=redis, policy=policy, alpha=alpha),
        fleet=fleet,
        policy=policy,
        alpha=alpha,
        time_scale=time_scale,
    )
    result = run_until_stopped(lambda stop: replay(plan, stop))
    if json:
        print_json(run_json(result.info, result.tally))
    else:
        stdout_console().print(summary_table(result.info, result.tally))
        stdout_console().print(instance_table(result.tally))
        for line in scale_caveats({"": result.tally}, result.info.time_scale):
            stderr_console().print(line, style="dim")
    if result.info.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
