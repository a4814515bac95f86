"""Who answers questions in a mesh: what agents say of themselves, and what that means for one.

A program that only publishes questions needs none of it: a question on `queries` waits for an agent
as any message does.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from shared.contracts.agents import AGENTS, AgentNotice, decode_notice, encode_notice
from shared.contracts.messages import QueryRequest
from shared.domain.near_names import did_you_mean
from shared.ports import StateStore

MAX_NAMED = 20
NOBODY = (
    "no agent answers questions in this mesh: start one with `hexflow up --db NAME|URL`, or beside "
    "running services with `python -m services.text2sql` (TEXT2SQL_DATABASES names its databases)"
)


class Refusal(NamedTuple):
    """Why nobody could answer a question.

    Attributes:
        reason: Constant word, as in results: `no_agent`, `unknown_workflow`, `unknown_database`.
        text: For people.
        field: The field of the question that is wrong; empty: none is.
    """

    reason: str
    text: str
    field: str = ""


async def announce_agent(store: StateStore, agent_id: str, notice: AgentNotice) -> None:
    """Say that an agent is there, for as long as its notice's lease.

    Raises:
        StateUnavailable: The state store does not answer.
    """
    await store.announce(AGENTS, agent_id, encode_notice(notice), lease_s=notice.lease_s)


async def agents_of(store: StateStore) -> dict[str, AgentNotice]:
    """Return what the agents say that are there, by their id.

    Raises:
        StateUnavailable: The state store does not answer.
    """
    said = await store.announced(AGENTS)
    found = {agent_id: decode_notice(text) for agent_id, text in said.items()}
    return {agent_id: notice for agent_id, notice in found.items() if notice is not None}


def refusal_of(request: QueryRequest, agents: Collection[AgentNotice]) -> Refusal | None:
    """Return why none of the agents could answer a question; None: one may.

    Args:
        request: The question.
        agents: What they say of themselves.
    """
    if not agents:
        return Refusal("no_agent", NOBODY)
    able = [one for one in agents if request.workflow in one.workflows]
    if not able:
        known = {name for one in agents for name in one.workflows}
        text = f"there is no workflow {request.workflow!r}"
        return Refusal("unknown_workflow", _with_names(text, request.workflow, known), "workflow")
    if any(_has_database(request, one) for one in able):
        return None
    names = {name for one in able for name in one.databases or ()}
    text = f"there is no database {request.database!r}"
    if not request.database:
        text = "the question names no database"
    return Refusal("unknown_database", _with_names(text, request.database, names), "database")


def _has_database(request: QueryRequest, agent: AgentNotice) -> bool:
    if not agent.workflows[request.workflow] or agent.databases is None:
        return True
    if not request.database:
        return len(agent.databases) == 1
    return request.database in agent.databases


def _with_names(text: str, word: str, known: Iterable[str]) -> str:
    names = sorted(known)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    listed = ", ".join(names[:MAX_NAMED]) or "none"
    return f"{text}{did_you_mean(word, names)} (there are: {listed}{more})"
