"""How calls leave a worker other than completed: cancelled, failed, evicted, handed back."""

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.adapters.simulated_engine import SimulatedEngine
from shared.contracts.messages import MAX_DETAIL, BoundCall, Usage
from shared.contracts.topics import LATENCY_EVENTS, TopicSpec
from shared.errors import GenerationFailed
from shared.ports import EngineEvent, Finished, FirstToken
from tests.support.worker_bench import (
    SPEC,
    TOPICS,
    Bench,
    altered,
    bound_call,
    open_bench,
    replaced,
    reply_to,
    until,
)

ONE_AT_A_TIME = altered(capacity=1)


async def test_waiting_call_is_cancelled(bench: Bench) -> None:
    """A tombstone ends a waiting call at once: it never starts, and only its holder says so."""
    bench.engine.hang()
    async with bench.worker(ONE_AT_A_TIME) as worker:
        await bench.send(bound_call("running"), bound_call("w", query_id="q"))
        await bench.running(1)
        await bench.waiting(1)
        await bench.cancel("q")
        (outcome,) = await bench.outcomes_once(1)
        assert (outcome.request_id, outcome.kind, outcome.detail) == (
            "w",
            "cancelled",
            "the user left",
        )
        await bench.waiting(0)
        bench.engine.recover()
        await bench.outcomes_once(2)
        await worker.drained()
    assert bench.metrics.totals()["hexflow_calls_started_total{}"] == 1
    assert await bench.committed() == (2, "")


async def test_running_call_is_cancelled(bench: Bench) -> None:
    """A tombstone reaches the engine: the generation stops and its memory is free."""
    bench.engine.hang()
    async with bench.worker():
        await bench.send(bound_call("a", query_id="q"), bound_call("b"))
        await bench.running(2)
        await bench.cancel("q")
        (outcome,) = await bench.outcomes_once(1)
        assert (outcome.request_id, outcome.kind) == ("a", "cancelled")
        state = (await until(bench.states, lambda found: found[-1].num_running == 1))[-1]
        assert state.num_waiting == 0
        bench.engine.recover()
        outcomes = await bench.outcomes_once(2)
    assert outcomes[1].kind == "completed"
    assert bench.engine.kv_used_tokens() == 0


async def test_a_tombstone_that_names_a_call_spares_its_siblings(bench: Bench) -> None:
    """One call of a query is cancelled alone: waiting, running, or not there yet."""
    bench.engine.hang()
    async with bench.worker(altered(capacity=2)):
        await bench.cancel("early")
        await bench.send(*(bound_call(name, query_id="q") for name in ("a", "b", "c", "early")))
        await bench.running(2)
        await bench.cancel("a")
        await bench.cancel("c")
        await bench.outcomes_once(3)
        bench.engine.recover()
        outcomes = await bench.outcomes_once(4)
    assert {o.request_id: o.kind for o in outcomes} == {
        "a": "cancelled",
        "b": "completed",
        "c": "cancelled",
        "early": "cancelled",
    }


async def test_tombstone_that_came_before_its_call(bench: Bench) -> None:
    """A call of a query that was cancelled before the worker even started never runs."""
    await bench.cancel("q")
    await bench.send(bound_call("a", query_id="q"), bound_call("b"))
    async with bench.worker():
        outcomes = await bench.outcomes_once(2)
    assert {o.request_id: o.kind for o in outcomes} == {"a": "cancelled", "b": "completed"}
    assert bench.metrics.totals()["hexflow_calls_started_total{}"] == 1


async def test_unreadable_tombstone_is_skipped(bench: Bench) -> None:
    """Bytes nobody can read on `cancellations` stop neither the tombstones nor the calls."""
    await bench.broker.publish(TOPICS.name("cancellations"), b"junk", key=b"q")
    await bench.cancel("q")
    async with bench.worker():
        await bench.send(bound_call("a", query_id="q"))
        (outcome,) = await bench.outcomes_once(1)
    assert outcome.kind == "cancelled"


async def test_failed_generation_is_tried_elsewhere(bench: Bench) -> None:
    """A failed call goes back one attempt later, its ready time and budget unchanged."""
    async with bench.worker() as worker:
        bench.engine.fail_next(1)
        await bench.send(bound_call("a", attempt=1))
        (request,) = await until(bench.handed_back, lambda found: len(found) == 1)
        await worker.drained()
    assert (request.request_id, request.attempt) == ("a", 2)
    assert (request.ready_at_s, request.t_slo_s, request.arrival_s) == (1_000.0, 10.0, 900.0)
    assert request.failed_on == (bench.spec.instance_id,)
    assert await bench.outcomes() == []
    assert await bench.committed() == (1, "")


async def test_last_attempt_fails_for_good(bench: Bench) -> None:
    """A call that failed at its last attempt ends failed, with the engine's reason."""
    async with bench.worker():
        bench.engine.fail_next(1)
        await bench.send(bound_call("a", attempt=2, failures=4))
        (outcome,) = await bench.outcomes_once(1)
    assert (outcome.kind, outcome.reason, outcome.attempt) == ("failed", "generation_failed", 2)
    assert await bench.handed_back() == []


async def test_nothing_is_retried_after_a_token_was_forwarded(bench: Bench) -> None:
    """A streaming call that fails after its first chunk ends failed at the first attempt."""
    async with bench.worker():
        bench.engine.fail_next(1, after_first_token=True)
        await bench.send(bound_call("a", stream=True))
        (outcome,) = await bench.outcomes_once(1)
    assert (outcome.kind, outcome.attempt) == ("failed", 0)
    assert await bench.handed_back() == []


async def test_same_failure_without_stream_is_retried(bench: Bench) -> None:
    """Where nobody saw a token, a failure after the first one is tried elsewhere."""
    async with bench.worker():
        bench.engine.fail_next(1, after_first_token=True)
        await bench.send(bound_call("a"))
        await until(bench.handed_back, lambda found: len(found) == 1)
    assert await bench.outcomes() == []


async def test_call_handed_back_may_come_again(bench: Bench) -> None:
    """The next attempt of a call that failed here is no duplicate."""
    call = bound_call("a")
    async with bench.worker():
        bench.engine.fail_next(1)
        await bench.send(call)
        await until(bench.handed_back, lambda found: len(found) == 1)
        await bench.send(replaced(call, attempt=1))
        (outcome,) = await bench.outcomes_once(1)
    assert (outcome.kind, outcome.attempt) == ("completed", 1)


async def test_failing_engine_does_not_eat_the_queue(bench: Bench) -> None:
    """A few calls find out that an engine fails them all; the others leave it untried."""
    async with bench.worker():
        bench.engine.fail_next(1_000)
        await bench.send(*(bound_call(f"c{i}") for i in range(50)))
        handed = await until(bench.handed_back, lambda found: len(found) >= 40)
        tried = [call for call in handed if call.failures]
        assert len(tried) <= 10  # the first eight may have started together
        bench.engine.recover()
        await until(_ended(bench), lambda num_ended: num_ended == 50)


def _ended(bench: Bench) -> Callable[[], Awaitable[int]]:
    async def ask() -> int:
        return len(await bench.outcomes()) + len(await bench.handed_back())

    return ask


async def test_hung_generation_is_given_up(bench: Bench) -> None:
    """A call that gets no result for far too long is aborted and tried elsewhere."""
    params = altered(stall_floor_s=1.0, stall_factor=1.0, stall_wall_s=0.05)
    bench.engine.hang()
    async with bench.worker(params):
        await bench.send(bound_call("a"))
        await until(bench.handed_back, lambda found: len(found) == 1)
        bench.engine.recover()
    totals = bench.metrics.totals()
    assert totals["hexflow_calls_handed_back_total{cause=stalled}"] == 1
    assert bench.engine.kv_used_tokens() == 0


async def test_late_call_still_runs(bench: Bench) -> None:
    """A call whose query is past its deadline is late, not lost."""
    async with bench.worker():
        await bench.send(bound_call("a", deadline_s=bench.clock.now_s() - 60.0))
        (outcome,) = await bench.outcomes_once(1)
    assert outcome.kind == "completed"


async def test_hopelessly_late_call_is_evicted(bench: Bench) -> None:
    """Long after its query's deadline a call is given up without running."""
    async with bench.worker(altered(evict_after_s=100.0)):
        await bench.send(bound_call("a", deadline_s=bench.clock.now_s() - 5_000.0))
        (outcome,) = await bench.outcomes_once(1)
    assert (outcome.kind, outcome.reason) == ("evicted", "deadline_passed")
    assert "hexflow_calls_started_total{}" not in bench.metrics.totals()


async def test_call_that_grew_hopeless_in_the_queue_is_evicted(bench: Bench) -> None:
    """A call that waits past its query's deadline and grace is given up instead of started."""
    bench.engine.hang()
    async with bench.worker(altered(capacity=1, evict_after_s=0.0)):
        soon_s = bench.clock.now_s() + 20.0  # 0.2 s of wall time
        await bench.send(bound_call("running"))
        await bench.running(1)
        await bench.send(bound_call("w", deadline_s=soon_s))
        await bench.waiting(1)
        while bench.clock.now_s() <= soon_s:
            await bench.clock.sleep(1.0)
        bench.engine.recover()
        outcomes = await bench.outcomes_once(2)
    assert {o.request_id: o.kind for o in outcomes} == {"running": "completed", "w": "evicted"}


async def test_engine_adapter_bug_costs_one_call(bench: Bench) -> None:
    """An error nobody foresaw fails its call; the worker and the other calls go on."""

    class Faulty(SimulatedEngine):
        async def generate(
            self, call: BoundCall, engine_id: str
        ) -> AsyncGenerator[EngineEvent, None]:
            if call.request.request_id == "odd":
                raise ZeroDivisionError
            async for event in super().generate(call, engine_id):
                yield event

    async with Faulty.open(SPEC, bench.clock) as engine:
        bench.engine = engine
        async with bench.worker(altered(max_attempts=1)):
            await bench.send(bound_call("odd"), bound_call("even"))
            outcomes = await bench.outcomes_once(2)
    assert {o.request_id: o.kind for o in outcomes} == {"odd": "failed", "even": "completed"}


async def test_answer_nobody_can_receive_is_buried(bench: Bench) -> None:
    """An outcome for a topic or partition that does not exist is dead-lettered, not retried."""
    async with bench.worker() as worker:
        await bench.send(
            bound_call("a", reply_to=reply_to("nowhere")),
            bound_call("b", reply_to=reply_to("stage-results", 99)),
            bound_call("c"),
        )
        letters = await until(bench.dead_letters, lambda found: len(found) == 2)
        await bench.outcomes_once(1)
        await worker.drained()
    assert {letter.error for letter in letters} == {"unknown_topic"}
    assert await bench.committed() == (3, "")


async def test_answer_too_large_ends_failed(bench: Bench) -> None:
    """Where the text exceeds the largest message, the producer is told so without it."""
    topics = msgspec.structs.replace(TOPICS, max_message_bytes=4_096)
    url = bench.store._client.params.url
    async with (
        open_bench(url, f"{uuid.uuid4().hex}:", topics=topics, time_scale=1_000.0) as small,
        small.worker(),
    ):
        await small.send(bound_call("a", output_tokens=2_000))
        (outcome,) = await small.outcomes_once(1)
    assert (outcome.kind, outcome.reason, outcome.text) == ("failed", "too_large", None)


async def test_what_others_wrote_at_length_is_cut_short(bench: Bench) -> None:
    """A long reason of a cancellation, or a list of parents, is no outcome too large to publish."""
    topics = msgspec.structs.replace(TOPICS, max_message_bytes=4_096)
    url = bench.store._client.params.url
    async with (
        open_bench(url, f"{uuid.uuid4().hex}:", topics=topics, time_scale=1_000.0) as small,
        small.worker(),
    ):
        small.engine.hang()
        await small.send(bound_call("a", query_id="q"))
        await small.running(1)
        await small.cancel("q", reason="x" * 5_000)
        (outcome,) = await small.outcomes_once(1)
    assert (outcome.kind, outcome.detail) == ("cancelled", "x" * MAX_DETAIL)


async def test_event_too_large_for_its_topic_costs_only_itself(bench: Bench) -> None:
    """The tuner does without it; the worker goes on and tells it of the next call."""
    url = bench.store._client.params.url
    events = TopicSpec(name=TOPICS.name(LATENCY_EVENTS), partitions=1, max_message_bytes=4_096)
    clock = SystemClock(time_scale=1_000.0)
    broker = MemoryBroker(clock)
    await broker.create_topics([events])

    async with (
        open_bench(url, f"{uuid.uuid4().hex}:", make_broker=lambda _: broker) as small,
        small.worker() as worker,
    ):
        await small.send(bound_call("a", parents=("p" * 100,) * 100), bound_call("b"))
        await small.outcomes_once(2)
        await worker.drained()
        assert [event.request_id for event in await small.events()] == ["b"]


async def test_drain_hands_back_waiting_calls_and_finishes_running_ones(bench: Bench) -> None:
    """On stop, waiting calls go back, running ones complete, all is committed, then `gone`."""
    bench.engine.hang()
    async with bench.worker(ONE_AT_A_TIME) as worker:
        await bench.send(*(bound_call(f"c{i}", score=float(i)) for i in range(6)))
        await bench.running(1)
        await bench.waiting(5)
        worker.stop.set()
        handed = await until(bench.handed_back, lambda found: len(found) == 5)
        bench.engine.recover()
        await worker.drained()
    assert sorted(request.request_id for request in handed) == ["c1", "c2", "c3", "c4", "c5"]
    assert {request.attempt for request in handed} == {1}
    assert [outcome.request_id for outcome in await bench.outcomes()] == ["c0"]
    assert await bench.committed() == (6, "")
    assert (await bench.states())[-1].phase == "gone"
    assert bench.metrics.totals()["hexflow_calls_handed_back_total{cause=drain}"] == 5


async def test_draining_worker_says_so_and_takes_nothing(bench: Bench) -> None:
    """While it drains it is unready, reports `draining`, and forwards what still arrives."""
    bench.engine.hang()
    async with bench.worker() as worker:
        await bench.send(bound_call("running"))
        await bench.running(1)
        worker.stop.set()
        await until(bench.states, lambda found: found[-1].phase == "draining")
        assert bench.health.unready_causes()
        await bench.send(bound_call("late"))
        (request,) = await until(bench.handed_back, lambda found: len(found) == 1)
        assert (request.request_id, request.attempt) == ("late", 1)
        bench.engine.recover()
        await worker.drained()
    assert [outcome.request_id for outcome in await bench.outcomes()] == ["running"]
    assert await bench.committed() == (2, "")


async def test_drain_bound_hands_back_what_still_runs(bench: Bench) -> None:
    """Calls that do not finish in time are cut off and handed back; then it leaves in order."""
    bench.engine.hang()
    async with bench.worker(altered(drain_s=0.1)) as worker:
        await bench.send(bound_call("slow"))
        await bench.running(1)
        await worker.drained()
    (request,) = await bench.handed_back()
    assert (request.request_id, request.attempt) == ("slow", 1)
    assert (await bench.states())[-1].phase == "gone"
    assert bench.engine.kv_used_tokens() == 0


async def test_idle_drain_is_quick_and_complete(bench: Bench) -> None:
    """A worker without work leaves with begin, serving, draining, gone in one epoch."""
    async with bench.worker() as worker:
        await worker.drained()
        assert worker.task.result() is None
    last = (await bench.states())[-1]
    assert (last.phase, last.num_waiting, last.num_running) == ("gone", 0, 0)


class OddEngine(SimulatedEngine):
    """An engine whose results are whatever `result` says, or its words of failure."""

    result: Finished | str = Finished(text="fine", usage=Usage())

    async def generate(self, call: BoundCall, engine_id: str) -> AsyncGenerator[EngineEvent, None]:
        """Give the result at once."""
        del call, engine_id
        if isinstance(self.result, str):
            raise GenerationFailed(self.result)
        yield FirstToken()
        yield self.result


def nested(depth: int) -> dict[str, object]:
    """Return an object within an object, so often."""
    found: dict[str, object] = {}
    for _ in range(depth):
        found = {"in": found}
    return found


@pytest.mark.parametrize(
    "odd",
    [
        {"text": "half an emoji: \ud83d"},
        {"finish_reason": "\ud83d"},
        {"message": {"\ud83d": 1}},
        {"message": {"big": 10**30}},
        {"message": nested(900)},
        {"usage": Usage(input_tokens=2**50)},
        {"usage": Usage(output_tokens=-1)},
    ],
    ids=lambda odd: next(iter(odd)),
)
async def test_a_result_that_no_message_carries_fails_its_call_alone(
    bench: Bench, odd: dict[str, Any]
) -> None:
    """Its producer is told what is wrong; the worker goes on with the next call."""
    async with OddEngine.open(SPEC, bench.clock) as engine:
        bench.engine = engine
        engine.result = Finished(**({"text": "fine", "usage": Usage()} | odd))
        async with bench.worker():
            await bench.send(bound_call("odd", attempt=2, failures=4))
            (failed,) = await bench.outcomes_once(1)
            engine.result = OddEngine.result
            await bench.send(bound_call("fine"))
            _, fine = await bench.outcomes_once(2)
    assert (failed.kind, failed.reason) == ("failed", "generation_failed")
    assert failed.detail.startswith("the engine's result is none")
    assert (fine.kind, fine.text) == ("completed", "fine")


async def test_what_an_engine_says_of_its_failure_may_be_no_text(bench: Bench) -> None:
    """Half a character in an error message is replaced: the failure is told all the same."""
    async with OddEngine.open(SPEC, bench.clock) as engine:
        bench.engine = engine
        engine.result = "so \ud83d"
        async with bench.worker():
            await bench.send(bound_call("a", attempt=2, failures=4))
            (outcome,) = await bench.outcomes_once(1)
    assert (outcome.kind, outcome.detail) == ("failed", "so ?")
