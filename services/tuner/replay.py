"""Asks the simulator, in processes of their own, so that the event loop never stalls.

Everything that crosses the process boundary is plain data.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Executor
from typing import Protocol

import msgspec

from shared.errors import MeshError
from shared.simulation.speed_fit import SpeedFit, SpeedRequest, fit_speed
from shared.simulation.window_replay import ReplayAnswer, ReplayRequest, replay_window


class ReplayLost(MeshError):
    """The process that was asked died, or none can be started; another question may go well."""

    reason = "replay_lost"


class Replay(Protocol):
    """Predicts a window under several α, and fits instances' speeds to it."""

    async def sweep(self, request: ReplayRequest) -> ReplayAnswer:
        """Return predictions for the request's α and those around the best.

        Raises:
            ConfigError: The request makes no run.
            ReplayLost: Whoever was asked died over it.
        """
        ...

    async def speeds(self, requests: Mapping[str, SpeedRequest]) -> dict[str, SpeedFit]:
        """Return the speed of every instance that ran enough calls.

        Raises:
            ReplayLost: Whoever was asked died over it.
        """
        ...


def sweep_packed(packed: bytes) -> bytes:
    """Answer a packed ReplayRequest; runs in another process."""
    request = msgspec.msgpack.decode(packed, type=ReplayRequest)
    # This process lives long: loading the compiled simulator once is worth it.
    return msgspec.msgpack.encode(replay_window(request, core="compiled"))


def speeds_packed(packed: bytes) -> bytes:
    """Answer packed SpeedRequests; runs in another process."""
    requests = msgspec.msgpack.decode(packed, type=dict[str, SpeedRequest])
    fits = {
        instance_id: fit_speed(one.spec, one.calls, known=one.known)
        for instance_id, one in requests.items()
    }
    return msgspec.msgpack.encode({key: fit for key, fit in fits.items() if fit is not None})


class ProcessReplay:
    """Replays in an executor of processes.

    Args:
        executor: Where to run; the caller owns it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def sweep(self, request: ReplayRequest) -> ReplayAnswer:
        """See `Replay`."""
        answer = await self._ask(sweep_packed, msgspec.msgpack.encode(request))
        return msgspec.msgpack.decode(answer, type=ReplayAnswer)

    async def speeds(self, requests: Mapping[str, SpeedRequest]) -> dict[str, SpeedFit]:
        """See `Replay`."""
        answer = await self._ask(speeds_packed, msgspec.msgpack.encode(dict(requests)))
        return msgspec.msgpack.decode(answer, type=dict[str, SpeedFit])

    async def _ask(self, question: Callable[[bytes], bytes], packed: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, question, packed)
        except BrokenExecutor as exc:
            raise ReplayLost(f"the replaying process is gone: {exc}") from exc
