"""Which agents there are, as they say, so that a question nobody could answer is refused at once.

Generous by intent: an agent counts for its whole lease after it was last heard of, for what is
asked while it restarts waits for it. What it said is remembered here too, so a state store that
lost its memory, or does not answer, refuses nobody.
"""

from typing import Any, NamedTuple

import structlog

from services.gateway.problems import Problem
from shared.contracts.agents import AgentNotice
from shared.contracts.messages import QueryRequest
from shared.errors import StateUnavailable
from shared.ports import Clock, StateStore
from shared.sdk import Refusal, agents_of, refusal_of

LOOK_S = 2.0
RETRY_S = 5.0
log = structlog.get_logger(__name__)


class Heard(NamedTuple):
    """What an agent said last.

    Attributes:
        notice: What it said.
        at_s: When that was first heard here, wall seconds on a monotonic clock.
    """

    notice: AgentNotice
    at_s: float


class Agents:
    """The agents heard of.

    Args:
        store: Where they say that they are there.
        clock: For the time between looks, and leases.
    """

    def __init__(self, store: StateStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._heard: dict[str, Heard] = {}
        self._is_blind = False

    async def check(self, request: QueryRequest) -> None:
        """Refuse a question that no agent could answer.

        Raises:
            Problem: There is no agent (503), or none knows its workflow or database (400).
        """
        if self._refusal(request) is None:
            return
        await self.look()  # an agent that has just started
        refusal = self._refusal(request)
        if refusal is not None and not self._is_blind:
            raise _problem(refusal)

    async def run(self) -> None:
        """Look again and again; runs until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep_wall(LOOK_S)

    async def look(self) -> None:
        """Read what the agents say now."""
        try:
            found = await agents_of(self._store)
        except StateUnavailable as exc:
            if not self._is_blind:
                log.warning("agents_unknown", error=str(exc))
            self._is_blind = True
            return
        self._is_blind = False
        now_s = self._clock.monotonic_s()
        for agent_id, notice in found.items():
            known = self._heard.get(agent_id)
            if known is None or known.notice != notice:
                self._heard[agent_id] = Heard(notice, now_s)
        self._heard = {
            agent_id: heard
            for agent_id, heard in self._heard.items()
            if agent_id in found or now_s < heard.at_s + heard.notice.lease_s
        }

    def view(self) -> list[dict[str, Any]]:
        """Return who answers questions, as JSON; `databases` is null where there are too many."""
        return [
            {
                "agent_id": agent_id,
                "databases": heard.notice.databases,
                "workflows": sorted(heard.notice.workflows),
            }
            for agent_id, heard in sorted(self._heard.items())
        ]

    def _refusal(self, request: QueryRequest) -> Refusal | None:
        return refusal_of(request, [heard.notice for heard in self._heard.values()])


def _problem(refusal: Refusal) -> Problem:
    if refusal.field:
        return Problem(400, refusal.text, code=refusal.reason, param=refusal.field)
    return Problem(
        503, refusal.text, code=refusal.reason, kind="server_error", retry_after_s=RETRY_S
    )
