"""Rates, bounds and fair shares."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from services.gateway.admission import Admission
from services.gateway.problems import Problem
from services.gateway.tenants import Tenant
from shared.adapters.clock import ManualClock


def _admission(clock: ManualClock, *, max_open: int = 10, max_waiting: int = 5) -> Admission:
    return Admission(clock, max_open=max_open, max_waiting=max_waiting, retry_after_s=2.0)


async def test_a_rate_is_kept_and_says_when_to_come_back():
    """A burst passes, then one request per interval; the rest learn how long to wait."""
    clock = ManualClock()
    admission = _admission(clock)
    tenant = Tenant(name="a", requests_per_s=2.0, burst=3)

    async def ask() -> None:
        async with admission.place(tenant):
            pass

    for _ in range(3):
        await ask()
    with pytest.raises(Problem) as caught:
        await ask()
    assert (caught.value.status, caught.value.retry_after_s) == (429, 0.5)
    await clock.advance(0.5)
    await ask()
    with pytest.raises(Problem):
        await ask()


async def test_a_tenants_bound_counts_open_calls():
    """A tenant with its bound of calls open gets 429; one that ends makes room."""
    admission = _admission(ManualClock())
    tenant = Tenant(name="a", max_open=1)
    async with admission.place(tenant):
        with pytest.raises(Problem):
            async with admission.place(tenant):
                pass
        async with admission.place(Tenant(name="b", max_open=1)):
            assert admission.num_open == 2
    async with admission.place(tenant):
        assert admission.num_open == 1


async def _order_of_entry(weights: dict[str, float], num: int) -> list[str]:
    """Let every tenant ask `num` times while full, then free one place after another."""
    admission = _admission(ManualClock(), max_open=1, max_waiting=num)
    order: list[str] = []
    ended = asyncio.Semaphore(0)

    async def one(tenant: Tenant) -> None:
        async with admission.place(tenant):
            order.append(tenant.name)
            await ended.acquire()

    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        await stack.enter_async_context(admission.place(Tenant(name="first")))
        for name, weight in weights.items():
            for _ in range(num):
                group.create_task(one(Tenant(name=name, weight=weight)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert admission.num_waiting == num * len(weights)
        await stack.aclose()
        for _ in range(num * len(weights)):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ended.release()
    assert admission.num_open == 0
    return order


async def test_nobody_starves_while_the_gateway_is_full():
    """With many waiting calls of one tenant and few of another, both get in."""
    order = await _order_of_entry({"many": 1.0, "few": 1.0}, 4)
    assert sorted(order) == ["few"] * 4 + ["many"] * 4


async def test_free_places_go_by_weight():
    """A tenant of weight 3 holds three places where one of weight 1 holds one."""
    admission = _admission(ManualClock(), max_open=4, max_waiting=50)
    held = {"big": 0, "small": 0}
    ends = asyncio.Event()

    async def one(name: str, weight: float) -> None:
        async with admission.place(Tenant(name=name, weight=weight)):
            held[name] += 1
            await ends.wait()

    async with asyncio.TaskGroup() as group:
        async with AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(admission.place(Tenant(name="first")))
            for _ in range(10):
                group.create_task(one("small", 1.0))
                group.create_task(one("big", 3.0))
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert held == {"big": 3, "small": 1}
        ends.set()


async def test_the_line_is_bounded_and_leavers_leave_no_trace():
    """A full line is 429 at once; a client that leaves while waiting frees its place in it."""
    admission = _admission(ManualClock(), max_open=1, max_waiting=1)
    tenant = Tenant(name="a")

    async def wait() -> None:
        async with admission.place(tenant):
            pass

    async with admission.place(tenant):
        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        with pytest.raises(Problem):
            await wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert admission.num_waiting == 0
    assert admission.num_open == 0


async def test_a_leaver_whose_turn_came_passes_it_on():
    """A client cancelled at the moment its place becomes free does not keep it."""
    admission = _admission(ManualClock(), max_open=1)
    tenant = Tenant(name="a")

    async def wait() -> None:
        async with admission.place(tenant):
            await asyncio.sleep(3600)

    async with admission.place(tenant):
        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (admission.num_open, admission.num_waiting) == (0, 0)
