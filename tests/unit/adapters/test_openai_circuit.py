"""A server that fails is left alone; calls that come meanwhile wait for news of it."""

import asyncio

import pytest

from shared.adapters.clock import ManualClock
from shared.adapters.openai_circuit import Circuit
from shared.errors import CallRefused, GenerationFailed

PAUSE_S = 1.0
LONGEST_S = 4.0


class Bench:
    """A circuit, and a server whose calls end when and how the test says."""

    def __init__(self, threshold: int = 2) -> None:
        self.clock = ManualClock()
        self.circuit = Circuit(threshold, PAUSE_S, LONGEST_S, self.clock)
        self.asked: list[asyncio.Future[None]] = []

    async def call(self) -> None:
        """Ask the server when it is this call's turn."""
        async with self.circuit.turn() as self.last_turn:
            answer = asyncio.get_running_loop().create_future()
            self.asked.append(answer)
            await answer

    async def begin(self) -> asyncio.Task[None]:
        """Begin a call, as far as it gets."""
        task = asyncio.create_task(self.call(), name="call")
        await self.clock.settle()
        return task

    async def fail(self, text: str = "HTTP 500") -> None:
        """End the call that was asked last with a failure."""
        self.asked[-1].set_exception(GenerationFailed(text))
        await self.clock.settle()

    async def answer(self) -> None:
        """End the call that was asked last well."""
        self.asked[-1].set_result(None)
        await self.clock.settle()

    async def give_token(self) -> None:
        """Let the call that was asked last have a first token."""
        self.circuit.token_seen(self.last_turn)
        await self.clock.settle()

    async def break_down(self, times: int = 2) -> None:
        """Let calls fail, one after the other."""
        for _ in range(times):
            task = await self.begin()
            await self.fail()
            assert isinstance(task.exception(), GenerationFailed)


async def test_calls_that_come_while_it_is_open_wait_for_the_one_that_tries() -> None:
    """Nobody is asked within the pause, one after it, and all others once it went well."""
    bench = Bench()
    await bench.break_down()
    assert not bench.circuit.allows()
    tasks = [await bench.begin() for _ in range(5)]
    await bench.clock.advance(PAUSE_S - 0.01)
    assert len(bench.asked) == 2
    await bench.clock.advance(0.01)
    assert len(bench.asked) == 3
    assert not bench.circuit.allows()
    await bench.answer()
    assert len(bench.asked) == 7
    assert bench.circuit.allows()
    for answer in bench.asked[3:]:
        answer.set_result(None)
    await asyncio.gather(*tasks)


async def test_those_that_wait_fail_with_the_one_that_tries() -> None:
    """They learn the server's own error and for how long it is left alone, and may go elsewhere."""
    bench = Bench()
    await bench.break_down()
    tasks = [await bench.begin() for _ in range(3)]
    await bench.clock.advance(PAUSE_S)
    await bench.fail("HTTP 503: loading")
    told = [str(task.exception()) for task in tasks]
    assert told[0] == "HTTP 503: loading"
    assert told[1:] == ["the server fails: HTTP 503: loading; it is left alone for 2.0 s"] * 2
    assert len(bench.asked) == 3


async def test_one_that_comes_after_a_failed_try_waits_for_the_next() -> None:
    """Only what has waited for a try fails with it; the pause doubles, up to the longest."""
    bench = Bench()
    await bench.break_down()
    for pause_s in (1.0, 2.0, LONGEST_S, LONGEST_S):
        task = await bench.begin()
        num_asked = len(bench.asked)
        await bench.clock.advance(pause_s - 0.01)
        assert len(bench.asked) == num_asked
        await bench.clock.advance(0.02)
        assert len(bench.asked) == num_asked + 1
        await bench.fail()
        assert str(task.exception()) == "HTTP 500"


@pytest.mark.parametrize("is_trying", [False, True])
async def test_a_cancelled_call_leaves_its_place(is_trying: bool) -> None:
    """Whether it waits or tries: the next one tries, and nothing stays behind."""
    bench = Bench()
    await bench.break_down()
    first, second = await bench.begin(), await bench.begin()
    if is_trying:
        await bench.clock.advance(PAUSE_S)
        assert len(bench.asked) == 3
    first.cancel()
    await bench.clock.settle()
    assert first.cancelled()
    await bench.clock.advance(PAUSE_S)
    assert len(bench.asked) == 3 + is_trying
    await bench.answer()
    await second
    assert bench.circuit.is_closed
    second = await bench.begin()
    second.cancel()
    await bench.clock.settle()
    assert bench.clock.sleeping == 0


async def test_a_refusal_shows_that_the_server_lives() -> None:
    """A call that the server refuses lets the others in."""
    bench = Bench()
    await bench.break_down()
    tasks = [await bench.begin() for _ in range(2)]
    await bench.clock.advance(PAUSE_S)
    bench.asked[-1].set_exception(CallRefused("HTTP 400"))
    await bench.clock.settle()
    assert isinstance(tasks[0].exception(), CallRefused)
    await bench.answer()
    await tasks[1]


async def test_calls_let_in_before_it_opened_do_not_lengthen_the_pause() -> None:
    """Ten calls that one crash ends are one incident; none of them takes the trial's place."""
    bench = Bench()
    early = [await bench.begin() for _ in range(10)]
    for answer in bench.asked:
        answer.set_exception(GenerationFailed("gone"))
    await bench.clock.settle()
    assert all(task.exception() for task in early)
    task = await bench.begin()
    await bench.clock.advance(PAUSE_S)
    assert len(bench.asked) == 11
    await bench.answer()
    await task


async def test_an_early_call_that_ends_well_frees_those_that_wait() -> None:
    """An answer that was under way shows that the server works; nobody waits the pause out."""
    bench = Bench()
    early = await bench.begin()
    answer = bench.asked[0]
    await bench.break_down()
    waiting = await bench.begin()
    assert len(bench.asked) == 3
    answer.set_result(None)
    await early
    await bench.clock.settle()
    assert len(bench.asked) == 4
    assert bench.clock.sleeping == 0
    await bench.answer()
    await waiting


async def test_a_first_token_of_the_one_that_tries_lets_the_others_in() -> None:
    """A long answer is not waited for to its end."""
    bench = Bench()
    await bench.break_down()
    tasks = [await bench.begin() for _ in range(3)]
    await bench.clock.advance(PAUSE_S)
    assert len(bench.asked) == 3
    await bench.give_token()
    assert len(bench.asked) == 5
    assert bench.circuit.allows()
    for answer in bench.asked[2:]:
        answer.set_result(None)
    await asyncio.gather(*tasks)


async def test_a_first_token_alone_does_not_make_a_server_well() -> None:
    """Where the answer then breaks, that one failure is enough to leave the server alone again."""
    bench = Bench(threshold=3)
    await bench.break_down(times=3)
    await bench.begin()
    await bench.clock.advance(PAUSE_S)
    await bench.give_token()
    assert bench.circuit.is_closed
    await bench.fail("it broke")
    assert not bench.circuit.is_closed
    await bench.clock.advance(PAUSE_S)
    await bench.begin()
    await bench.answer()
    await bench.break_down(times=2)
    assert bench.circuit.is_closed
