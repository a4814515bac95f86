"""One chaos run: servers, mesh, producer, faults, audit."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from services.cli.capacity import capacity_qps
from services.cli.chaos.audit import Audit, audit
from services.cli.chaos.faults import (
    PRODUCER,
    SERVER_FAULTS,
    Fault,
    FaultKind,
    duration_s,
    make_plan,
)
from services.cli.chaos.journal import Journal, JournalledTally, journalled_client, read_journal
from services.cli.chaos.ledger import Ledger, follow, raw_partitions, read_all
from services.cli.chaos.producer import ProducerProcess
from services.cli.chaos.servers import Servers, own_servers
from services.cli.chaos.supervisor import Supervisor
from services.cli.console import stderr_console
from services.cli.driver import ReplayDriver, mesh_query_id
from services.cli.options import mesh_settings
from services.cli.processes import ProcessesParams, ProcessMesh, open_processes, service_commands
from services.cli.progress import live_progress
from services.cli.remote import connect
from services.cli.session import new_run_id
from services.cli.tally import Tally
from services.cli.workload import WorkloadParams, build_workload, generated, load_fleet
from shared.contracts.codec import mint_request_id
from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.runtime.settings import MeshSettings

STALL_WALL_S = 8.0
"""Of the workers: time without a result after which a generation may count as failed."""
DISPATCHERS = 2
LATE_S = 5.0
MOST_LOAD = 0.6
"""Of the estimated capacity: a quarter of the fleet is often down."""
SAMPLE_QUERIES = 200

Report = Callable[[str], None]


class ChaosPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do.

    Attributes:
        seed: Of the faults, the workload and everything drawn.
        num_queries: How many queries.
        kinds: Which faults.
        short: One victim per kind of fault.
        fleet: Name or file of the fleet.
        time_scale: Mesh seconds per wall second.
        capacity: Most calls an engine is given at a time, so that others wait; None: its own.
        patience_s: How long, after the last fault, the next query may take to end, wall seconds.
        settings: Kafka and Redis of somebody else's; None: own ones.
        folder: Where logs, the journal and the servers' data go.
        quiet: Show no progress.
        admission: Whether queries that cannot be done in time are turned away.
    """

    seed: int
    num_queries: int
    kinds: tuple[FaultKind, ...]
    short: bool
    fleet: str
    time_scale: float
    capacity: int | None
    patience_s: float
    settings: MeshSettings | None
    folder: Path
    quiet: bool = False
    admission: bool = False


class ChaosResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        audit: The reconciliation.
        left_out: Faults that could not be injected here.
        unexpected: Processes that ended by themselves.
        num_repeated: Kills repeated because nothing was in flight on the victim.
        wall_s: Length of the run, wall seconds.
        interrupted: Whether the user ended it early.
    """

    audit: Audit
    left_out: tuple[str, ...]
    unexpected: tuple[str, ...]
    num_repeated: int
    wall_s: float
    interrupted: bool = False

    def to_json(self, plan: ChaosPlan) -> dict[str, Any]:
        """Return the command's JSON object."""
        return {
            "seed": plan.seed,
            "time_scale": plan.time_scale,
            "admission": plan.admission,
            **self.audit.to_json(),
            "holds": self.audit.holds,
            "left_out": list(self.left_out),
            "unexpected_exits": list(self.unexpected),
            "repeated": self.num_repeated,
            "wall_s": round(self.wall_s, 1),
            "interrupted": self.interrupted,
        }


async def chaos(plan: ChaosPlan, report: Report, stop: asyncio.Event) -> ChaosResult:
    """Carry out a run and return what came of it.

    Args:
        plan: What to do.
        report: Told what happens, in a line each.
        stop: Set to end early: no further fault, open queries are given up.

    Raises:
        ConfigError: A value is wrong, or a server cannot be started here.
        MeshError: The mesh does not start, or does not come back.
    """
    started_s = time.monotonic()
    fleet = load_fleet(plan.fleet)
    kinds = [k for k in plan.kinds if plan.settings is None or k not in SERVER_FAULTS]
    names = [one.name for one in service_commands(_processes(plan, fleet), plan.folder)]
    enough_s = least_s(plan, fleet)
    faults = make_plan(plan.seed, kinds, names, short=plan.short, least_s=enough_s)
    if not faults:
        raise ConfigError("none of these faults may be done to servers that others use")
    workload = build_workload(_workload(plan, duration_s(faults)), fleet)
    async with _servers(plan, report) as servers:
        run = _Run(plan, fleet, workload.queries, servers, report)
        supervisor = await run.disturb(faults, stop)
        report("auditing")
        found = await run.audit(supervisor)
    return ChaosResult(
        audit=found,
        left_out=tuple(kind for kind in plan.kinds if kind not in kinds),
        unexpected=tuple(supervisor.unexpected),
        num_repeated=supervisor.num_repeated,
        wall_s=time.monotonic() - started_s,
        interrupted=stop.is_set() and not run.is_impatient,
    )


@asynccontextmanager
async def _servers(plan: ChaosPlan, report: Report) -> AsyncIterator[Servers]:
    if plan.settings is not None:
        address, url = plan.settings.kafka.bootstrap_servers, plan.settings.redis.url
        yield Servers(bootstrap=address, redis_url=url)
        return
    async with own_servers(plan.folder, report) as servers:
        yield servers


def _processes(plan: ChaosPlan, fleet: tuple[InstanceSpec, ...]) -> ProcessesParams:
    extra = {
        "DISPATCHER_ADMISSION": str(plan.admission).lower(),  # without it late is only late
        "WORKER_STALL_FLOOR_S": repr(STALL_WALL_S * plan.time_scale),
        "WORKER_STALL_WALL_S": repr(STALL_WALL_S),
        "WORKER_STALL_FACTOR": "4",
    }
    if plan.capacity is not None:
        extra["WORKER_CAPACITY"] = str(plan.capacity)
    return ProcessesParams(
        fleet=fleet, dispatchers=DISPATCHERS, extra=extra, fault_folder=plan.folder
    )


def least_s(plan: ChaosPlan, fleet: Sequence[InstanceSpec]) -> float:
    """Return how long the queries have to go on arriving so that the mesh can do them.

    What is lost to a mesh that is asked for more than it can do proves nothing about faults.
    """
    most = plan.capacity or max(spec.max_num_seqs for spec in fleet)
    held = [
        msgspec.structs.replace(spec, max_num_seqs=min(most, spec.max_num_seqs)) for spec in fleet
    ]
    can_qps = capacity_qps(generated(SAMPLE_QUERIES, "natural", plan.seed), held)
    return plan.num_queries / (MOST_LOAD * can_qps * plan.time_scale)


def _workload(plan: ChaosPlan, faults_s: float) -> WorkloadParams:
    """Return queries that go on arriving for about as long as faults happen."""
    rate = plan.num_queries / ((faults_s + LATE_S) * plan.time_scale)
    return WorkloadParams(mode="natural", limit=plan.num_queries, rate_qps=rate, seed=plan.seed)


class _Run:
    """The run itself, from the first process to the last record.

    Args:
        plan: What to do.
        fleet: One worker each.
        queries: What the producer asks.
        servers: Kafka and Redis.
        report: Told what happens.
    """

    def __init__(
        self,
        plan: ChaosPlan,
        fleet: tuple[InstanceSpec, ...],
        queries: Sequence[TraceQuery],
        servers: Servers,
        report: Report,
    ) -> None:
        settings = mesh_settings(
            kafka=servers.bootstrap, redis=servers.redis_url, time_scale=plan.time_scale
        )
        own = {"prefix": f"chaos-{secrets.token_hex(3)}."}
        self._settings = settings.model_copy(
            update={"topics": settings.topics.model_copy(update=own)}
        )
        self._plan = plan
        self._fleet = fleet
        self._queries = queries
        self._servers = servers
        self._report = report
        self._run_id = new_run_id(plan.seed)
        self._journal_path = plan.folder / "journal.jsonl"
        self._seen = self._ledger()
        self.is_impatient = False

    async def disturb(self, faults: Sequence[Fault], stop: asyncio.Event) -> Supervisor:
        """Drive the queries through a mesh that everything happens to."""
        self._report("starting the mesh")
        params = _processes(self._plan, self._fleet)
        async with (
            open_processes(self._settings, self._with_far(params), self._plan.folder) as mesh,
            self._following(mesh) as ledger,
        ):
            supervisor = Supervisor(mesh, ledger, self._servers, self._report)
            with Journal(self._journal_path) as journal:
                await self._produce(mesh, journal, supervisor, faults, stop)
        return supervisor

    def _with_far(self, params: ProcessesParams) -> ProcessesParams:
        """Let the last worker reach its servers through the proxies that can be cut."""
        far = dict(self._servers.far_variables)
        last = self._fleet[-1].instance_id
        return msgspec.structs.replace(params, worker_variables={last: far}) if far else params

    async def _produce(
        self,
        mesh: ProcessMesh,
        journal: Journal,
        supervisor: Supervisor,
        faults: Sequence[Fault],
        stop: asyncio.Event,
    ) -> None:
        """Ask a portion of the queries with every fault, however long the one before took."""
        tally, received = JournalledTally(journal), asyncio.Event()
        portions = _portions(self._queries, len(faults))
        async with (
            journalled_client(mesh, journal, partition=0) as client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(client.receive(received), name="receive-outcomes")
            asking: list[asyncio.Task[None]] = []

            def ask(number: int) -> None:
                driver = ReplayDriver(client, mesh.clock, tally, self._run_id)
                if faults[number].kind == "kill-producer":
                    work = self._ask_apart(portions[number], supervisor, stop)
                else:
                    work = driver.run(portions[number], stop)
                asking.append(group.create_task(work, name=f"ask-{number}"))

            striking = group.create_task(supervisor.carry_out(faults, ask), name="faults")
            side = (
                group.create_task(supervisor.watch_over(), name="watch-over"),
                group.create_task(self._end_on(stop, striking, journal), name="end-early"),
                group.create_task(self._lose_patience(striking, tally, stop), name="patience"),
            )
            async with live_progress(
                stderr_console(), "chaos", len(self._queries), tally, quiet=self._plan.quiet
            ):
                await asyncio.wait({striking})
                if asking:
                    await asyncio.wait(asking)
            for task in side:
                task.cancel()
            received.set()

    async def _ask_apart(
        self, queries: Sequence[TraceQuery], supervisor: Supervisor, stop: asyncio.Event
    ) -> None:
        """Ask queries by a process of their own, which a fault may kill."""
        producer = ProducerProcess(self._settings, self._run_id, queries, self._plan.folder)
        supervisor.producer = producer

        def on_ended(tail: str) -> None:
            supervisor.unexpected.append(PRODUCER)
            self._report(f"{PRODUCER} has ended by itself:\n{tail}")

        await producer.run(stop, on_ended)

    async def _end_on(
        self, stop: asyncio.Event, striking: asyncio.Task[None], journal: Journal
    ) -> None:
        """Write down when the run was ended early, and end the faults with it."""
        await stop.wait()
        journal.write("gave_up")
        striking.cancel()

    async def _lose_patience(
        self, striking: asyncio.Task[None], tally: Tally, stop: asyncio.Event
    ) -> None:
        """End the run when, after the last fault, no query has ended for too long."""
        await asyncio.wait({striking})
        num_ended = -1
        while tally.num_ended > num_ended:
            num_ended = tally.num_ended
            await asyncio.sleep(self._plan.patience_s)
        self._report("out of patience: what is still open counts as lost")
        self.is_impatient = True
        stop.set()

    @asynccontextmanager
    async def _following(self, mesh: ProcessMesh) -> AsyncIterator[Ledger]:
        """Keep a ledger up to date while the block runs."""
        ledger, done = self._seen, asyncio.Event()
        partitions = await raw_partitions(mesh.broker, mesh.topics, self._instances())
        async with (
            mesh.broker.partition_consumer(partitions, start="beginning") as consumer,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(follow(consumer, ledger, done), name="follow-topics")
            try:
                yield ledger
            finally:
                done.set()

    async def audit(self, supervisor: Supervisor) -> Audit:
        """Read everything there is, with the mesh at rest, and reconcile."""
        ledger = self._ledger()
        topics = self._settings.topics.topics()
        async with connect(self._settings, "hexflow-auditor") as broker:
            partitions = await raw_partitions(broker, topics, self._instances())
            async with broker.partition_consumer(partitions, start="beginning") as consumer:
                await read_all(consumer, ledger)
        ledger.loads = self._seen.loads  # the topic is compacted: read now it lacks old states
        entries = read_journal(self._journal_path)
        if supervisor.producer is not None:
            entries = sorted([*entries, *supervisor.producer.entries()], key=lambda one: one.at_s)
        return audit(entries, ledger, self._expected(), supervisor.injected)

    def _ledger(self) -> Ledger:
        return Ledger(self._settings.topics.topics(), self._run_id, self._plan.time_scale)

    def _instances(self) -> list[str]:
        return [spec.instance_id for spec in self._fleet]

    def _expected(self) -> dict[str, set[str]]:
        """Return every query's calls, from the workload itself."""
        return {
            (query_id := mesh_query_id(self._run_id, query.query_id)): {
                mint_request_id(query_id, stage.stage, stage.iteration, sibling)
                for stage in query.stages
                for sibling in range(len(stage.calls))
            }
            for query in self._queries
        }


def _portions(queries: Sequence[TraceQuery], count: int) -> list[list[TraceQuery]]:
    """Return the queries in so many portions, each with arrivals from its own beginning on."""
    ordered = sorted(queries, key=lambda query: query.arrival_s or 0.0)
    portions = []
    for index in range(count):
        part = ordered[index * len(ordered) // count : (index + 1) * len(ordered) // count]
        begin_s = (part[0].arrival_s or 0.0) if part else 0.0
        portions.append(
            [
                msgspec.structs.replace(query, arrival_s=(query.arrival_s or 0.0) - begin_s)
                for query in part
            ]
        )
    return portions
