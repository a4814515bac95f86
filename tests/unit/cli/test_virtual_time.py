"""A loop whose time jumps to the next timer, and stands still while another process computes."""

import asyncio
import time

from services.cli.virtual_time import VirtualTimeLoop


def run(main):
    """Run a coroutine on a loop in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def test_sleeping_costs_no_time_on_the_wall():
    """A thousand seconds pass at once, and in order."""

    async def main() -> tuple[float, list[int]]:
        loop, woken = asyncio.get_running_loop(), []
        began_s = loop.time()

        async def nap(number: int) -> None:
            await asyncio.sleep(1_000.0 - number)
            woken.append(number)

        await asyncio.gather(*(nap(number) for number in range(3)))
        return loop.time() - began_s, woken

    began_s = time.monotonic()
    passed_s, woken = run(main())
    assert 1_000.0 <= passed_s < 1_000.1
    assert woken == [2, 1, 0]
    assert time.monotonic() - began_s < 500.0


def test_time_stands_still_while_another_thread_computes():
    """Nothing overtakes its answer, however long it takes; afterwards time jumps again."""

    async def main() -> tuple[str, float, bool]:
        loop = asyncio.get_running_loop()
        timer = asyncio.create_task(asyncio.sleep(0.01), name="timer")
        began_s = loop.time()
        answer = await loop.run_in_executor(None, lambda: (time.sleep(0.05), "answer")[1])
        passed_s, is_early = loop.time() - began_s, not timer.done()
        await timer
        return answer, passed_s, is_early

    assert run(main()) == ("answer", 0.0, True)


def test_time_passes_as_on_the_wall_while_it_is_held():
    """Servers that start are waited for."""

    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        began_s, wall_s = loop.time(), time.monotonic()
        with loop.held():
            await asyncio.sleep(0.05)
        return loop.time() - began_s, time.monotonic() - wall_s

    passed_s, wall_s = run(main())
    assert passed_s >= 0.05
    assert wall_s >= 0.04
