"""An agent says that it is there, what it knows, and goes on saying so.

It does not say goodbye: one that ends may be back in seconds, and what is asked meanwhile waits for
it on `queries`. One that stays away is forgotten when its lease ends.
"""

import msgspec
import structlog

from services.text2sql.desk import Desk
from shared.contracts.agents import AgentNotice
from shared.errors import StateUnavailable
from shared.ports import Clock, StateStore
from shared.sdk import announce_agent

BEATS_PER_LEASE = 12
log = structlog.get_logger(__name__)


def notice_of(desk: Desk) -> AgentNotice:
    """Return what an agent says of itself."""
    return AgentNotice(
        workflows={
            name: any(stage.step != "prompt" for stage in one.stages)
            for name, one in desk.workflows.items()
        },
        databases=tuple(sorted(desk.databases)),
        lease_s=desk.params.lease_s,
    )


class Presence:
    """Says that an agent is there.

    A state store that does not answer is told at the next beat: agents work without it.

    Args:
        store: Where it is said.
        clock: For the time between beats.
        agent_id: Who says it.
        notice: What.
    """

    def __init__(self, store: StateStore, clock: Clock, agent_id: str, notice: AgentNotice) -> None:
        self._store = store
        self._clock = clock
        self._agent_id = agent_id
        self._notice = notice
        self._is_heard = True

    async def keep(self) -> None:
        """Say it again and again; runs until cancelled."""
        while True:
            await self._clock.sleep_wall(self._notice.lease_s / BEATS_PER_LEASE)
            await self.say()

    async def say(self) -> None:
        """Say it once."""
        self._notice = msgspec.structs.replace(self._notice, beat=self._notice.beat + 1)
        try:
            await announce_agent(self._store, self._agent_id, self._notice)
        except StateUnavailable as exc:
            if self._is_heard:
                log.warning("agent_not_announced", agent_id=self._agent_id, error=str(exc))
            self._is_heard = False
        else:
            self._is_heard = True
