"""The mesh as separate processes on this machine, on a given Kafka and Redis.

Each service is `python -m services.<name>` with its settings in the environment, exactly as in
production. The children never outlive this process (`shared.adapters.local_process`).
"""

import asyncio
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from services.cli.ending import Ending
from services.cli.remote import NAMED_BY_OPTION, connect
from services.cli.session import MeshAccess
from shared.adapters.clock import SystemClock
from shared.adapters.local_process import LOOPBACK, LocalProcess, free_port
from shared.adapters.redis_store import RedisStore
from shared.domain.instance import InstanceSpec
from shared.errors import ConfigError, TransientError
from shared.runtime.connections import redis_params
from shared.runtime.settings import MeshSettings
from shared.scheduling.policies import DEFAULT_POLICY
from shared.simulation.fleets import dump_fleet

READY_WITHIN_S = 60.0
STOP_WITHIN_S = 25.0
AT_ONCE_S = 2.0
PROBE_TIMEOUT_S = 2.0


class ProcessesParams(msgspec.Struct, frozen=True, kw_only=True):
    """What to start.

    Attributes:
        fleet: One worker process each.
        policy: The dispatchers' policy.
        alpha: Its initial α; None: the dispatchers' default.
        dispatchers: How many.
        tunes: Whether a tuner runs too.
        log_level: Of every process.
        extra: Further environment variables of every process.
        fault_folder: Where each simulated engine looks for `<instance>.fault`; None: nowhere.
        worker_variables: Instance -> further environment variables of its worker.
        gateway_ports: Where gateways are served on loopback, a process each.
        agents: How many Text-to-SQL agents.
        databases: What they know: name -> address.
    """

    fleet: tuple[InstanceSpec, ...]
    policy: str = DEFAULT_POLICY
    alpha: float | None = None
    dispatchers: int = 2
    tunes: bool = True
    log_level: str = "INFO"
    extra: dict[str, str] = {}
    fault_folder: Path | None = None
    worker_variables: dict[str, dict[str, str]] = {}
    gateway_ports: tuple[int, ...] = ()
    agents: int = 0
    databases: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class ProcessMesh(MeshAccess):
    """A mesh of processes that this one started."""

    log_dir: Path
    """Where the processes write their logs, `<name>.log`."""
    processes: dict[str, LocalProcess]
    ports: dict[str, int] = field(default_factory=dict)
    """Name -> port of its probes and metrics on loopback."""

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id of those that run."""
        return {name: one.pid for name, one in self.processes.items() if one.pid is not None}

    def ended(self) -> dict[str, str]:
        """Return the processes that ended by themselves: name -> the end of its log."""
        return {
            name: process.log_tail(3)
            for name, process in self.processes.items()
            if not process.is_running
        }

    def metrics(self, name: str) -> str:
        """Return a process's metrics as Prometheus text.

        Raises:
            OSError: It does not answer.
        """
        return _get(self.ports[name], "metrics")

    def is_ready(self, name: str) -> bool:
        """Return whether a process says that it is ready; blocks for a moment."""
        try:
            return _is_ready(self.ports[name])
        except OSError:
            return False

    def stop_services(self) -> None:
        """Stop every process in order: gateways first, workers last; blocks."""
        _stop_all(list(self.processes.values()), STOP_WITHIN_S)

    def stop_at_once(self) -> None:
        """Stop every process, all at the same time and with little patience; blocks."""
        processes = list(self.processes.values())
        with ThreadPoolExecutor(max_workers=max(1, len(processes))) as pool:
            list(pool.map(lambda one: one.stop(AT_ONCE_S), processes))


@asynccontextmanager
async def open_processes(
    settings: MeshSettings, params: ProcessesParams, log_dir: Path | None = None
) -> AsyncIterator[ProcessMesh]:
    """Run a mesh's services as processes for as long as the block lasts.

    Creates the topics first; returns when every service is ready.

    Args:
        settings: Kafka, Redis, topics and time scale.
        params: What to start.
        log_dir: Where the processes write their logs; None: a temporary folder that stays.

    Raises:
        BrokerUnavailable: Kafka does not answer.
        StateUnavailable: Redis does not answer.
        ConfigError: One of them refuses the credentials.
        TransientError: A service did not become ready; the message has the end of its log.
    """
    folder = log_dir or Path(tempfile.mkdtemp(prefix="hexflow-logs-"))
    async with connect(settings, "hexflow-up", remedy=NAMED_BY_OPTION) as broker:
        async with RedisStore.open(redis_params(settings)):
            pass  # better told here than by the log of a worker that did not start
        topics = settings.topics.topics()
        await broker.create_topics(topics.specs())
        mesh = ProcessMesh(
            broker=broker,
            clock=SystemClock(time_scale=settings.time_scale),
            topics=topics,
            log_dir=folder,
            processes={},
        )
        try:
            for command in service_commands(params, folder):
                _start(mesh, settings, params, command)
            await asyncio.to_thread(_wait_ready, mesh)
            yield mesh
            await asyncio.to_thread(mesh.stop_services)
        finally:  # after a cancellation: whoever stops twice does not want to wait
            await asyncio.to_thread(mesh.stop_at_once)


class ServiceCommand(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the mesh.

    Attributes:
        name: Unique; the service first.
        module: What `python -m` runs.
        variables: Its own settings, as environment variables.
    """

    name: str
    module: str
    variables: dict[str, str]


def service_commands(params: ProcessesParams, folder: Path) -> list[ServiceCommand]:
    """Return every process to start, workers first.

    Args:
        params: What to start.
        folder: Where the instances' descriptions are written.
    """
    found = [
        ServiceCommand(
            name=f"worker-{spec.instance_id}",
            module="services.worker",
            variables={
                **_worker(spec, folder, params.fault_folder),
                **params.worker_variables.get(spec.instance_id, {}),
            },
        )
        for spec in params.fleet
    ]
    if params.tunes:
        found.append(_tuner(params))
    found += [_dispatcher(params, f"dispatcher-{index}") for index in range(params.dispatchers)]
    found += [_agent(params, f"text2sql-{index}") for index in range(params.agents)]
    return found + [
        _gateway(f"gateway-{index}", port) for index, port in enumerate(params.gateway_ports)
    ]


def _tuner(params: ProcessesParams) -> ServiceCommand:
    own = {"TUNER_TUNER_ID": "tuner-0", "TUNER_POLICY": params.policy}
    if params.alpha is not None:
        own["TUNER_INITIAL_ALPHA"] = repr(params.alpha)
    return ServiceCommand(name="tuner-0", module="services.tuner", variables=own)


def _dispatcher(params: ProcessesParams, name: str) -> ServiceCommand:
    own = {"DISPATCHER_POLICY": params.policy, "DISPATCHER_DISPATCHER_ID": name}
    if params.alpha is not None:
        own["DISPATCHER_ALPHA"] = repr(params.alpha)
    return ServiceCommand(name=name, module="services.dispatcher", variables=own)


def _agent(params: ProcessesParams, name: str) -> ServiceCommand:
    own = {"TEXT2SQL_AGENT_ID": name, "TEXT2SQL_DATABASES": json.dumps(params.databases)}
    return ServiceCommand(name=name, module="services.text2sql", variables=own)


def _gateway(name: str, port: int) -> ServiceCommand:
    own = {"GATEWAY_GATEWAY_ID": name, "GATEWAY_PORT": str(port)}
    return ServiceCommand(name=name, module="services.gateway", variables=own)


def _worker(spec: InstanceSpec, folder: Path, fault_folder: Path | None) -> dict[str, str]:
    path = folder / f"{spec.instance_id}.toml"
    path.write_text(dump_fleet((spec,)))
    own = {"WORKER_INSTANCE_ID": spec.instance_id, "WORKER_FLEET_FILE": str(path)}
    if fault_folder is not None:
        own["WORKER_FAULT_FILE"] = str(fault_folder / f"{spec.instance_id}.fault")
    return own


def mesh_variables(settings: MeshSettings) -> dict[str, str]:
    """Return the variables that give a child process these mesh-wide settings.

    Everything that is not an option of the command line comes from this process's own
    environment, which children inherit.
    """
    return {
        "HEXFLOW_KAFKA__BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers,
        "HEXFLOW_REDIS__URL": settings.redis.url,
        "HEXFLOW_TIME_SCALE": repr(settings.time_scale),
        "HEXFLOW_TOPICS__PREFIX": settings.topics.prefix,
    }


def _start(
    mesh: ProcessMesh, settings: MeshSettings, params: ProcessesParams, command: ServiceCommand
) -> None:
    port = free_port()
    environ = {
        **os.environ,
        **mesh_variables(settings),
        "HEXFLOW_LOG__LEVEL": params.log_level,
        "HEXFLOW_PROBES__PORT": str(port),
        **command.variables,
        **params.extra,
    }
    process = LocalProcess(
        command.name,
        [sys.executable, "-m", command.module],
        mesh.log_dir / f"{command.name}.log",
        environ,
    )
    mesh.processes[command.name] = process
    mesh.ports[command.name] = port
    process.start()


def _wait_ready(mesh: ProcessMesh) -> None:
    for name, process in mesh.processes.items():
        port = mesh.ports[name]
        try:
            process.wait_until(partial(_is_ready, port), READY_WITHIN_S)
        except ConfigError as exc:
            raise TransientError(str(exc)) from exc


def _is_ready(port: int) -> bool:
    return bool(_get(port, "ready"))


def _get(port: int, path: str) -> str:
    # Loopback and a path of our own; an answer other than 200 raises an OSError.
    url = f"http://{LOOPBACK}:{port}/{path}"
    with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as answer:
        return str(answer.read().decode())


def _stop_all(processes: Sequence[LocalProcess], bound_s: float) -> None:
    """Stop what asks first and workers last, those of one kind at the same time.

    Args:
        processes: All of them.
        bound_s: Longest time for all kinds together, wall seconds; then they are killed.
    """
    ending = Ending(bound_s)
    ending.begin()
    with ThreadPoolExecutor(max_workers=max(1, len(processes))) as pool:
        for kind in ("gateway", "text2sql", "dispatcher", "tuner", "worker"):
            chosen = [one for one in processes if one.name.startswith(kind)]
            grace_s = max(AT_ONCE_S, ending.left_s)
            list(pool.map(partial(LocalProcess.stop, grace_s=grace_s), chosen))
