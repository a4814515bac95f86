"""What all questions of an agent share: databases, workflows, what stages cost."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.text2sql.flow.definition import WorkflowDef, built_in, load_definition
from services.text2sql.flow.progress import EventStore
from services.text2sql.flow.runner import StageCosts
from services.text2sql.params import AgentParams
from services.text2sql.sql.database import Database
from shared.ports import Clock


@dataclass(kw_only=True)
class Desk:
    """What all questions of an agent share.

    Attributes:
        params: How it behaves.
        clock: Mesh clock.
        store: Where progress is told; None: nowhere.
        databases: By name.
        workflows: By name.
        costs: How long stages take.
    """

    params: AgentParams
    clock: Clock
    store: EventStore | None
    databases: Mapping[str, Database]
    workflows: Mapping[str, WorkflowDef]
    costs: StageCosts = field(default_factory=StageCosts)


@asynccontextmanager
async def open_desk(
    params: AgentParams, clock: Clock, store: EventStore | None
) -> AsyncIterator[Desk]:
    """Open the databases and read the workflows.

    Raises:
        ConfigError: One of them cannot be read.
    """
    workflows = built_in()
    extra = [load_definition(Path(path)) for path in params.workflow_files]
    workflows.update({one.name: one for one in extra})
    async with AsyncExitStack() as stack:
        databases = {
            name: await stack.enter_async_context(Database.open(name, url, params.limits))
            for name, url in params.databases.items()
        }
        yield Desk(
            params=params, clock=clock, store=store, databases=databases, workflows=workflows
        )
