"""The mesh as the dashboard shows it: one snapshot, and the changes since, for any number of eyes.

Once per period a single task takes a sample, and encodes one event with what has changed since the
last one. Every client gets the same bytes. A client that is slow misses events, never holds them:
it sees the gap (`since` is not the `change` it knows) and asks for a snapshot.
"""

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any

from services.gateway.agents import Agents
from services.gateway.board import Board
from services.gateway.dead_letters import DeadLetterDesk
from services.gateway.fleet import Fleet
from services.gateway.openai_answers import KEEP_ALIVE, event
from services.gateway.params import GatewayParams
from services.gateway.problems import Problem
from services.gateway.waiting import WaitingLines
from shared.contracts.messages import AlphaUpdate, InstanceState
from shared.ports import Clock
from shared.scheduling.outliers import OutlierRules, is_failing

MAX_CHANGED = 1_000
KEEP_ALIVE_S = 15.0
IDLE_SAMPLE_S = 1.0
RULES = OutlierRules()


class Live:
    """Keeps the dashboard's view.

    Args:
        board: Queries.
        fleet: Instances.
        letters: Dead letters.
        agents: Who answers questions.
        lines: Waiting lines; read only while somebody looks.
        clock: Mesh clock.
        params: Period and bounds.
    """

    def __init__(
        self,
        *,
        board: Board,
        fleet: Fleet,
        letters: DeadLetterDesk,
        agents: Agents,
        lines: WaitingLines,
        clock: Clock,
        params: GatewayParams,
    ) -> None:
        self._board = board
        self._fleet = fleet
        self._letters = letters
        self._agents = agents
        self._lines = lines
        self._clock = clock
        self._params = params
        self._event = b""
        self._turn = asyncio.Event()
        self._change = 0
        self._num_alphas_sent = 0
        self._is_over = False
        self._lines_read_s = -math.inf
        self.num_clients = 0

    async def read_lines(self) -> None:
        """Read the waiting lines, because somebody looks; not again within half a period."""
        now_s = self._clock.monotonic_s()
        if now_s - self._lines_read_s < self._params.event_period_s / 2:
            return
        self._lines_read_s = now_s
        live = [one.instance_id for one in self._fleet.states() if self._fleet.is_live(one)]
        await self._lines.read(live)

    def snapshot(self, limit: int) -> dict[str, Any]:
        """Return everything a dashboard begins with."""
        now_s = self._clock.now_s()
        return {
            **self._present(now_s),
            "queries": self._board.rows(now_s, limit=limit),
            "history": list(self._board.history),
            "alpha": [alpha_view(update) for update in self._board.alphas],
            "change": self._board.change,
        }

    def fleet_view(self) -> list[dict[str, Any]]:
        """Return every instance."""
        return [self._instance(state) for state in self._fleet.states()]

    async def run(self) -> None:
        """Sample and make events; runs until cancelled."""
        while True:
            await self._clock.sleep_wall(self._params.event_period_s)
            if self.num_clients:
                await self.read_lines()
            self._tick()

    def end(self) -> None:
        """End every client's stream, because the gateway stops."""
        self._is_over = True
        self._turn.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events until the gateway stops.

        Raises:
            Problem: Too many clients look already (503).
        """
        if self.num_clients >= self._params.max_event_clients:
            raise Problem(
                503, "too many event streams are open", code="too_many_streams", retry_after_s=10.0
            )
        self.num_clients += 1
        try:
            yield b"retry: 2000\n\n"
            while not self._is_over:
                turn = self._turn
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await turn.wait()
                except TimeoutError:
                    yield KEEP_ALIVE
                    continue
                if not self._is_over:
                    yield self._event
        finally:
            self.num_clients -= 1

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        states = self._fleet.states()
        self._board.sample(
            now_s,
            sum(state.num_waiting for state in states),
            sum(state.num_running for state in states),
        )
        if self.num_clients:
            since, self._change = self._change, self._board.change
            body = {
                **self._present(now_s),
                "queries": self._board.rows(now_s, since=since, limit=MAX_CHANGED),
                "sample": self._board.history[-1],
                "alpha": [alpha_view(update) for update in list(self._board.alphas)[-5:]],
                "since": since,
                "change": self._change,
            }
            self._event = event(body, "mesh")
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    def _present(self, now_s: float) -> dict[str, Any]:
        return {
            "now_s": now_s,
            "time_scale": self._clock.time_scale,
            "target_s": self._params.target_s,
            "summary": self._board.summary(now_s),
            "fleet": self.fleet_view(),
            "alpha_now": dict(self._board.alpha_now),
            "dead_letters": self._letters.num_seen,
            "agents": self._agents.view(),
        }

    def _instance(self, state: InstanceState) -> dict[str, Any]:
        speed = self._fleet.speeds.get(state.instance_id)
        line = self._lines.lines.get(state.instance_id)
        return {
            "instance_id": state.instance_id,
            "gpu": state.spec.gpu,
            "model": state.spec.model,
            "adapters": list(state.spec.adapters),
            "phase": self._phase(state),
            "running": state.num_running,
            "capacity": state.capacity,
            "waiting": state.num_waiting,
            "backlog_s": state.backlog_s,
            "foreign_s": state.foreign_s,
            "kv_used": state.kv_used_tokens / max(1, state.spec.kv_tokens),
            "p95_s": self._board.p95_s(state.instance_id),
            "drift": speed.factor if speed is not None else None,
            "cache_hits": speed.hit_factor if speed is not None else None,
            "waiting_by_slack": line.by_slack if line is not None else None,
            "first_waiting": line.first if line is not None else [],
        }

    def _phase(self, state: InstanceState) -> str:
        if state.phase != "serving":
            return state.phase
        if not self._fleet.is_live(state):
            return "silent"
        return "failing" if is_failing(state.failures_in_a_row, RULES) else "serving"


def alpha_view(update: AlphaUpdate) -> dict[str, Any]:
    """Return one change of α with the tuner's reason."""
    return {
        "pool": update.pool,
        "alpha": update.alpha,
        "previous_alpha": update.previous_alpha,
        "revision": update.revision,
        "reason": update.reason,
        "predicted_p95_s": update.predicted_p95_s,
        "predicted_low_s": update.predicted_low_s,
        "predicted_high_s": update.predicted_high_s,
        "at_s": update.at_s,
        "tuner_id": update.tuner_id,
    }
