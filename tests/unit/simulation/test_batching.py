"""One instance's continuous batching: times, order, memory."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.domain.trace import PrefixPart
from shared.errors import ConfigError, InvalidCall
from shared.scheduling.latency import service_s
from shared.simulation.batching import BatchEvent, BatchingInstance
from tests.support.simulated_queries import make_spec

coefficients = st.floats(0.0, 0.01)
latencies = st.builds(
    LatencyModel,
    prefill_s_per_token=coefficients,
    weights_s=st.floats(1e-4, 0.1),
    overhead_s=coefficients,
    seq_s=coefficients,
    kv_s_per_token=st.floats(0.0, 1e-4),
    chunk_waste_tokens=st.integers(0, 200),
    attention_s_per_pair=st.floats(0.0, 1e-6),
    pair_s=coefficients,
    trio_s=coefficients,
    batched_s=coefficients,
    joined_s=coefficients,
)


def drain(instance: BatchingInstance) -> list[BatchEvent]:
    """All events until the instance is idle."""
    events = []
    while not math.isinf(at_s := instance.next_event_s()):
        events += instance.advance(at_s)
    return events


def ends_s(events: list[BatchEvent]) -> dict[int, float]:
    """Handle -> end."""
    return {event.handle: event.at_s for event in events if event.kind == "finished"}


def firsts_s(events: list[BatchEvent]) -> dict[int, float]:
    """Handle -> first token."""
    return {event.handle: event.at_s for event in events if event.kind == "first_token"}


@given(
    latency=latencies,
    input_tokens=st.integers(1, 9_000),
    output_tokens=st.integers(1, 900),
    budget=st.integers(64, 4_096),
    start_s=st.floats(0.0, 1_000.0),
)
@settings(max_examples=100, deadline=None)
def test_call_alone_takes_the_closed_form(
    latency: LatencyModel, input_tokens: int, output_tokens: int, budget: int, start_s: float
) -> None:
    """A call alone takes exactly what the dispatcher expects of it."""
    spec = make_spec(latency=latency, max_batched_tokens=budget)
    instance = BatchingInstance(spec)
    instance.add(1, now_s=start_s, input_tokens=input_tokens, output_tokens=output_tokens)
    expected_s = service_s(
        spec, input_tokens=input_tokens, cached_tokens=0, output_tokens=output_tokens
    )
    taken_s = ends_s(drain(instance))[1] - start_s
    assert taken_s == pytest.approx(expected_s, rel=1e-9, abs=1e-9)


def test_cached_prompt_takes_the_closed_form() -> None:
    """With a warm prefix the cost is that of the tokens not found, in whole blocks."""
    spec = make_spec()
    instance = BatchingInstance(spec)
    prefix = (PrefixPart("template", 3_000),)
    instance.add(1, now_s=0.0, input_tokens=3_500, output_tokens=5, prefix=prefix)
    drain(instance)
    instance.add(2, now_s=100.0, input_tokens=4_000, output_tokens=5, prefix=prefix)
    events = drain(instance)
    cached = 3_000 - 3_000 % spec.block_tokens
    assert {event.cached_tokens for event in events} == {cached}
    expected_s = service_s(spec, input_tokens=4_000, cached_tokens=cached, output_tokens=5)
    assert ends_s(events)[2] - 100.0 == pytest.approx(expected_s)


def test_steady_batch_reaches_the_roofline() -> None:
    """A full batch generates `batch` tokens per iteration of the modelled length."""
    spec = make_spec(kv_tokens=10_000_000)
    instance = BatchingInstance(spec)
    batch, steps, prompt = 64, 2_000, 16
    for handle in range(batch):
        instance.add(handle, now_s=0.0, input_tokens=prompt, output_tokens=steps)
    events = drain(instance)
    taken_s = max(ends_s(events).values()) - max(firsts_s(events).values())
    model = spec.latency
    kv_tokens = batch * (prompt + steps / 2)
    step_s = (
        model.overhead_s + model.weights_s + batch * model.seq_s + kv_tokens * model.kv_s_per_token
    )
    assert batch * steps / taken_s == pytest.approx(batch / step_s, rel=1e-3)


def test_prefill_reaches_the_roofline() -> None:
    """Prompts alone are processed at the compute speed, waste per chunk included."""
    spec = make_spec(max_num_seqs=1)
    instance = BatchingInstance(spec)
    for handle in range(20):
        instance.add(handle, now_s=0.0, input_tokens=4_096, output_tokens=1)
    end_s = max(ends_s(drain(instance)).values())
    model = spec.latency
    chunk_s = model.overhead_s + (2_048 + 64) * model.prefill_s_per_token
    assert end_s == pytest.approx(40 * chunk_s)


def test_attention_grows_with_the_square_of_a_prompt_however_it_is_cut() -> None:
    """1,024 tokens in eight chunks make 1,024² / 2 pairs; a cached half leaves three quarters."""
    latency = LatencyModel(prefill_s_per_token=0.0, weights_s=1.0, attention_s_per_pair=1e-6)
    spec = make_spec(latency=latency, max_batched_tokens=128, block_tokens=16)
    instance = BatchingInstance(spec)
    half = (PrefixPart("half", 512),)
    instance.add(1, now_s=0.0, input_tokens=1_024, output_tokens=1, prefix=half)
    assert ends_s(drain(instance))[1] == pytest.approx(8.0 + 1_024**2 / 2 * 1e-6)
    instance.add(2, now_s=100.0, input_tokens=1_024, output_tokens=1, prefix=half)
    assert ends_s(drain(instance))[2] - 100.0 == pytest.approx(4.0 + 512 * (512 + 256) * 1e-6)


def test_attention_of_neighbours_adds_up() -> None:
    """Two prompts in one iteration attend each to their own tokens only."""
    latency = LatencyModel(prefill_s_per_token=0.0, weights_s=1.0, attention_s_per_pair=1e-6)
    instance = BatchingInstance(make_spec(latency=latency))
    for handle, length in ((1, 400), (2, 1_000)):
        instance.add(handle, now_s=0.0, input_tokens=length, output_tokens=1)
    pairs = 400**2 / 2 + 1_000**2 / 2
    assert list(ends_s(drain(instance)).values()) == pytest.approx(2 * [1.0 + pairs * 1e-6])


def test_one_call_that_decodes_alone_is_quicker() -> None:
    """Five prompts take 0.5 s more, a step of five or four as well; three, two and one take less.

    Each call has one token more than the one before: the batch loses one call after every step.
    """
    latency = LatencyModel(
        prefill_s_per_token=0.0, weights_s=1.0, pair_s=0.125, trio_s=0.25, batched_s=0.5
    )
    instance = BatchingInstance(make_spec(latency=latency))
    for handle in range(1, 6):
        instance.add(handle, now_s=0.0, input_tokens=10, output_tokens=1 + handle)
    ends = ends_s(drain(instance))
    assert ends == pytest.approx({1: 3.0, 2: 4.5, 3: 5.75, 4: 6.875, 5: 7.875})


def test_sequences_that_share_an_iteration_with_a_prompt_take_longer() -> None:
    """0.25 s for each beyond the first: two prompts, then a prompt beside two decoding calls."""
    latency = LatencyModel(prefill_s_per_token=0.0, weights_s=1.0, joined_s=0.25)
    instance = BatchingInstance(make_spec(latency=latency))
    for handle in (1, 2):
        instance.add(handle, now_s=0.0, input_tokens=10, output_tokens=4)
    instance.advance(1.25)
    instance.add(3, now_s=1.25, input_tokens=10, output_tokens=2)
    ends = ends_s(drain(instance))
    prompt_beside_two = 1.0 + 2 * 0.25
    assert ends == pytest.approx(
        {3: 1.25 + prompt_beside_two + 1.0, 1: 5.25 - 0.5, 2: 1.25 + prompt_beside_two + 2.0}
    )


def test_decodes_go_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    """A decoding neighbour takes one token of every chunk."""
    spec = make_spec(
        max_batched_tokens=101,
        latency=LatencyModel(prefill_s_per_token=0.01, weights_s=0.5),
    )
    instance = BatchingInstance(spec)
    instance.add(1, now_s=0.0, input_tokens=1, output_tokens=1_000)
    assert instance.advance(0.5) == [BatchEvent(1, "first_token", 0.5, 0)]
    instance.add(2, now_s=0.5, input_tokens=200, output_tokens=1)
    events = [event for event in drain(instance) if event.handle == 2]
    # Two iterations of 100 prompt tokens, a second each.
    assert events[0].kind == "first_token"
    assert events[0].at_s == pytest.approx(2.5)
    assert events[1].kind == "finished"


def test_call_added_during_an_iteration_waits_for_its_end() -> None:
    """An iteration in flight never changes."""
    instance = BatchingInstance(make_spec(latency=LatencyModel(prefill_s_per_token=0, weights_s=1)))
    instance.add(1, now_s=0.0, input_tokens=1, output_tokens=10)
    assert instance.next_event_s() == 1.0
    instance.advance(1.0)
    instance.next_event_s()
    instance.add(2, now_s=3.25, input_tokens=1, output_tokens=1)
    assert firsts_s(drain(instance))[2] == 5.0


def test_call_added_at_an_iteration_boundary_enters_the_next() -> None:
    """An instant's arrivals come before its iteration starts."""
    instance = BatchingInstance(make_spec(latency=LatencyModel(prefill_s_per_token=0, weights_s=1)))
    instance.add(1, now_s=0.0, input_tokens=1, output_tokens=10)
    instance.add(2, now_s=3.0, input_tokens=1, output_tokens=1)
    assert firsts_s(drain(instance))[2] == 4.0


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_asking_in_between_changes_nothing(instants: list[float]) -> None:
    """Events do not depend on when `advance` is called."""
    spec = make_spec(max_num_seqs=3, kv_tokens=1_600)

    def run(stops: list[float]) -> list[BatchEvent]:
        instance = BatchingInstance(spec)
        for handle in range(6):
            instance.add(handle, now_s=0.0, input_tokens=400 + handle, output_tokens=100)
        events = []
        for stop_s in sorted(stops):
            events += instance.advance(stop_s)
        return events + drain(instance)

    asked, plain = run(instants), run([])
    assert [event[:2] for event in asked] == [event[:2] for event in plain]
    assert [e.at_s for e in asked] == pytest.approx([e.at_s for e in plain])


def test_abort_frees_memory_at_once() -> None:
    """An aborted call holds no KV memory, brings no event and leaves its place."""
    instance = BatchingInstance(make_spec())
    instance.add(1, now_s=0.0, input_tokens=1_000, output_tokens=100)
    instance.add(2, now_s=0.0, input_tokens=500, output_tokens=100)
    instance.advance(1.0)
    before = instance.kv_used_tokens
    instance.abort(1, now_s=1.0)
    assert instance.kv_used_tokens <= before - 1_000
    assert instance.num_running == 1
    assert {event.handle for event in drain(instance)} == {2}
    assert instance.kv_used_tokens == 0


def test_abort_during_prefill_leaves_no_half_computed_prefix() -> None:
    """Of an aborted prompt only what was computed can be found again."""
    spec = make_spec()
    prefix = (PrefixPart("template", 4_096),)
    instance = BatchingInstance(spec)
    instance.add(1, now_s=0.0, input_tokens=5_000, output_tokens=1, prefix=prefix)
    one_chunk_s = instance.next_event_s()
    instance.advance(one_chunk_s + 0.1)
    instance.abort(1, now_s=one_chunk_s + 0.1)
    assert instance.kv_used_tokens == 0
    instance.add(2, now_s=10.0, input_tokens=5_000, output_tokens=1, prefix=prefix)
    assert drain(instance)[0].cached_tokens == 2_048


def test_aborting_a_waiting_or_an_unknown_call_is_harmless() -> None:
    """Handles may have ended by the time they are aborted."""
    instance = BatchingInstance(make_spec(max_num_seqs=1))
    instance.add(1, now_s=0.0, input_tokens=10, output_tokens=5)
    instance.add(2, now_s=0.0, input_tokens=10, output_tokens=5)
    instance.next_event_s()
    assert instance.num_waiting == 1
    instance.abort(2, now_s=0.0)
    instance.abort(77, now_s=0.0)
    assert instance.num_waiting == 0
    assert {event.handle for event in drain(instance)} == {1}


def test_memory_shortage_preempts_the_latest_call_which_computes_again() -> None:
    """Both calls end; the later one loses its memory and keeps its tokens."""
    spec = make_spec(kv_tokens=320)
    instance = BatchingInstance(spec)
    for handle in (1, 2):
        instance.add(handle, now_s=0.0, input_tokens=100, output_tokens=120)
    events = drain(instance)
    assert instance.num_preemptions == 1
    ends = ends_s(events)
    assert ends[1] < ends[2]
    assert sum(event.kind == "first_token" for event in events) == 2
    assert instance.kv_used_tokens == 0


def test_priority_decides_who_waits_and_who_is_preempted() -> None:
    """The smallest priority enters first; the largest loses its memory."""
    spec = make_spec(kv_tokens=320)
    instance = BatchingInstance(spec)
    instance.add(1, now_s=0.0, input_tokens=100, output_tokens=120, priority=9.0)
    instance.add(2, now_s=0.0, input_tokens=100, output_tokens=120, priority=1.0)
    ends = ends_s(drain(instance))
    assert instance.num_preemptions == 1
    assert ends[2] < ends[1]


def test_large_call_without_memory_lets_small_ones_pass() -> None:
    """A waiting call that does not fit does not block those that do."""
    instance = BatchingInstance(make_spec(kv_tokens=1_600))
    instance.add(1, now_s=0.0, input_tokens=1_000, output_tokens=200)
    instance.advance(1.0)
    instance.add(2, now_s=1.0, input_tokens=900, output_tokens=2)
    instance.add(3, now_s=1.0, input_tokens=50, output_tokens=2)
    ends = ends_s(drain(instance))
    assert ends[3] < ends[1] < ends[2]


def test_large_call_is_not_passed_for_ever() -> None:
    """After a number of passes the calls behind it wait."""
    instance = BatchingInstance(make_spec(kv_tokens=1_600))
    instance.add(0, now_s=0.0, input_tokens=1_000, output_tokens=500)
    instance.advance(1.0)
    instance.add(1, now_s=1.0, input_tokens=900, output_tokens=2)
    for handle in range(2, 60):
        instance.add(handle, now_s=1.0, input_tokens=50, output_tokens=40)
    ends = ends_s(drain(instance))
    passed = sum(ends[handle] < ends[1] for handle in range(2, 60))
    assert 10 <= passed <= 30


def test_siblings_share_their_prefix_in_memory() -> None:
    """Calls with a common prefix that run together hold it once."""
    prefix = (PrefixPart("schema", 1_600),)
    instance = BatchingInstance(make_spec())
    for handle in range(3):
        instance.add(handle, now_s=0.0, input_tokens=1_616, output_tokens=50, prefix=prefix)
    instance.advance(2.0)
    assert instance.num_running == 3
    assert instance.kv_used_tokens < 1_600 + 3 * 200


def test_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    """Short memory costs the oldest prefix its last blocks first."""
    spec = make_spec(kv_tokens=3_200)
    instance = BatchingInstance(spec)
    for handle, name in enumerate(["old", "new"]):
        instance.add(
            handle,
            now_s=10.0 * handle,
            input_tokens=1_000,
            output_tokens=1,
            prefix=(PrefixPart(name, 960),),
        )
        drain(instance)
    instance.add(2, now_s=30.0, input_tokens=1_600, output_tokens=1)
    drain(instance)
    found = []
    for handle, name in enumerate(["new", "old"], start=3):
        instance.add(
            handle,
            now_s=50.0 * handle,
            input_tokens=1_000,
            output_tokens=1,
            prefix=(PrefixPart(name, 960),),
        )
        found.append(drain(instance)[0].cached_tokens)
    assert found == [960, 640]


def test_equal_ids_after_different_texts_are_different() -> None:
    """A part is found only behind the same parts."""
    instance = BatchingInstance(make_spec())
    tail = PrefixPart("tail", 320)
    instance.add(
        1, now_s=0.0, input_tokens=700, output_tokens=1, prefix=(PrefixPart("a", 320), tail)
    )
    drain(instance)
    instance.add(
        2, now_s=9.0, input_tokens=700, output_tokens=1, prefix=(PrefixPart("b", 320), tail)
    )
    assert drain(instance)[0].cached_tokens == 0


def test_no_cache_no_hits() -> None:
    """With prefix caching off nothing is found and nothing is shared."""
    instance = BatchingInstance(make_spec(prefix_caching=False))
    prefix = (PrefixPart("a", 320),)
    for handle in range(2):
        instance.add(handle, now_s=10.0 * handle, input_tokens=400, output_tokens=1, prefix=prefix)
        assert drain(instance)[0].cached_tokens == 0


def test_whole_prompt_in_cache_still_computes_a_block() -> None:
    """At least one token is always computed."""
    instance = BatchingInstance(make_spec())
    prefix = (PrefixPart("a", 320),)
    for handle in range(2):
        instance.add(handle, now_s=10.0 * handle, input_tokens=320, output_tokens=1, prefix=prefix)
        events = drain(instance)
    assert events[0].cached_tokens == 304


def test_long_life_forgets_prefixes_that_are_gone() -> None:
    """Memory of the model itself stays bounded however many prefixes come by."""
    instance = BatchingInstance(make_spec(kv_tokens=3_200))
    for handle in range(12_000):
        at_s = float(handle)
        instance.add(
            handle,
            now_s=at_s,
            input_tokens=200,
            output_tokens=1,
            prefix=(PrefixPart(f"question {handle}", 160),),
        )
        instance.advance(at_s + 0.9)
    assert len(instance._nodes) < 6_000
    assert instance.kv_used_tokens == 0


def test_room_ends_with_places_memory_and_the_turn_for_prefill() -> None:
    """An engine has room for what it would batch next, and for nothing else."""
    instance = BatchingInstance(make_spec(max_num_seqs=4, kv_tokens=4_800))
    assert instance.fits_now(4_000, 500)
    instance.add(1, now_s=0.0, input_tokens=1_500, output_tokens=100)
    assert instance.fits_now(500, 10), "still within one iteration's budget"
    assert not instance.fits_now(3_300, 10), "memory"
    instance.add(2, now_s=0.0, input_tokens=600, output_tokens=100)
    assert not instance.fits_now(10, 10), "two prompts fill the next iteration"
    instance.next_event_s()
    instance.advance(1.0)
    assert instance.num_running == 2
    assert instance.fits_now(500, 10)
    for handle in (3, 4):
        instance.add(handle, now_s=1.0, input_tokens=10, output_tokens=100)
    assert not instance.fits_now(10, 10), "places"


def test_prefix_in_use_needs_no_memory_again() -> None:
    """Room is judged with the prefix that neighbours hold already."""
    prefix = (PrefixPart("schema", 1_600),)
    instance = BatchingInstance(make_spec(kv_tokens=3_200))
    instance.add(1, now_s=0.0, input_tokens=1_800, output_tokens=50, prefix=prefix)
    instance.advance(1.0)
    assert not instance.fits_now(1_700, 10)
    assert instance.fits_now(1_700, 10, prefix)


def test_idle_instance_has_room_for_whatever_it_accepts() -> None:
    """A prediction above the whole memory does not lock a call out."""
    instance = BatchingInstance(make_spec(kv_tokens=1_600))
    assert instance.fits_now(1_000, 5_000)


def test_instance_is_idle_between_calls() -> None:
    """Nothing to do: the next event is never."""
    instance = BatchingInstance(make_spec())
    assert instance.next_event_s() == math.inf
    assert instance.advance(5.0) == []
    instance.add(1, now_s=7.0, input_tokens=10, output_tokens=2)
    events = drain(instance)
    assert [event.kind for event in events] == ["first_token", "finished"]
    assert instance.next_event_s() == math.inf
    assert instance.busy_s == pytest.approx(events[-1].at_s - 7.0)


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens"), [(0, 1), (1, 0), (-5, 3), (900, 800), (40_000, 1)]
)
def test_impossible_calls_are_refused(input_tokens: int, output_tokens: int) -> None:
    """What can never run is refused at once."""
    instance = BatchingInstance(make_spec(kv_tokens=1_600))
    with pytest.raises(InvalidCall):
        instance.add(1, now_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens)


def test_handles_are_unique() -> None:
    """A handle in use is refused; one that ended can be used again."""
    instance = BatchingInstance(make_spec())
    instance.add(1, now_s=0.0, input_tokens=10, output_tokens=2)
    with pytest.raises(InvalidCall):
        instance.add(1, now_s=0.0, input_tokens=10, output_tokens=2)
    drain(instance)
    instance.add(1, now_s=50.0, input_tokens=10, output_tokens=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_batched_tokens", 8),
        ("block_tokens", 0),
        ("kv_tokens", 15),
        ("latency", LatencyModel(prefill_s_per_token=1.0, weights_s=0.0)),
        ("latency", LatencyModel(prefill_s_per_token=-1.0, weights_s=1.0)),
        ("latency", LatencyModel(prefill_s_per_token=math.nan, weights_s=1.0)),
    ],
)
def test_descriptions_that_make_no_instance_are_refused(field: str, value: object) -> None:
    """The error names the instance and the field."""
    spec: InstanceSpec = make_spec("broken", **{field: value})
    with pytest.raises(ConfigError, match=rf"broken.*{field}"):
        BatchingInstance(spec)
