"""The whole mesh in one process: every service on one event loop, one broker, one state store.

The broker is in memory unless another is given, so only this process can reach it. The state store
is a real Valkey, so the same scripts run as in production. Engines are simulated by default.

The only module of the command line that runs the other services.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.cli.ending import Ending
from services.cli.real_engines import OpenEngine
from services.cli.session import MeshAccess
from services.cli.virtual_time import VirtualTimeLoop
from services.dispatcher.app import build_dispatcher
from services.dispatcher.params import DispatcherParams
from services.gateway.app import build_gateway
from services.gateway.gateway import Gateway
from services.gateway.metrics import GatewayMetrics
from services.gateway.params import GatewayParams
from services.gateway.server import listener
from services.gateway.settings import GatewaySettings
from services.text2sql.app import build_agent
from services.text2sql.params import AgentParams
from services.tuner.app import build_tuner, replay_processes
from services.tuner.params import TunerParams
from services.tuner.replay import ProcessReplay
from services.worker.app import build_worker
from services.worker.params import WorkerParams
from shared.adapters.clock import SystemClock
from shared.adapters.embedded_redis import EmbeddedRedis
from shared.adapters.memory_broker import MemoryBroker
from shared.adapters.memory_store import MemoryStore
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.topics import Topics
from shared.domain.instance import InstanceSpec
from shared.errors import ConfigError, TransientError
from shared.ports import Broker, Clock, StateStore
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.settings import load
from shared.runtime.tuning_journal import Journal, unheard
from shared.scheduling.policies import DEFAULT_ALPHA, DEFAULT_POLICY, make_policy
from shared.scheduling.tuning import TuningRules

READY_WITHIN_S = 30.0
POLL_S = 0.02
STOP_SLACK_S = 3.0
LEAST_STOP_S = 0.5

Serve = Callable[[asyncio.Event], Awaitable[None]]
log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class EmbeddedParams:
    """How to run an embedded mesh."""

    fleet: tuple[InstanceSpec, ...]
    policy: str = DEFAULT_POLICY
    alpha: float = DEFAULT_ALPHA
    time_scale: float = 1.0
    """Mesh seconds per wall second."""
    admission: bool = False
    """Turn away queries that cannot be done in time; policies are compared without it."""
    tunes: bool = True
    """Whether a tuner runs too."""
    tuner: TunerParams | None = None
    """When and how it acts; None: as a tuner process would by default."""
    journal: Journal = unheard
    """Is told every decision of the tuner."""
    drain_s: float = 10.0
    """Longest time running calls get to finish at the end, wall seconds; the whole end takes at
    most about 5 s more."""
    open_engine: OpenEngine = SimulatedEngine.open
    """What runs an instance's calls."""
    agent: AgentParams | None = None
    """How a Text-to-SQL agent behaves; None: none runs."""
    gateway: GatewayParams | None = None
    """How a gateway behaves; None: none runs."""
    gateway_address: tuple[str, int] = ("127.0.0.1", 0)
    """Where it listens; port 0: a free one."""

    def __post_init__(self) -> None:
        make_policy(self.policy, self.alpha)  # says what is wrong before anything is started


@dataclass(frozen=True, kw_only=True)
class ServiceProbe:
    """What one service of the mesh counts, and whether it is ready."""

    metrics: Metrics
    health: Health


@dataclass(frozen=True, kw_only=True)
class EmbeddedMesh(MeshAccess):
    """A running mesh."""

    params: EmbeddedParams
    state_url: str
    """Where its state store listens."""
    state_pid: int
    """Process id of its state store."""
    ending: Ending
    """How long its end may take, all services together."""
    services: dict[str, ServiceProbe] = field(default_factory=dict)
    engines: dict[str, SimulatedEngine] = field(default_factory=dict)
    """instance_id -> its simulated engine, to make it misbehave."""
    gateways: dict[str, Gateway] = field(default_factory=dict)
    """URL -> the gateway that is served there."""

    @property
    def gateway_url(self) -> str:
        """Where its gateway is served; empty without one."""
        return next(iter(self.gateways), "")


@asynccontextmanager
async def open_embedded(params: EmbeddedParams) -> AsyncIterator[EmbeddedMesh]:
    """Run a mesh on the in-memory broker for as long as the block lasts."""
    clock = SystemClock(time_scale=params.time_scale)
    async with open_mesh_on(MemoryBroker(clock), clock, params) as mesh:
        yield mesh


@asynccontextmanager
async def open_in_virtual_time(params: EmbeddedParams) -> AsyncIterator[EmbeddedMesh]:
    """Run a mesh on a `VirtualTimeLoop`: time jumps whenever all services wait."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        raise TypeError("a mesh in virtual time needs a VirtualTimeLoop")
    clock = SystemClock(time_scale=params.time_scale, monotonic=loop.time)
    broker = MemoryBroker(clock)
    async with AsyncExitStack() as stack:
        with loop.held():  # servers and processes start in real time
            mesh = await stack.enter_async_context(
                open_mesh_on(broker, clock, params, wrap=lambda _: MemoryStore())
            )
        try:
            yield mesh
        finally:
            stack.enter_context(loop.held())


@asynccontextmanager
async def open_mesh_on(
    broker: Broker,
    clock: Clock,
    params: EmbeddedParams,
    topics: Topics | None = None,
    wrap: Callable[[StateStore], StateStore] = lambda store: store,
) -> AsyncIterator[EmbeddedMesh]:
    """Run a mesh's services in this process on a given broker.

    Returns once every service is ready. At the end the dispatcher stops first, then the workers
    hand back what waits and finish what runs, all within one bound. Whoever leaves the block with
    an error, or is cancelled, ends it at once.
    """
    topics = topics or Topics()
    await broker.create_topics(topics.specs())
    async with (
        EmbeddedRedis.open() as redis,
        RedisStore.open(RedisParams(url=redis.url)) as store,
        AsyncExitStack() as stack,
    ):
        mesh = EmbeddedMesh(
            broker=broker,
            clock=clock,
            topics=topics,
            params=params,
            state_url=redis.url,
            state_pid=redis.pid or 0,
            ending=Ending(params.drain_s + STOP_SLACK_S),
        )
        await stack.enter_async_context(_workers(mesh, wrap(store)))
        if params.tunes:
            await stack.enter_async_context(_tuner(mesh))
        await stack.enter_async_context(_dispatcher(mesh))
        if params.agent is not None:
            await stack.enter_async_context(_agent(mesh, store, params.agent))
        if params.gateway is not None:
            address = params.gateway_address
            gateway = serving_gateway(mesh, store, params.gateway, address, params.drain_s)
            await stack.enter_async_context(gateway)
        yield mesh
        mesh.ending.begin()


@asynccontextmanager
async def _workers(mesh: EmbeddedMesh, store: StateStore) -> AsyncIterator[None]:
    async with AsyncExitStack() as engines:
        services: dict[str, Serve] = {}
        for spec in mesh.params.fleet:
            engine = await engines.enter_async_context(mesh.params.open_engine(spec, mesh.clock))
            if isinstance(engine, SimulatedEngine):
                mesh.engines[spec.instance_id] = engine
            name = f"worker {spec.instance_id}"
            probe = _probe(mesh, name, Metrics("worker", spec.instance_id))
            worker = build_worker(
                broker=mesh.broker,
                store=store,
                engine=engine,
                clock=mesh.clock,
                topics=mesh.topics,
                params=WorkerParams(
                    instance_id=spec.instance_id,
                    capacity=engine.spec.max_num_seqs,
                    drain_s=mesh.params.drain_s,
                ),
                metrics=probe.metrics,
                health=probe.health,
            )
            services[name] = worker.serve
        async with _serving(mesh, services):
            yield


@asynccontextmanager
async def _tuner(mesh: EmbeddedMesh) -> AsyncIterator[None]:
    probe = _probe(mesh, "tuner", Metrics("tuner"))
    with replay_processes() as executor:
        tuner = build_tuner(
            broker=mesh.broker,
            replay=ProcessReplay(executor),
            clock=mesh.clock,
            topics=mesh.topics,
            params=mesh.params.tuner
            or TunerParams(policy=mesh.params.policy, initial_alpha=mesh.params.alpha),
            metrics=probe.metrics,
            health=probe.health,
            journal=mesh.params.journal,
        )
        async with _serving(mesh, {"tuner": tuner.serve}):
            yield


@asynccontextmanager
async def _dispatcher(mesh: EmbeddedMesh) -> AsyncIterator[None]:
    probe = _probe(mesh, "dispatcher", Metrics("dispatcher"))
    dispatcher = build_dispatcher(
        broker=mesh.broker,
        clock=mesh.clock,
        topics=mesh.topics,
        params=DispatcherParams(
            dispatcher_id="embedded",
            policy=mesh.params.policy,
            alpha=mesh.params.alpha,
            admission=mesh.params.admission,
        ),
        metrics=probe.metrics,
        health=probe.health,
    )
    async with _serving(mesh, {"dispatcher": dispatcher.serve}):
        yield


@asynccontextmanager
async def serving_gateway(
    mesh: EmbeddedMesh,
    store: StateStore,
    params: GatewayParams,
    address: tuple[str, int],
    drain_s: float,
) -> AsyncIterator[Gateway]:
    """Serve a gateway of the mesh while the block runs."""
    with listener(*address) as sock:
        host, port = sock.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        metrics = GatewayMetrics()
        name = f"gateway {params.gateway_id}"
        gateway = build_gateway(
            broker=mesh.broker,
            store=store,
            clock=mesh.clock,
            topics=mesh.topics,
            params=params,
            metrics=metrics,
            health=_probe(mesh, name, metrics).health,
            drain_s=drain_s,
        )

        async def serve(stop: asyncio.Event) -> None:
            await gateway.serve(sock, stop)

        async with _serving(mesh, {name: serve}):
            mesh.gateways[url] = gateway
            yield gateway


@asynccontextmanager
async def _agent(mesh: EmbeddedMesh, store: StateStore, params: AgentParams) -> AsyncIterator[None]:
    probe = _probe(mesh, "text2sql", Metrics("text2sql"))
    agent = build_agent(
        broker=mesh.broker,
        store=store,
        clock=mesh.clock,
        topics=mesh.topics,
        params=params,
        metrics=probe.metrics,
        health=probe.health,
    )
    async with _serving(mesh, {"text2sql": agent.serve}):
        yield


def _probe(mesh: EmbeddedMesh, name: str, metrics: Metrics) -> ServiceProbe:
    probe = ServiceProbe(metrics=metrics, health=Health(mesh.clock))
    mesh.services[name] = probe
    return probe


@asynccontextmanager
async def _serving(mesh: EmbeddedMesh, services: Mapping[str, Serve]) -> AsyncIterator[None]:
    """Run services until the block ends; they are ready when it begins."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_run(serve, stop), name=name) for name, serve in services.items()
        ]
        await _ready({name: mesh.services[name].health for name in services})
        yield  # an error in the block ends the group, and so the services, without a drain
        stop.set()
        _, late = await asyncio.wait(tasks, timeout=max(LEAST_STOP_S, mesh.ending.left_s))
        for task in late:
            log.info("service_stopped_late", service=task.get_name())
            mesh.ending.late.append(task.get_name())
            task.cancel()


async def _run(serve: Serve, stop: asyncio.Event) -> None:
    await serve(stop)


async def _ready(waiting: dict[str, Health]) -> None:
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            while any(h.unready_causes() for h in waiting.values()):  # noqa: ASYNC110 - no event
                await asyncio.sleep(POLL_S)
    except TimeoutError as exc:
        causes = {name: health.unready_causes() for name, health in waiting.items()}
        text = "; ".join(f"{name}: {cause}" for name, cause in causes.items() if cause)
        raise TransientError(f"the mesh was not ready within {READY_WITHIN_S:g} s: {text}") from exc


def tuner_params(*, min_queries: int, **named: Any) -> TunerParams:
    """Return parameters of the embedded tuner, see `TunerParams`."""
    rules = TuningRules(min_queries=min_queries)
    return TunerParams(min_queries=min_queries, rules=rules, **named)


def gateway_params(**named: Any) -> GatewayParams:
    """Return how a gateway behaves, see `GatewayParams`."""
    return GatewayParams(**named)


def gateway_of_environment() -> GatewayParams:
    """Return how a gateway behaves by the `GATEWAY_*` variables, its defaults elsewhere.

    Raises:
        ConfigError: One is misspelt or wrong, or says where to listen, which the command does.
    """
    settings = load(GatewaySettings)
    named = {name: getattr(settings, name) for name in settings.model_fields_set}
    if named.keys() & {"host", "port"}:
        raise ConfigError(
            "GATEWAY_HOST and GATEWAY_PORT are for python -m services.gateway: a mesh in one "
            "process serves on this machine only, on --port"
        )
    for of_processes in ("allow_anonymous", "linger_s"):
        named.pop(of_processes, None)
    return gateway_params(**named)
