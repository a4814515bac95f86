"""`hexflow up`: a whole mesh on this machine, with a live view."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live

from services.cli.console import counted, stderr_console
from services.cli.driver import CANCEL_WAIT_S
from services.cli.embedded import (
    EmbeddedMesh,
    EmbeddedParams,
    gateway_of_environment,
    open_embedded,
    open_mesh_on,
)
from services.cli.engine_options import EngineOption, ModelOption, OpenAIOption, choice_of
from services.cli.gateway_options import (
    GatewayOption,
    PortOption,
    gateway_text,
    port_of,
    unused_text,
)
from services.cli.interrupts import run_until_stopped
from services.cli.options import (
    AlphaOption,
    NamedFleetOption,
    PolicyOption,
    TimeScaleOption,
    VerboseOption,
    configure_logs,
    mesh_settings,
)
from services.cli.processes import STOP_WITHIN_S, ProcessesParams, ProcessMesh, open_processes
from services.cli.producer_sample import sample_producer
from services.cli.progress import status_text
from services.cli.real_engines import EngineChoice, Fleet, count_of, fleet_of
from services.cli.session import MeshAccess, drive, new_run_id
from services.cli.tally import Tally
from services.cli.text2sql.databases import check_databases, databases_named
from services.cli.text2sql.mesh import AgentDatabasesOption, agent_of_fleet, agent_text
from services.cli.watch import MeshWatch, end_line, watch_line, watch_table, watching
from services.cli.workload import WorkloadParams, build_workload
from shared.adapters.clock import SystemClock
from shared.adapters.kafka import KafkaBroker
from shared.adapters.local_kafka import LocalKafka, LocalKafkaParams, default_cache_dir
from shared.adapters.local_process import LOOPBACK
from shared.domain.instance import InstanceSpec
from shared.errors import ConfigError
from shared.runtime.connections import kafka_params
from shared.runtime.settings import MeshSettings
from shared.scheduling.policies import DEFAULT_ALPHA, DEFAULT_POLICY, make_policy

REFRESH_S = 0.5
LINE_EVERY_S = 15.0
PROCESS_CHECK_S = 1.0
LOAD_BATCH = 1_000
CUT_OFF_S = 2.0  # the last moments of services that are late, one after another
DEFAULT_FLEET = "hetero-1"

UNREACHABLE = (
    "[yellow]Kafka clients cannot reach this mesh:[/yellow] its broker lives in this process. "
    "For one that they can reach: hexflow up --with-kafka (needs Java 17 and Maven), or "
    "hexflow up --kafka HOST:PORT --redis URL on servers of your own."
)
# At the margin and below 80 columns, so that it can be copied into a file as it stands.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class UpPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Attributes:
        fleet: Name or file of the fleet.
        policy: Scheduling policy.
        alpha: Its initial α.
        time_scale: Mesh seconds per wall second.
        with_kafka: Start a real Kafka on this machine.
        settings: Kafka and Redis of the user's own; None: embedded.
        dispatchers: Dispatcher processes, with `settings`.
        rate_qps: Queries per mesh second to drive through it; 0: none.
        engines: Real engines; None: simulated ones of the fleet.
        databases: Of a Text-to-SQL agent that runs too, name -> address; none: no agent.
        gateway_port: Where its gateway is served on loopback; None: none runs.
    """

    fleet: str
    policy: str
    alpha: float
    time_scale: float
    with_kafka: bool
    settings: MeshSettings | None
    dispatchers: int
    rate_qps: float
    engines: EngineChoice | None = None
    databases: dict[str, str] = {}
    gateway_port: int | None = None


async def up(plan: UpPlan, console: Console, stop: asyncio.Event) -> None:
    """Run a mesh until `stop` is set.

    Raises:
        ConfigError: A name, file or value is wrong, or Kafka cannot be started here.
        MeshError: The servers named cannot be reached.
    """
    tally = Tally()
    if plan.time_scale != 1:
        console.print(f"One wall second is {plan.time_scale:g} workload seconds.")
    async with (
        fleet_of(plan.engines, plan.fleet, console) as engines,
        _open(plan, engines, console) as access,
        watching(access) as watch,
    ):
        fleet = engines.specs
        async with asyncio.TaskGroup() as group:
            if plan.rate_qps > 0:
                load = _load(plan, fleet, access, tally, stop)
                group.create_task(load, name="load")
            if isinstance(access, ProcessMesh):
                group.create_task(_report_ended(console, access, stop), name="processes")
            group.create_task(_view(console, watch, tally, stop), name="view")
            leaving = _say_draining(console, watch, _longest_end_s(plan, access), stop)
            group.create_task(leaving, name="leaving")
    console.print(end_line(watch), soft_wrap=True)
    if isinstance(access, EmbeddedMesh) and access.ending.late:
        late = ", ".join(access.ending.late)
        console.print(f"cut off after {access.ending.bound_s:g} s: {late}", style="yellow")


@asynccontextmanager
async def _open(plan: UpPlan, engines: Fleet, console: Console) -> AsyncIterator[MeshAccess]:
    fleet, is_served = engines.specs, plan.gateway_port is not None and plan.settings is None
    params = EmbeddedParams(
        fleet=fleet,
        policy=plan.policy,
        alpha=plan.alpha,
        time_scale=plan.time_scale,
        admission=True,
        open_engine=engines.open_engine,
        agent=agent_of_fleet(plan.databases, engines),
        gateway=gateway_of_environment() if is_served else None,
        gateway_address=(LOOPBACK, plan.gateway_port or 0),
    )
    async with AsyncExitStack() as stack:
        if plan.settings is not None:
            many = ProcessesParams(
                fleet=fleet,
                policy=plan.policy,
                alpha=plan.alpha,
                dispatchers=plan.dispatchers,
                worker_variables=engines.worker_variables,
                gateway_ports=() if plan.gateway_port is None else (plan.gateway_port,),
            )
            processes = await stack.enter_async_context(open_processes(plan.settings, many))
            address = plan.settings.kafka.bootstrap_servers
            console.print(f"service processes on Kafka {address}: {len(processes.pids)}")
            console.print(f"logs: {processes.log_dir}", soft_wrap=True)
            for name, pid in processes.pids.items():
                console.print(f"  {name:<24} pid {pid}")
            access: MeshAccess = processes
            _print_sample(console, address, fleet, access)
        elif plan.with_kafka:
            own = _on_own_kafka(params, engines, console)
            access, address = await stack.enter_async_context(own)
            _print_sample(console, address, fleet, access)
        else:
            access = await stack.enter_async_context(open_embedded(params))
            console.print(f"The whole mesh runs in this process: {_services(engines)}.")
            console.print(UNREACHABLE)
        if plan.gateway_port is not None:
            keys_file = os.environ.get("GATEWAY_KEYS_FILE")
            console.print(gateway_text(plan.gateway_port, keys_file), soft_wrap=True)
        if plan.settings is None and (unused := unused_text(os.environ)):
            console.print(unused, soft_wrap=True)
        if plan.databases:
            console.print(agent_text(plan.databases, engines), soft_wrap=True)
        yield access


@asynccontextmanager
async def _on_own_kafka(
    params: EmbeddedParams, engines: Fleet, console: Console
) -> AsyncIterator[tuple[MeshAccess, str]]:
    """Run the services of this process on a Kafka started for it."""
    with tempfile.TemporaryDirectory(prefix="hexflow-kafka-") as folder:
        kafka = LocalKafka(
            LocalKafkaParams(data_dir=Path(folder), cache_dir=default_cache_dir(os.environ)),
            lambda text: console.print(f"{text} ...", style="dim"),
        )
        try:
            await asyncio.to_thread(kafka.start)
            settings = mesh_settings(kafka=kafka.bootstrap)
            clock = SystemClock(time_scale=params.time_scale)
            async with (
                KafkaBroker.open(kafka_params(settings, "hexflow-up")) as broker,
                open_mesh_on(broker, clock, params, settings.topics.topics()) as mesh,
            ):
                console.print(
                    f"Apache Kafka runs at [bold]{kafka.bootstrap}[/bold]; in this process: "
                    f"{_services(engines)}. Both end with it, with all their data."
                )
                yield mesh, kafka.bootstrap
        finally:
            await asyncio.to_thread(kafka.stop)


def _services(engines: Fleet) -> str:
    kind = "real engines"
    if not engines.is_real:
        kind = "simulated engines (real ones: --engine, --openai)"
    return f"dispatcher, tuner, {count_of(engines.specs, 'worker')} with {kind}"


def _print_sample(
    console: Console, address: str, fleet: tuple[InstanceSpec, ...], access: MeshAccess
) -> None:
    text = sample_producer(address, fleet, access.topics)
    console.print(text, markup=False, soft_wrap=True)


async def _load(
    plan: UpPlan,
    fleet: tuple[InstanceSpec, ...],
    access: MeshAccess,
    tally: Tally,
    stop: asyncio.Event,
) -> None:
    seed = 0
    while not stop.is_set():
        params = WorkloadParams(limit=LOAD_BATCH, rate_qps=plan.rate_qps, seed=seed)
        workload = await asyncio.to_thread(build_workload, params, fleet)
        await drive(access, workload.queries, tally, stop, new_run_id(seed))
        seed += 1


async def _view(console: Console, watch: MeshWatch, tally: Tally, stop: asyncio.Event) -> None:
    if not console.is_terminal:
        while not await _stopped_within(LINE_EVERY_S, stop):
            console.print(_status(watch, tally), soft_wrap=True)
        return
    console.print("Ctrl-C drains and ends it; a second one ends it at once.\n", style="dim")
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(Group(watch_table(watch), _status(watch, tally)), refresh=True)
            if await _stopped_within(REFRESH_S, stop):
                return


async def _report_ended(console: Console, mesh: ProcessMesh, stop: asyncio.Event) -> None:
    """Say which service processes end by themselves; the others go on."""
    known: set[str] = set()
    while not await _stopped_within(PROCESS_CHECK_S, stop):
        for name, tail in mesh.ended().items():
            if name not in known:
                console.print(f"[red]{name} has ended:[/red]")
                console.print(tail, markup=False, soft_wrap=True)
        known = set(mesh.ended())


def _status(watch: MeshWatch, tally: Tally) -> str:
    line = watch_line(watch)
    if tally.queries["submitted"]:
        line = f"queries: {status_text(tally)}\n{line}"
    return line


def _longest_end_s(plan: UpPlan, access: MeshAccess) -> float:
    """Return how long the end takes at most, wall seconds: first the load's, then the mesh's."""
    bound_s = STOP_WITHIN_S
    if isinstance(access, EmbeddedMesh):
        bound_s = access.ending.bound_s + CUT_OFF_S
    return bound_s + (CANCEL_WAIT_S if plan.rate_qps > 0 else 0.0)


async def _say_draining(
    console: Console, watch: MeshWatch, longest_s: float, stop: asyncio.Event
) -> None:
    """Say, once it is to end, what is left to do and how long that may take."""
    await stop.wait()
    num_calls = watch.num_running + watch.num_waiting
    console.print(
        f"draining {counted(num_calls, 'call')}, up to {longest_s:.0f} s: running ones finish, "
        "waiting ones are handed back",
        style="dim",
    )


async def _stopped_within(wall_s: float, stop: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(wall_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True


@app.command()
def command(
    fleet: NamedFleetOption = None,
    engine: EngineOption = None,
    openai: OpenAIOption = None,
    model: ModelOption = "",
    policy: PolicyOption = None,
    alpha: AlphaOption = None,
    time_scale: TimeScaleOption = 1.0,
    rate: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Also drive generated queries through it, so many per workload second; 0: none.",
        ),
    ] = 0.0,
    with_kafka: Annotated[
        bool,
        typer.Option(
            "--with-kafka",
            help="Start a real Apache Kafka that clients can reach; needs Java 17 and Maven.",
        ),
    ] = False,
    kafka: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Run the services as processes on this Kafka; goes with --redis.",
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Their Redis, redis://HOST:PORT/DB; goes with --kafka."),
    ] = None,
    dispatchers: Annotated[
        int, typer.Option(min=1, max=64, help="With --kafka: how many dispatcher processes.")
    ] = 2,
    db: AgentDatabasesOption = None,
    gateway: GatewayOption = True,
    port: PortOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Run a whole mesh on this machine until Ctrl-C, with a live view.

    By default everything runs in this process: an in-memory broker, an embedded Valkey, a
    dispatcher, a tuner, a gateway and one worker with a simulated engine per instance of the
    fleet. With --kafka and --redis the services run as separate processes on those servers.
    --engine llamacpp and --openai URL put it in front of real engines, --fleet then names what
    `hexflow profile` wrote of them.
    """
    configure_logs(verbose=verbose)
    if with_kafka and kafka is not None:
        raise ConfigError("--with-kafka starts a Kafka, --kafka names one: use one of them")
    if (kafka is None) != (redis is None):
        raise ConfigError("--kafka and --redis go together: the services need both")
    if db and kafka is not None:
        raise ConfigError("--db goes without --kafka; there: python -m services.text2sql")
    plan = UpPlan(
        fleet=fleet or DEFAULT_FLEET,
        policy=policy or DEFAULT_POLICY,
        alpha=alpha if alpha is not None else DEFAULT_ALPHA,
        time_scale=time_scale,
        with_kafka=with_kafka,
        settings=(
            mesh_settings(kafka=kafka, redis=redis, time_scale=time_scale) if kafka else None
        ),
        dispatchers=dispatchers,
        rate_qps=rate,
        engines=choice_of(engine, openai, fleet=fleet, model=model),
        databases=databases_named(db or ()),
        gateway_port=port_of(wanted=gateway, port=port),
    )
    if kafka and plan.engines is not None and plan.engines.engine == "vllm":
        raise ConfigError("with --kafka start workers with WORKER_ENGINE=vllm: one vLLM each")
    if plan.engines is not None and time_scale != 1:
        raise ConfigError("real engines run in real time: --time-scale goes with simulated ones")
    make_policy(plan.policy, plan.alpha)
    if plan.gateway_port is not None and not kafka:
        gateway_of_environment()  # says what is wrong before anything is started
    check_databases(plan.databases)
    run_until_stopped(lambda stop: up(plan, stderr_console(), stop))
