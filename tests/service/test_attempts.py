"""What counts as a failed attempt: an engine's failure or a death, never a drain."""

from tests.support.worker_bench import Bench, altered, bound_call, until


async def test_a_drain_is_no_failed_attempt(bench: Bench) -> None:
    """Waiting and cut-off calls of a leaving worker go back with as many failures as they had."""
    bench.engine.hang()
    async with bench.worker(altered(capacity=1, drain_s=0.05, max_attempts=1)) as worker:
        await bench.send(bound_call("running", attempt=40), bound_call("waiting", failures=2))
        await bench.running(1)
        await bench.waiting(1)
        await worker.drained()
    found = {call.request_id: (call.attempt, call.failures) for call in await bench.handed_back()}
    assert found == {"running": (41, 0), "waiting": (1, 2)}
    assert await bench.outcomes() == []


async def test_a_call_ends_failed_at_its_last_attempt(bench: Bench) -> None:
    """The fifth failure is the last, however often the call travelled before."""
    bench.engine.fail_next(2)
    async with bench.worker(altered(max_attempts=5)):
        await bench.send(bound_call("worn", attempt=3, failures=4))
        (outcome,) = await bench.outcomes_once(1)
        await bench.send(bound_call("travelled", attempt=90, failures=3))
        (again,) = await until(bench.handed_back, lambda found: len(found) == 1)
    assert (outcome.kind, outcome.reason, outcome.attempt) == ("failed", "generation_failed", 3)
    assert (again.request_id, again.attempt, again.failures) == ("travelled", 91, 4)


async def test_an_engine_that_dies_fails_what_it_ran_and_nothing_that_waited(bench: Bench) -> None:
    """A call that kills engines is given up in the end; those behind it are not blamed."""
    bench.engine.hang()
    async with bench.worker(altered(capacity=1)) as worker:
        await bench.send(bound_call("killer"), bound_call("waiting"))
        await bench.running(1)
        await bench.waiting(1)
        bench.engine.die()
        await worker.crash()
    found = {call.request_id: call.failures for call in await bench.handed_back()}
    assert found == {"killer": 1, "waiting": 0}
