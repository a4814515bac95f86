"""`hexflow bench mesh`: calls per second, and the latency that the mesh adds to a call.

The engines take next to no time and time runs at scale 1, so what is measured is broker, dispatch,
queue and results.
"""

import asyncio
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from services.cli.console import EXIT_INTERRUPTED, print_json, stderr_console, stdout_console
from services.cli.cpu import cpu_s
from services.cli.embedded import EmbeddedParams, open_embedded
from services.cli.interrupts import run_until_stopped, with_end
from services.cli.load import LoadParams, LoadResult, load_json, send_load
from services.cli.options import (
    JsonOption,
    VerboseOption,
    configure_logs,
    mesh_settings,
)
from services.cli.processes import ProcessesParams, ProcessMesh, open_processes
from services.cli.session import MeshAccess, new_run_id
from shared.domain.instance import InstanceSpec, LatencyModel
from shared.errors import ConfigError
from shared.runtime.settings import MeshSettings

WARMUP_S = 1.0
NUM_INSTANCES = 4

Cpu = Callable[[], dict[str, float]]


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        settings: Kafka and Redis to start service processes on; None: the embedded mesh.
        load: What to send.
        dispatchers: Dispatcher processes, with `settings`.
    """

    settings: MeshSettings | None
    load: LoadParams
    dispatchers: int = 1


def fast_fleet() -> tuple[InstanceSpec, ...]:
    """Return instances whose engines take next to no time."""
    latency = LatencyModel(prefill_s_per_token=1e-9, weights_s=1e-6)
    return tuple(
        InstanceSpec(
            instance_id=f"fast-{index}",
            gpu="none",
            max_num_seqs=256,
            kv_tokens=10_000_000,
            latency=latency,
        )
        for index in range(NUM_INSTANCES)
    )


async def bench_mesh(plan: BenchPlan, stop: asyncio.Event) -> dict[str, Any]:
    """Send a load through a mesh and return the benchmark's JSON object.

    Raises:
        MeshError: The servers cannot be reached, or a service did not start.
    """
    opened = _on_embedded() if plan.settings is None else _on_processes(plan, plan.settings)
    async with opened as (access, cpu):
        warm_s = min(plan.load.warmup_s, plan.load.duration_s / 4)
        load = msgspec.structs.replace(plan.load, warmup_s=warm_s)
        before = cpu()
        result = await send_load(access, load, new_run_id(0), stop)
        after = cpu()
    return {
        **load_json(result),
        "cpu_ms_per_call": _per_call(before, after, result),
        "broker": "embedded" if plan.settings is None else "kafka",
        "rate": plan.load.rate,
        "seconds": plan.load.duration_s,
    }


@asynccontextmanager
async def _on_embedded() -> AsyncIterator[tuple[MeshAccess, Cpu]]:
    async with open_embedded(EmbeddedParams(fleet=fast_fleet(), tunes=False)) as mesh:
        pids = {"mesh": os.getpid(), "state_store": mesh.state_pid}
        yield mesh, lambda: _cpu_of(pids)


@asynccontextmanager
async def _on_processes(
    plan: BenchPlan, settings: MeshSettings
) -> AsyncIterator[tuple[MeshAccess, Cpu]]:
    # A prefix of its own keeps the benchmark apart from a mesh that runs on the same servers.
    prefix = f"hexflow-bench-{secrets.token_hex(4)}."
    topics = settings.topics.model_copy(update={"prefix": prefix})
    own = settings.model_copy(update={"topics": topics})
    params = ProcessesParams(fleet=fast_fleet(), dispatchers=plan.dispatchers, log_level="WARNING")
    with tempfile.TemporaryDirectory(prefix="hexflow-bench-") as folder:
        async with open_processes(own, params, Path(folder)) as mesh:
            try:
                yield mesh, lambda: _cpu_of({**mesh.pids, "producer": os.getpid()})
            finally:
                await delete_topics(mesh, prefix)


async def delete_topics(mesh: ProcessMesh, prefix: str) -> None:
    """Stop a mesh's services and delete its topics."""
    await asyncio.to_thread(mesh.stop_services)
    names = [name for name in await mesh.broker.describe_topics() if name.startswith(prefix)]
    await mesh.broker.delete_topics(names)


def _cpu_of(pids: dict[str, int]) -> dict[str, float]:
    """Return processor seconds per service; processes of one service are added up."""
    totals: dict[str, float] = {}
    for name, pid in pids.items():
        used_s = cpu_s(pid)
        if used_s is not None:
            service = name.partition("-")[0]
            totals[service] = totals.get(service, 0.0) + used_s
    return totals


def _per_call(
    before: dict[str, float], after: dict[str, float], result: LoadResult
) -> dict[str, float]:
    num = max(1, result.completed)
    return {
        service: round((after[service] - before[service]) * 1_000 / num, 4)
        for service in sorted(before.keys() & after.keys())
    }


def as_table(report: dict[str, Any]) -> Table:
    """Return the report for people."""
    table = Table(title=f"the mesh on {report['broker']}", title_justify="left")
    table.add_column("")
    for name in ("p50", "p95", "p99"):
        table.add_column(name, justify="right")
    for label, key in (
        ("produced → engine", "request_to_engine_ms"),
        ("engine → result", "engine_to_result_ms"),
    ):
        numbers = [report[key][name] for name in ("p50", "p95", "p99")]
        table.add_row(label, *["–" if n is None else f"{n:.2f} ms" for n in numbers])
    return table


def command(
    embedded: Annotated[
        bool, typer.Option("--embedded", help="The whole mesh in this process (the default).")
    ] = False,
    kafka: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Measure services that run as processes on this Kafka; goes with --redis.",
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Their Redis, redis://HOST:PORT/DB; goes with --kafka."),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Calls per second; 0: as many as possible.")
    ] = 50.0,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long to send.")] = 10.0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=10_000, help="Calls in flight with --rate 0.")
    ] = 128,
    dispatchers: Annotated[
        int, typer.Option(min=1, max=64, help="With --kafka: dispatcher processes.")
    ] = 1,
    json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure calls per second and the latency that the mesh adds to a call.

    Engines take next to no time here. With --kafka and --redis the services run as processes on
    those servers, under a topic prefix of their own that is removed afterwards.
    """
    if embedded and kafka is not None:
        raise ConfigError("--embedded and --kafka exclude each other")
    if (kafka is None) != (redis is None):
        raise ConfigError("--kafka and --redis go together: the services need both")
    configure_logs(verbose=verbose)
    settings = mesh_settings(kafka=kafka, redis=redis, time_scale=1.0) if kafka else None
    plan = BenchPlan(
        settings=settings,
        load=LoadParams(rate=rate, duration_s=seconds, warmup_s=WARMUP_S, concurrency=concurrency),
        dispatchers=dispatchers,
    )
    if not json:
        stderr_console().print(f"sending for {seconds:g} s ...", style="dim")
    report, was_stopped = run_until_stopped(lambda stop: with_end(bench_mesh(plan, stop), stop))
    if json:
        print_json(report)
    else:
        _show(report)
    if was_stopped:
        raise typer.Exit(EXIT_INTERRUPTED)


def _show(report: dict[str, Any]) -> None:
    console = stdout_console()
    console.print(as_table(report))
    calls = report["calls"]
    console.print(
        f"{report['calls_per_s']:.1f} calls/s completed; submitted {calls['submitted']}, "
        f"completed {calls['completed']}, not completed {calls['not_completed']}"
    )
    cpu = ", ".join(f"{name} {ms:.2f}" for name, ms in report["cpu_ms_per_call"].items())
    console.print(f"processor time per call, ms: {cpu or 'not known on this system'}")
