"""A loop whose time jumps to the next timer, and stands by while something outside is awaited."""

import asyncio
import time

from services.cli.virtual_time import VirtualTimeLoop, holding


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


def test_nothing_overtakes_a_reply_from_another_thread():
    """A timer of an hour does not fire while an executor works for a moment."""

    async def main() -> tuple[str, bool]:
        loop = asyncio.get_running_loop()
        timer = asyncio.create_task(asyncio.sleep(3_600.0), name="timer")
        answer = await loop.run_in_executor(None, lambda: (time.sleep(0.05), "answer")[1])
        is_early = not timer.done()
        timer.cancel()
        return answer, is_early

    assert run(main()) == ("answer", True)


def test_asking_the_store_holds_time():
    """While a coroutine of the store runs, time does not jump; afterwards it does."""

    class Store:
        async def ping(self) -> int:
            return loop_of().num_held

        def urgency_set(self, name: str) -> "Store":
            assert name == "a100-0"
            return self

    def loop_of() -> VirtualTimeLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return loop

    async def main() -> tuple[int, int]:
        store = holding(Store(), loop_of()).urgency_set("a100-0")
        return await store.ping(), loop_of().num_held

    assert run(main()) == (1, 0)
