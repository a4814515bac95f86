"""The worker from record to outcome, on an in-memory broker, Valkey and a simulated engine."""

import uuid

import msgspec

from shared.contracts.codec import encode
from shared.domain.instance import LatencyModel
from tests.support.worker_bench import (
    INSTANCE,
    QUICK,
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


async def test_every_call_gets_one_outcome(bench: Bench) -> None:
    """Each call ends completed exactly once, with the engine's numbers."""
    names = [f"call-{index}" for index in range(30)]
    async with bench.worker() as worker:
        await bench.send(*(bound_call(name, output_tokens=7) for name in names))
        await bench.outcomes_once(30)
        await worker.drained()
    outcomes = await bench.outcomes()
    assert sorted(outcome.request_id for outcome in outcomes) == sorted(names)
    assert {outcome.kind for outcome in outcomes} == {"completed"}
    assert {outcome.usage.output_tokens for outcome in outcomes} == {7}


async def test_outcome_tells_the_whole_story(bench: Bench) -> None:
    """An outcome carries text, times in order, budget, deadline, reason of the choice, instance."""
    async with bench.worker():
        await bench.send(bound_call("a", deadline_s=5e11))
        (outcome,) = await bench.outcomes_once(1)
    times = outcome.times
    assert outcome.text
    assert len(outcome.text.split()) == 5
    assert outcome.instance_id == INSTANCE
    assert outcome.terms is not None
    assert (outcome.t_slo_s, outcome.deadline_s, outcome.query_id) == (10.0, 5e11, "query-of-a")
    assert (times.ready_at_s, times.dispatched_at_s) == (1_000.0, 1_001.0)
    assert times.queued_at_s is not None
    assert times.started_at_s is not None
    assert times.first_token_at_s is not None
    assert times.finished_at_s is not None
    assert times.queued_at_s <= times.started_at_s < times.first_token_at_s < times.finished_at_s


async def test_counters_equal_what_was_published(bench: Bench) -> None:
    """The worker's counters say what an independent reader of the topics counts."""
    async with bench.worker() as worker:
        await bench.send(*(bound_call(f"c{index}") for index in range(12)))
        await bench.send_raw(b"garbage")
        await bench.outcomes_once(12)
        bench.engine.fail_next(1)
        await bench.send(bound_call("again"))
        await until(bench.handed_back, lambda found: len(found) == 1)
        await until(bench.dead_letters, lambda found: len(found) == 1)
        await worker.drained()
    totals = bench.metrics.totals()
    assert totals["hexflow_call_outcomes_total{kind=completed,reason=}"] == 12
    assert len(await bench.outcomes()) == 12
    assert totals["hexflow_calls_handed_back_total{cause=generation_failed}"] == 1
    assert totals["hexflow_dead_letters_total{reason=undecodable}"] == 1
    assert totals["hexflow_calls_started_total{}"] == 13
    assert totals["hexflow_messages_read_total{topic=instance}"] == 14


async def test_tuner_learns_of_every_ended_call(bench: Bench) -> None:
    """Each outcome is followed by one latency event with the predictions used and no text."""
    async with bench.worker() as worker:
        await bench.send(bound_call("a", t_comp_s=2.5, stage="revise", iteration=3))
        await bench.outcomes_once(1)
        await worker.drained()
    (event,) = await bench.events()
    assert (event.request_id, event.stage, event.iteration, event.kind) == (
        "a",
        "revise",
        3,
        "completed",
    )
    assert (event.t_comp_s, event.alpha, event.t_slo_s) == (2.5, 0.2, 10.0)
    assert (event.arrival_s, event.slo_s, event.usage.output_tokens) == (900.0, 100.0, 5)


async def test_most_urgent_call_starts_first(bench: Bench) -> None:
    """A more urgent call that came later overtakes every waiting one, and equals keep order."""
    bench.engine.hang()
    async with bench.worker(ONE_AT_A_TIME):
        await bench.send(bound_call("running", score=50.0))
        await bench.running(1)
        scores = {"late": 40.0, "tie-1": 30.0, "tie-2": 30.0, "urgent": -5.0}
        await bench.send(*(bound_call(name, score=score) for name, score in scores.items()))
        await bench.waiting(4)
        bench.engine.recover()
        outcomes = await bench.outcomes_once(5)
    order = [outcome.request_id for outcome in outcomes]
    assert order == ["running", "urgent", "tie-1", "tie-2", "late"]


async def test_engine_gets_no_more_than_it_can_batch(bench: Bench) -> None:
    """Calls wait in our queue, not in the engine, when its memory or capacity is used up."""
    large = 6_000  # two of these exceed the engine's KV cache
    spec = msgspec.structs.replace(SPEC, kv_tokens=10_000)
    async with open_bench(_url_of(bench), f"{uuid.uuid4().hex}:", spec=spec) as roomy:
        roomy.engine.hang()
        async with roomy.worker():
            await roomy.send(*(bound_call(f"c{i}", input_tokens=large) for i in range(3)))
            await roomy.running(1)
            await roomy.waiting(2)
            assert await roomy._started() == 1
            roomy.engine.recover()
            assert len(await roomy.outcomes_once(3)) == 3


async def test_call_too_large_for_the_engine_does_not_block_the_queue(bench: Bench) -> None:
    """A call that never fits is handed back as failed; the calls behind it run."""
    async with bench.worker(altered(max_attempts=1)):
        await bench.send(bound_call("huge", score=-1.0, input_tokens=90_000), bound_call("small"))
        outcomes = await bench.outcomes_once(2)
    assert {o.request_id: o.kind for o in outcomes} == {"huge": "failed", "small": "completed"}


async def test_repeated_deliveries_are_dropped(bench: Bench) -> None:
    """The same attempt delivered again, while held or after its end, gives no second outcome."""
    call = bound_call("a")
    bench.engine.hang()
    async with bench.worker() as worker:
        await bench.send(call, call)
        await bench.running(1)
        bench.engine.recover()
        await bench.outcomes_once(1)
        await bench.send(call, bound_call("b"))
        await bench.outcomes_once(2)
        await worker.drained()
    assert [outcome.request_id for outcome in await bench.outcomes()] == ["a", "b"]
    assert bench.metrics.totals()["hexflow_duplicates_dropped_total{topic=instance}"] == 2
    assert await bench.committed() == (4, "")


async def test_later_attempt_of_an_answered_call_is_dropped(bench: Bench) -> None:
    """A call handed back by recovery although it was answered here is not run again."""
    call = bound_call("a")
    async with bench.worker() as worker:
        await bench.send(call)
        await bench.outcomes_once(1)
        await bench.send(replaced(call, attempt=1), bound_call("b"))
        await bench.outcomes_once(2)
        await worker.drained()
    assert [outcome.request_id for outcome in await bench.outcomes()] == ["a", "b"]


async def test_submitted_again_after_its_end_runs_again(bench: Bench) -> None:
    """A producer that lost its outcomes and submits the same id anew gets an answer again."""
    call = bound_call("a")
    async with bench.worker():
        await bench.send(call)
        await bench.outcomes_once(1)
        await bench.send(replaced(call, ready_at_s=2_000.0))
        assert len(await bench.outcomes_once(2)) == 2


async def test_two_deliveries_of_a_waiting_call_go_back_as_the_later_attempt(bench: Bench) -> None:
    """When two attempts of a call meet in one worker, its hand-back follows the higher one."""
    call = bound_call("a")
    bench.engine.hang()
    async with bench.worker(ONE_AT_A_TIME) as worker:
        await bench.send(bound_call("running"))
        await bench.running(1)
        await bench.send(call, replaced(call, attempt=4))
        await bench.waiting(1)
        bench.engine.recover()
        worker.stop.set()
        await worker.drained()
    handed = await bench.handed_back()
    assert [(request.request_id, request.attempt) for request in handed] == [("a", 5)]
    assert await bench.committed() == (3, "")


async def test_poison_goes_to_dead_letters_and_blocks_nothing(bench: Bench) -> None:
    """Unreadable records are buried once with their bytes; the calls around them complete."""
    async with bench.worker() as worker:
        await bench.send_raw(b"\xff\xfe not a message")
        await bench.send(bound_call("good"))
        await bench.send_raw(encode(bound_call("x").request))
        await bench.send(bound_call("also-good"))
        letters = await until(bench.dead_letters, lambda found: len(found) == 2)
        await bench.outcomes_once(3)
        await worker.drained()
    assert {letter.value for letter in letters} >= {b"\xff\xfe not a message"}
    kinds = {outcome.request_id: outcome.kind for outcome in await bench.outcomes()}
    assert kinds == {"good": "completed", "also-good": "completed", "x": "rejected"}
    assert await bench.committed() == (4, "")


async def test_unreadable_call_with_readable_id_is_rejected(bench: Bench) -> None:
    """A producer whose call cannot be decoded is told so on its own reply partition."""
    call = bound_call("broken", reply_to=reply_to("stage-results", 1))
    raw = encode(call).replace(b"t_comp_s\xcb\x3f", b"t_comp_s\xcb\xbf")  # a negative time
    assert raw != encode(call)
    async with bench.worker():
        await bench.send_raw(raw)
        (outcome,) = await bench.outcomes_once(1)
    assert (outcome.request_id, outcome.kind, outcome.reason) == (
        "broken",
        "rejected",
        "undecodable",
    )
    records = await bench.records(TOPICS.name("stage-results"))
    assert [record.tp.partition for record in records] == [1]


async def test_state_reports_are_exact(bench: Bench) -> None:
    """A state counts waiting and running calls, their work in full, and the last offset in it."""
    bench.engine.hang()
    async with bench.worker(altered(capacity=2)):
        await bench.send(*(bound_call(f"c{i}", t_comp_s=float(i + 1)) for i in range(5)))
        await bench.waiting(3)
        state = (await until(bench.states, lambda found: found[-1].num_waiting == 3))[-1]
        assert (state.num_running, state.accounted_offset) == (2, 4)
        assert state.backlog_s == 1.0 + 2 + 3 + 4 + 5
        assert state.backlog_tokens == 3 * (50 + 5)
        assert (state.phase, state.capacity, state.spec) == ("serving", 2, SPEC)
        bench.engine.recover()
        await bench.outcomes_once(5)
        state = (await until(bench.states, lambda found: found[-1].num_running == 0))[-1]
    assert (state.num_waiting, state.backlog_s, state.backlog_tokens) == (0, 0.0, 0)
    assert state.accounted_offset == 4


async def test_idle_worker_keeps_reporting(bench: Bench) -> None:
    """Heartbeats grow in sequence although nothing happens."""
    async with bench.worker():
        first = (await until(bench.states, lambda found: found[-1].phase == "serving"))[-1]
        later = await until(bench.states, lambda found: found[-1].seq >= first.seq + 3)
        assert later[-1].epoch == first.epoch
        assert bench.health.overdue() == []


async def test_queue_is_bounded(bench: Bench) -> None:
    """At the bound the worker stops reading and says so; later it takes the rest."""
    bench.engine.hang()
    async with bench.worker(altered(capacity=1, queue_bound=4)):
        await bench.send(*(bound_call(f"c{i}") for i in range(20)))
        await until(bench.states, lambda found: found[-1].num_waiting == 4)
        assert all(state.num_waiting <= 4 for state in await bench.states())
        bench.engine.recover()
        assert len(await bench.outcomes_once(20)) == 20


async def test_queue_is_bounded_in_bytes(bench: Bench) -> None:
    """Large records fill the queue by their size; all are served in the end."""
    size = 300_000
    bench.engine.hang()
    async with bench.worker(altered(capacity=1, queue_bytes=size)):
        await bench.send(*(bound_call(f"c{i}", prompt="x" * size) for i in range(3)))
        await bench.send(*(bound_call(f"d{i}", prompt="x" * size) for i in range(3)))
        await bench.running(1)
        bench.engine.recover()
        assert len(await bench.outcomes_once(6)) == 6


async def test_streamed_chunks_are_numbered_and_complete(bench: Bench) -> None:
    """The chunks of a streaming call, in order, are exactly the outcome's text."""
    async with bench.worker():
        await bench.send(bound_call("a", stream=True, output_tokens=60))
        (outcome,) = await bench.outcomes_once(1)
    chunks = [chunk async for chunk in bench.store.chunks("a", timeout_s=0.05)]
    assert [index for _, _, index, _ in chunks] == list(range(len(chunks)))
    assert len(chunks) > 3
    assert "".join(text for *_, text in chunks) == outcome.text


async def test_slow_engine_is_no_stall(bench: Bench) -> None:
    """A generation may take many times its expected time before it counts as failed."""
    slow = LatencyModel(prefill_s_per_token=0.001, weights_s=1.0)
    spec = msgspec.structs.replace(SPEC, latency=slow)
    async with open_bench(_url_of(bench), f"{uuid.uuid4().hex}:", spec=spec) as late:
        params = altered(QUICK, stall_floor_s=10.0, stall_factor=30.0, stall_wall_s=0.01)
        async with late.worker(params):
            await late.send(bound_call("a", t_comp_s=1.0, output_tokens=20))
            (outcome,) = await late.outcomes_once(1)
    assert outcome.kind == "completed"


def _url_of(bench: Bench) -> str:
    return bench.store._client.params.url
