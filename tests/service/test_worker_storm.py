"""Seeded storms: many faults at random, and hostile bytes; nothing is lost, nothing loops."""

import asyncio
import random
from collections import Counter

import pytest

from shared.contracts.codec import encode
from tests.support.worker_bench import INSTANCE, TOPICS, Bench, altered, bound_call, until

NUM_CALLS = 120
NUM_MUTANTS = 1_500
PARAMS = altered(capacity=4, drain_s=0.1, standby_s=0.05)


@pytest.mark.parametrize("seed", range(4))
async def test_no_call_is_lost_in_a_storm(bench: Bench, seed: int) -> None:
    """Under wipes, crashes, drains, fences, failures and cancels every call leaves exactly once.

    A call may leave more than once only if a crash or fence hit the worker between publishing and
    committing, and then all its ends are of one and the same call.
    """
    rng = random.Random(seed)
    names = [f"c{index}" for index in range(NUM_CALLS)]
    sent = 0
    while sent < NUM_CALLS or await _num_left(bench, names) > 0:
        async with bench.worker(PARAMS) as worker:
            for _ in range(rng.randint(2, 6)):
                batch = names[sent : sent + rng.randint(0, 15)]
                calls = [bound_call(name, score=rng.random()) for name in batch]
                await bench.send(*calls)
                sent += len(batch)
                await _fault(bench, rng)
                await asyncio.sleep(rng.random() * 0.05)
            if sent == NUM_CALLS:
                bench.engine.recover()
            if rng.random() < 0.5:
                await worker.killed()
    async with bench.worker(PARAMS) as worker:  # the last one may have been killed
        await until(bench.committed, lambda found: found == (NUM_CALLS, ""))
        await worker.drained()
    ends = Counter(outcome.request_id for outcome in await bench.outcomes())
    again = Counter(request.request_id for request in await bench.handed_back())
    assert set(ends) | set(again) == set(names)


async def test_quiet_run_has_no_duplicates(bench: Bench) -> None:
    """Without crashes each call leaves exactly once although the store is wiped all the time."""
    rng = random.Random(7)
    async with bench.worker() as worker:
        for index in range(60):
            await bench.send(bound_call(f"c{index}", score=rng.random()))
            if index % 10 == 0:
                await bench.store.urgency_set(INSTANCE).drop()
        await bench.outcomes_once(60)
        await worker.drained()
    counts = Counter(outcome.request_id for outcome in await bench.outcomes())
    assert len(counts) == 60
    assert set(counts.values()) == {1}


async def test_mutated_messages_are_each_accounted_for(bench: Bench) -> None:
    """Bytes flipped, cut and inserted at random: each record is buried or ends, none blocks."""
    rng = random.Random(3)
    async with bench.worker() as worker:
        for index in range(NUM_MUTANTS):
            raw = bytearray(encode(bound_call(f"m{index}", output_tokens=1)))
            for _ in range(rng.randint(1, 4)):
                _mutate(raw, rng)
            await bench.send_raw(bytes(raw))
        await bench.send(bound_call("last"))
        tp_end = NUM_MUTANTS + 1
        await until(bench.committed, lambda found: found[0] == tp_end)
        await worker.drained()
    assert "last" in {outcome.request_id for outcome in await bench.outcomes()}
    totals = bench.metrics.totals()
    num_buried = sum(v for k, v in totals.items() if k.startswith("hexflow_dead_letters"))
    assert num_buried > NUM_MUTANTS / 10
    assert len(await bench.records(TOPICS.name("dead-letters"))) == num_buried


def _mutate(raw: bytearray, rng: random.Random) -> None:
    place = rng.randrange(len(raw))
    kind = rng.randrange(3)
    if kind == 0:
        raw[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del raw[place : place + rng.randint(1, 8)]
        raw += b"\x00" * (not raw)
    else:
        raw[place:place] = rng.randbytes(rng.randint(1, 8))


async def _fault(bench: Bench, rng: random.Random) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        await bench.store.urgency_set(INSTANCE).drop()
    elif kind == 1:
        await bench.fence()
    elif kind == 2:
        bench.engine.fail_next(rng.randint(1, 2), after_first_token=rng.random() < 0.5)
    elif kind == 3:
        await bench.cancel(f"query-of-c{rng.randrange(NUM_CALLS)}")
    elif kind == 4:
        bench.engine.hang()
        await asyncio.sleep(0.02)
        bench.engine.recover()


async def _num_left(bench: Bench, names: list[str]) -> int:
    ended = {outcome.request_id for outcome in await bench.outcomes()}
    ended |= {request.request_id for request in await bench.handed_back()}
    return len(set(names) - ended)
