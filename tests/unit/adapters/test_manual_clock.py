"""The clock that tests move."""

import asyncio

import pytest

from shared.adapters.clock import ManualClock


async def test_sleepers_wake_in_order_of_their_due_times() -> None:
    """Advancing wakes sleepers by due time, then by arrival, each at its own instant."""
    clock = ManualClock()
    start_s = clock.now_s()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now_s() - start_s))

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("c", 3.0), ("a", 1.0), ("b1", 2.0), ("b2", 2.0)):
            group.create_task(sleeper(name, seconds))
        await clock.advance(2.5)
        assert woken == [("a", 1.0), ("b1", 2.0), ("b2", 2.0)]
        assert clock.sleeping == 1
        await clock.advance(0.5)
    assert woken[-1] == ("c", 3.0)


async def test_sleeper_may_sleep_again_within_one_move() -> None:
    """A loop that sleeps one second runs ten times while the clock moves ten."""
    clock = ManualClock()
    start_s = clock.now_s()
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await clock.sleep(1.0)
            ticks.append(clock.now_s() - start_s)

    ticking = asyncio.ensure_future(tick())
    await clock.advance(10.0)
    ticking.cancel()
    assert ticks == [float(second) for second in range(1, 11)]


async def test_time_stands_still_between_moves() -> None:
    """Nothing but a move changes the time or wakes a sleeper."""
    clock = ManualClock()
    sleeping = asyncio.ensure_future(clock.sleep(0.001))
    await clock.settle()
    assert not sleeping.done()
    assert clock.now_s() == clock.wall_unix_s() == 1_700_000_000.0
    sleeping.cancel()


async def test_cancelled_sleeper_is_forgotten() -> None:
    """A sleeper that was cancelled is not woken and does not hold up others."""
    clock = ManualClock()
    first = asyncio.ensure_future(clock.sleep(1.0))
    second = asyncio.ensure_future(clock.sleep(2.0))
    await clock.settle()
    first.cancel()
    await clock.advance(2.0)
    assert first.cancelled()
    assert second.done()
    assert clock.sleeping == 0


async def test_scaled_moves_and_sleeps() -> None:
    """Moves are in mesh seconds; at scale 20 a wall second is 20 of them."""
    clock = ManualClock(20.0)
    mesh = asyncio.ensure_future(clock.sleep(10.0))
    wall = asyncio.ensure_future(clock.sleep_wall(1.0))
    await clock.advance(10.0)
    assert (mesh.done(), wall.done()) == (True, False)
    assert clock.monotonic_s() == 0.5
    await clock.advance(10.0)
    assert wall.done()


async def test_time_does_not_run_back() -> None:
    """A negative move is a ValueError."""
    with pytest.raises(ValueError, match="back"):
        await ManualClock().advance(-1.0)


def test_observations_are_kept() -> None:
    """What was observed can be looked up, and moves nothing."""
    clock = ManualClock()
    before_s = clock.now_s()
    clock.observe_append(5.0, 1.0, 2.0)
    assert clock.observed == [(5.0, 1.0, 2.0)]
    assert clock.now_s() == before_s
