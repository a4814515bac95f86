"""Who gets in: a rate and a bound per tenant, and fair shares of the gateway's own bound.

A tenant above its rate, or with too many calls open, is told so at once. While the gateway as a
whole is full, calls wait in a short line of their tenant; the next free place goes to the tenant
that has least open calls for its weight. No I/O; the event loop is used to wait only.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.problems import Problem
from services.gateway.tenants import Tenant
from shared.ports import Clock

MAX_TENANTS = 10_000


class _Share:
    """What a tenant uses at present."""

    def __init__(self, now_s: float, burst: int) -> None:
        self.num_open = 0
        self.tokens = float(burst)
        self.filled_s = now_s
        self.weight = 1.0
        self.line: deque[asyncio.Future[None]] = deque()


class Admission:
    """Counts open calls.

    Args:
        clock: Monotonic time, for rates.
        max_open: Most calls open at the same time.
        max_waiting: Most calls of one tenant that wait for a place.
        retry_after_s: What a client is told to wait when there is no place, wall seconds.
    """

    def __init__(
        self, clock: Clock, *, max_open: int, max_waiting: int, retry_after_s: float
    ) -> None:
        self._clock = clock
        self._max_open = max_open
        self._max_waiting = max_waiting
        self._retry_after_s = retry_after_s
        self._shares: dict[str, _Share] = {}
        self.num_open = 0

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a place."""
        return sum(len(share.line) for share in self._shares.values())

    @asynccontextmanager
    async def place(self, tenant: Tenant) -> AsyncIterator[None]:
        """Hold a place while the block runs.

        Raises:
            Problem: The tenant is above its rate or bound, or its line is full (429).
        """
        share = self._share(tenant)
        self._check_bound(tenant, share)
        self._take_token(tenant, share)
        if self.num_open < self._max_open:
            self._enter(share)
        else:
            await self._wait(share)
        try:
            yield
        finally:
            share.num_open -= 1
            self.num_open -= 1
            self._admit_next()

    def _share(self, tenant: Tenant) -> _Share:
        share = self._shares.get(tenant.name)
        if share is None:
            if len(self._shares) >= MAX_TENANTS:
                self._forget_idle()
            share = self._shares[tenant.name] = _Share(self._clock.monotonic_s(), tenant.burst)
        share.weight = tenant.weight
        return share

    def _forget_idle(self) -> None:
        for name in [n for n, s in self._shares.items() if not s.num_open and not s.line]:
            del self._shares[name]

    def _check_bound(self, tenant: Tenant, share: _Share) -> None:
        if tenant.max_open is not None and share.num_open + len(share.line) >= tenant.max_open:
            raise self._too_many(f"this tenant has as many calls open as it may: {tenant.max_open}")

    def _take_token(self, tenant: Tenant, share: _Share) -> None:
        if tenant.requests_per_s is None:
            return
        now_s = self._clock.monotonic_s()
        gained = (now_s - share.filled_s) * tenant.requests_per_s
        share.tokens = min(float(tenant.burst), share.tokens + gained)
        share.filled_s = now_s
        if share.tokens < 1.0:
            wait_s = (1.0 - share.tokens) / tenant.requests_per_s
            raise self._too_many(f"above {tenant.requests_per_s:g} requests per second", wait_s)
        share.tokens -= 1.0

    async def _wait(self, share: _Share) -> None:
        if len(share.line) >= self._max_waiting:
            raise self._too_many("the gateway is full")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        share.line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was ours already
                share.num_open -= 1
                self.num_open -= 1
                self._admit_next()
            else:
                share.line.remove(turn)
            raise

    def _admit_next(self) -> None:
        while self.num_open < self._max_open:
            waiting = [share for share in self._shares.values() if share.line]
            if not waiting:
                return
            share = min(waiting, key=_used)
            self._enter(share)
            share.line.popleft().set_result(None)

    def _enter(self, share: _Share) -> None:
        share.num_open += 1
        self.num_open += 1

    def _too_many(self, text: str, wait_s: float | None = None) -> Problem:
        return Problem(
            429,
            text,
            code="rate_limit_exceeded",
            kind="rate_limit_error",
            retry_after_s=self._retry_after_s if wait_s is None else wait_s,
        )


def _used(share: _Share) -> float:
    return share.num_open / share.weight
