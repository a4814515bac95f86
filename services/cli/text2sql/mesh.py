"""A mesh with a Text-to-SQL agent beside it: one in this process, or one that runs already.

The only module of the command line that runs the agent.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.cli.embedded import EmbeddedParams, open_embedded
from services.cli.real_engines import EngineChoice, Fleet, OpenEngine, open_real
from services.cli.remote import open_remote
from services.cli.session import MeshAccess
from services.cli.text2sql.databases import check_databases
from services.cli.workload import load_fleet
from services.text2sql.answering import Answering
from services.text2sql.desk import open_desk
from services.text2sql.params import AgentParams
from services.text2sql.samples.writing import Question
from services.text2sql.scripted.engine import ScriptedEngine
from services.text2sql.scripted.model import ScriptedModel
from shared.adapters.redis_store import RedisParams, RedisStore
from shared.contracts.messages import QueryRequest, QueryResult
from shared.contracts.query_events import QueryEvent, decode_event
from shared.contracts.topics import QUERY_RESULTS, STAGE_RESULTS
from shared.domain.instance import InstanceSpec
from shared.errors import ConfigError
from shared.ports import Clock, Engine, StateStore
from shared.runtime.connections import redis_params
from shared.runtime.settings import MeshSettings
from shared.sdk import agents_of, open_producer, open_questions, refusal_of

MAX_SCHEMA_TOKENS = 3_000
PROMPT_ROOM_TOKENS = 1_100
SCRIPTED_FLEET = "hetero-1"
CANCEL_WITHIN_S = 2.0
BESIDE_DRAIN_S = 5.0
TOMBSTONE_S = 60.0


class AgentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent runs, and with what.

    Attributes:
        databases: Name -> address; none: the agents of the mesh that runs already are asked.
        engines: Real engines; None: the scripted model, or with `settings` the mesh's own.
        questions: What the scripted model knows.
        settings: A mesh that runs already; None: one in this process.
        model: Model to ask for; empty: what the engines serve.
        workflow_files: Further workflow definitions.
        time_scale: Mesh seconds per wall second, of a scripted mesh.
        schema_tokens: Most tokens of schema in a prompt; 0: what fits the model's context.
        max_open: Most questions under way.
    """

    databases: dict[str, str]
    engines: EngineChoice | None = None
    questions: tuple[Question, ...] = ()
    settings: MeshSettings | None = None
    model: str = ""
    workflow_files: tuple[str, ...] = ()
    time_scale: float = 1.0
    schema_tokens: int = 0
    max_open: int = 32


AgentDatabasesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]URL",
        help="Also run a Text-to-SQL agent that knows this database (or a sample: bazaar, league); "
        "may be given several times.",
    ),
]
Show = Callable[[QueryEvent], None]
AskFunction = Callable[[QueryRequest, Show], Awaitable[QueryResult]]


def unseen(event: QueryEvent) -> None:
    """Show nothing."""
    del event


@asynccontextmanager
async def open_agent_mesh(plan: AgentPlan, console: Console) -> AsyncIterator[AskFunction]:
    """Have a mesh that answers questions for as long as the block lasts.

    Without `settings` everything runs in this process, the agent included. With them the mesh runs
    already: a database that is named by its address is asked by an agent in this process, which
    takes no questions but this command's; one that is named otherwise, by the agents of that mesh.

    Yields:
        What asks a question, shows its events and returns its result.

    Raises:
        ConfigError: A database, model or file cannot be used.
        MeshError: The mesh cannot be reached.
    """
    await asyncio.to_thread(check_databases, plan.databases)  # before what takes long
    async with AsyncExitStack() as stack:
        if plan.settings is None:
            access, store = await _embedded(plan, console, stack)
            yield await _asking_agents(access, store, stack)
            return
        remote = await stack.enter_async_context(open_remote(plan.settings, None))
        store = await stack.enter_async_context(RedisStore.open(redis_params(plan.settings)))
        if plan.databases:
            yield await _asking_here(remote, _params(plan, remote.fleet), stack)
        else:
            yield checked(await _asking_agents(remote, store, stack), store)


def _params(plan: AgentPlan, fleet: Sequence[InstanceSpec]) -> AgentParams:
    model = plan.model or fleet[0].model
    is_real = plan.engines is not None or plan.settings is not None
    params = agent_params(plan.databases, fleet, model=model, is_real=is_real)
    return replace(
        params,
        workflow_files=plan.workflow_files,
        schema_tokens=plan.schema_tokens or params.schema_tokens,
        max_open=plan.max_open,
        drain_s=0.0,
    )


def agent_params(
    databases: dict[str, str], fleet: Sequence[InstanceSpec], *, model: str = "", is_real: bool
) -> AgentParams:
    """Return how an agent behaves in front of a fleet.

    Args:
        databases: Name -> address.
        fleet: What serves.
        model: Model of questions that name none; empty: the first instance's.
        is_real: Whether the engines are real, so that a JSON schema binds those that offer it.
    """
    model = model or fleet[0].model
    return AgentParams(
        agent_id=f"cli-{secrets.token_hex(4)}",
        model=model,
        databases=databases,
        schema_tokens=_schema_tokens(fleet, model),
        is_structured=is_real and _offers_structure(fleet, model),
    )


async def _asking_agents(
    access: MeshAccess, store: StateStore, stack: AsyncExitStack
) -> AskFunction:
    """Return what asks the mesh's agents, through `queries`."""
    count = await access.broker.partitions_of(access.topics.name(QUERY_RESULTS))
    questions = await stack.enter_async_context(
        open_questions(
            access.broker,
            access.topics,
            access.clock,
            partition=secrets.randbelow(count),
            store=store,
        )
    )

    async def ask(request: QueryRequest, show: Show) -> QueryResult:
        asked = await questions.ask(request)
        try:
            if request.events:
                async for event in asked.events():
                    show(event)
            return await asked.result()
        except asyncio.CancelledError:
            await _take_back(access, request, questions.cancel)
            raise

    return ask


def checked(ask: AskFunction, store: StateStore) -> AskFunction:
    """Return what refuses a question that none of the mesh's agents could answer."""

    async def asking(request: QueryRequest, show: Show) -> QueryResult:
        refusal = refusal_of(request, (await agents_of(store)).values())
        if refusal is not None:
            raise ConfigError(refusal.text)
        return await ask(request, show)

    return asking


async def _asking_here(
    access: MeshAccess, params: AgentParams, stack: AsyncExitStack
) -> AskFunction:
    """Return what drives a question's calls from this process."""
    desk = await stack.enter_async_context(open_desk(params, access.clock, None))
    count = await access.broker.partitions_of(access.topics.name(STAGE_RESULTS))
    producer = await stack.enter_async_context(
        open_producer(
            access.broker, access.topics, access.clock, partition=secrets.randbelow(count)
        )
    )

    async def ask(request: QueryRequest, show: Show) -> QueryResult:
        shown = replace(desk, store=_Shown(show))
        try:
            return await Answering(request, access.clock.now_s(), shown).answer(producer)
        except asyncio.CancelledError:
            await _take_back(access, request, producer.cancel)
            raise

    return ask


async def _take_back(
    access: MeshAccess, request: QueryRequest, cancel: Callable[..., Awaitable[None]]
) -> None:
    """Cancel a question whose user has gone; what is lost of it ends by its deadline."""
    until_s = access.clock.now_s() + (request.slo_s or 0.0) + TOMBSTONE_S
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_WITHIN_S):
            await cancel(request.query_id, until_s=until_s, reason="the user left")


class _Shown:
    """Shows events in place of storing them."""

    def __init__(self, show: Show) -> None:
        self._show = show

    async def append_chunk(self, request_id: str, attempt: int, index: int, text: str) -> None:
        """Show one event."""
        del request_id, attempt, index
        event = decode_event(text)
        if event is not None:
            self._show(event)

    async def chunks(
        self, request_id: str, *, after: str = "0-0", timeout_s: float = 1.0
    ) -> AsyncIterator[tuple[str, int, int, str]]:
        """Yield nothing: nothing is kept."""
        del request_id, after, timeout_s
        return
        yield


async def _embedded(
    plan: AgentPlan, console: Console, stack: AsyncExitStack
) -> tuple[MeshAccess, StateStore]:
    if plan.engines is None:
        fleet: Sequence[InstanceSpec] = load_fleet(SCRIPTED_FLEET)
        open_engine = _scripted(ScriptedModel(plan.questions))
        time_scale = plan.time_scale
    else:
        real = await stack.enter_async_context(open_real(plan.engines, console))
        fleet, open_engine, time_scale = real.specs, real.open_engine, 1.0
    params = EmbeddedParams(
        fleet=tuple(fleet),
        tunes=False,
        drain_s=1.0,
        time_scale=time_scale,
        open_engine=open_engine,
        agent=_params(plan, fleet),
    )
    mesh = await stack.enter_async_context(open_embedded(params))
    store = await stack.enter_async_context(RedisStore.open(RedisParams(url=mesh.state_url)))
    return mesh, store


def _scripted(model: ScriptedModel) -> OpenEngine:
    @asynccontextmanager
    async def open_engine(spec: InstanceSpec, clock: Clock) -> AsyncIterator[Engine]:
        async with ScriptedEngine.open(spec, clock, model) as engine:
            yield engine

    return open_engine


def agent_of_fleet(databases: dict[str, str], fleet: Fleet) -> AgentParams | None:
    """Return how an agent beside a fleet behaves; None: there is no database to ask."""
    if not databases:
        return None
    params = agent_params(databases, fleet.specs, is_real=fleet.is_real)
    return replace(params, drain_s=BESIDE_DRAIN_S)


def _pool(fleet: Sequence[InstanceSpec], model: str) -> list[InstanceSpec]:
    return [spec for spec in fleet if spec.model == model] or list(fleet)


def _schema_tokens(fleet: Sequence[InstanceSpec], model: str) -> int:
    """Return how much schema fits beside the rest of a prompt and the answer."""
    context = max(spec.max_context_tokens for spec in _pool(fleet, model))
    return max(200, min(MAX_SCHEMA_TOKENS, int(0.5 * (context - PROMPT_ROOM_TOKENS))))


def _offers_structure(fleet: Sequence[InstanceSpec], model: str) -> bool:
    return all("structured_output" in spec.features for spec in _pool(fleet, model))


def agent_text(databases: dict[str, str], engines: Fleet) -> str:
    """Return what `hexflow up` says of its agent."""
    text = f"A Text-to-SQL agent answers questions about: {', '.join(databases)}."
    if engines.is_real:
        return text
    return (
        f"{text} [yellow]Simulated engines write nonsense, so it finds no answers[/yellow]: "
        "--engine llamacpp or --openai URL put a real model behind it."
    )
