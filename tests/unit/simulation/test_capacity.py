"""The fluid capacity of a fleet."""

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.domain.trace import PrefixPart, TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError
from shared.simulation.batching import BatchingInstance
from shared.simulation.capacity import fluid_capacity
from shared.simulation.fleets import builtin_fleet


def spec(instance_id: str = "a", *, weights_s=0.02, prefill=1e-4, **fields) -> InstanceSpec:
    """Return an instance; latency fields that are not given are 0."""
    latency = {
        key: fields.pop(key) for key in list(fields) if key in LatencyModel.__struct_fields__
    }
    model = LatencyModel(weights_s=weights_s, prefill_s_per_token=prefill, **latency)
    return InstanceSpec(instance_id=instance_id, gpu="X", latency=model, **fields)


def query(*calls: TraceCall, query_id: str = "q", model: str = "default") -> TraceQuery:
    """Return a query of one call per stage, stages named by their position."""
    stages = tuple(TraceStage(stage=f"s{i}", calls=(call,)) for i, call in enumerate(calls))
    return TraceQuery(query_id=query_id, model=model, stages=stages)


def call(input_tokens: int, output_tokens: int, *prefix: tuple[str, int]) -> TraceCall:
    """Return a call."""
    chain = tuple(PrefixPart(*part) for part in prefix)
    return TraceCall(input_tokens=input_tokens, output_tokens=output_tokens, prefix=chain)


def qps(queries, *fleet: InstanceSpec, **options) -> float:
    """Return the capacity of a fleet."""
    return fluid_capacity(queries, fleet, **options).qps


def test_decoding_alone_is_the_memory_bound_roofline():
    """A full batch yields `max_num_seqs` tokens each time the weights are streamed."""
    found = qps([query(call(1, 101))], spec(max_num_seqs=50))
    assert found == pytest.approx(50 / 0.02 / 101)


def test_overhead_and_per_call_terms_add_to_decoding():
    """An iteration of b calls takes overhead + weights + b × seq + KV read."""
    one = spec(max_num_seqs=50, overhead_s=0.005, seq_s=1e-4, kv_s_per_token=1e-6)
    found = qps([query(call(1, 101))], one)
    reads = 100 * 1 + 100 * 101 / 2
    assert found == pytest.approx(1 / (101 * 0.025 / 50 + 100 * 1e-4 + reads * 1e-6))


def test_attention_over_prompts_takes_its_time():
    """A prompt of 1,000 tokens makes half a million pairs."""
    one = spec(prefill=1e-3, max_batched_tokens=1_000, max_num_seqs=1, attention_s_per_pair=1e-6)
    assert qps([query(call(1_000, 1))], one) == pytest.approx(1 / (1.0 + 0.5))


def test_prompts_alone_are_the_compute_bound_roofline():
    """Each prompt costs its tokens and the waste of each chunk."""
    found = qps([query(call(5_000, 1))], spec(chunk_waste_tokens=64))
    assert found == pytest.approx(1 / ((5_000 + 3 * 64) * 1e-4))


def test_memory_bounds_the_batch():
    """With room for few tokens, iterations are shared by as many calls as fit."""
    one = spec(kv_tokens=16_000, prefill=1e-9)
    found = qps([query(call(3_000, 101))], one)
    kv_steps = 2 * 3_000 + 100 * 3_000 + 100 * 101 / 2
    assert found == pytest.approx(16_000 / kv_steps / 0.02)


def test_cut_prompts_fill_their_iterations():
    """While a prompt is cut, iterations last for the whole budget, and decoding rides along."""
    one = spec(max_batched_tokens=1_000, max_num_seqs=1, weights_s=0.05)
    found = qps([query(call(2_000, 101))], one)
    # 101 iterations besides the one that is filled, for a batch of one call at a time.
    assert found == pytest.approx(1 / (102 * 0.05 + 1 * (0.1 - 0.05)))


def test_a_prefix_counts_as_cached_only_when_it_is_used_twice():
    """Text that occurs once must be computed; what is shared need not, in whole blocks."""
    shared = [query(call(1_000, 1, ("t", 900)), query_id=str(i)) for i in range(2)]
    alone = [query(call(1_000, 1, ("t", 900)))]
    assert qps(shared, spec()) == pytest.approx(1 / (104 * 1e-4))
    assert qps(alone, spec()) == pytest.approx(1 / (1_000 * 1e-4))
    assert qps(shared, spec(prefix_caching=False)) == pytest.approx(1 / (1_000 * 1e-4))
    assert qps(shared, spec(), prefix_caching=False) == pytest.approx(1 / (1_000 * 1e-4))
    assert qps(shared, spec(prefix_caching=False), prefix_caching=True) == qps(shared, spec())


def test_a_part_is_the_same_only_after_the_same_parts():
    """Equal ids behind different text are different text."""
    mix = [query(call(1_000, 1, (head, 160), ("tail", 640)), query_id=head) for head in ("x", "y")]
    assert qps(mix, spec()) == pytest.approx(1 / (1_000 * 1e-4))


def test_two_stages_and_two_instances_by_hand():
    """The fast decoder decodes, the fast reader reads and decodes with the time it has left."""
    reader = spec("reader", weights_s=1.0, prefill=1e-4, max_num_seqs=1)
    decoder = spec("decoder", weights_s=0.01, prefill=1e-2, max_num_seqs=1)
    found = fluid_capacity([query(call(1_000, 1), call(1, 101))], [reader, decoder])
    # Per second, of d decoded by the reader and r read: r + 101 d <= 1, 1.01 (r - d) <= 1.
    rate = (1 + 101 / 1.01) / 102
    assert found.qps == pytest.approx(rate)
    assert found.calls_per_s["s0"]["reader"] == pytest.approx(rate)
    assert found.calls_per_s["s0"]["decoder"] == pytest.approx(0, abs=1e-9)
    assert found.calls_per_s["s1"]["decoder"] == pytest.approx(1 / 1.01)
    assert found.iterations_per_s == pytest.approx({"reader": 1.0, "decoder": 100.0})


def test_a_mix_hides_decoding_behind_prompts():
    """One limit binds at a time: the bound of the mix is above that of one after the other."""
    read, write = call(1_000, 1), call(1, 501)
    both = qps([query(read, write)], spec())
    one_by_one = 1 / (1 / qps([query(read)], spec()) + 1 / qps([query(write)], spec()))
    least = min(qps([query(read)], spec()), qps([query(write)], spec()))
    assert one_by_one < both <= least


def test_equal_instances_add_up():
    """A thousand instances of two kinds are solved like two, and do a thousand times as much."""
    mix = [query(call(3_000, 200), call(300, 5))]
    one = qps(mix, spec("a"))
    fleet = [spec(f"a{i}") for i in range(1_000)]
    found = fluid_capacity(mix, fleet)
    assert found.qps == pytest.approx(1_000 * one)
    assert len(set(found.calls_per_s["s0"].values())) == 1


def test_only_instances_of_the_model_count():
    """Calls go to instances that serve their model or offer it as an adapter."""
    fleet = [spec("a", model="m"), spec("b", model="n"), spec("c", model="n", adapters=("m",))]
    mix = [query(call(1_000, 10), model="m")]
    found = fluid_capacity(mix, fleet)
    assert set(found.calls_per_s["s0"]) == {"a", "c"}
    assert found.qps == pytest.approx(2 * qps(mix, fleet[0]))


def test_a_call_may_ask_for_another_model_than_its_query():
    """Each call's own model decides where it may go."""
    small = TraceCall(input_tokens=1_000, output_tokens=1, model="n")
    mix = [query(call(1_000, 1), small, model="m")]
    fleet = [spec("a", model="m"), spec("b", model="n", prefill=2e-4)]
    assert qps(mix, *fleet) == pytest.approx(1 / (1_000 * 2e-4))


def test_finer_types_never_lower_the_bound():
    """Telling calls apart by length can only help to place them."""
    mix = [query(call(8_000, 5), query_id="x"), query(call(100, 900), query_id="y")]
    fleet = [spec("a", weights_s=0.5), spec("b", prefill=1e-2)]
    coarse = qps(mix, *fleet)
    fine = qps(mix, *fleet, type_of=lambda _, s, c: (s.stage, c.input_tokens))
    assert fine > 1.01 * coarse


@pytest.mark.parametrize("caching", [True, False])
def test_the_built_in_fleets_are_in_order(caching):
    """Four A100 are worth more than two and two slower ones."""
    mix = [query(call(10_000, 680), call(6_000, 80), call(960, 29))]
    rates = [
        fluid_capacity(mix, builtin_fleet(name), prefix_caching=caching).qps
        for name in ("hetero-2", "hetero-1", "homogeneous")
    ]
    assert rates == sorted(rates)
    assert len(set(rates)) == 3


@pytest.mark.parametrize(
    ("queries", "fleet", "message"),
    [
        ([], [spec()], "no queries"),
        ([query(call(1, 1))], [], "no instances"),
        ([query(call(1, 1), model="m")], [spec()], "asks for model 'm'"),
        ([query(call(40_000, 1))], [spec()], "tokens of context"),
    ],
)
def test_what_cannot_run_has_no_capacity(queries, fleet, message):
    """It is refused with the place named."""
    with pytest.raises(ConfigError, match=message):
        fluid_capacity(queries, fleet)


def test_the_solver_prints_nothing():
    """Commands put one JSON object on stdout and nothing else; a fresh process shows it."""
    code = (
        "from shared.simulation.capacity import fluid_capacity as f\n"
        "from shared.simulation.fleets import builtin_fleet as b\n"
        "from shared.simulation.generator import generate as g\n"
        "import numpy as np\n"
        "f(g(1, np.random.default_rng(0)), b('hetero-1'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


lengths = st.tuples(st.integers(1, 700), st.integers(1, 60), st.sampled_from([0, 0, 32, 96]))
speeds = st.fixed_dictionaries(
    {
        "weights_s": st.floats(0.001, 0.1),
        "prefill": st.floats(1e-5, 1e-3),
        "overhead_s": st.floats(0.0, 0.01),
        "seq_s": st.floats(0.0, 0.001),
        "kv_s_per_token": st.floats(0.0, 1e-6),
        "chunk_waste_tokens": st.integers(0, 50),
        "attention_s_per_pair": st.floats(0.0, 1e-5),
        "pair_s": st.floats(0.0, 0.01),
        "trio_s": st.floats(0.0, 0.01),
        "batched_s": st.floats(0.0, 0.01),
        "joined_s": st.floats(0.0, 0.01),
        "max_num_seqs": st.integers(1, 8),
        "max_batched_tokens": st.integers(16, 300),
        "kv_tokens": st.integers(800, 4_000),
        "prefix_caching": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=20), speeds)
def test_no_run_of_the_batching_model_beats_the_bound(drawn, fields):
    """A backlog of calls is worked off no faster than at the bound's rate."""
    calls = [
        call(size, output, *([(f"t{part}", part)] if 0 < part <= size else []))
        for size, output, part in drawn
    ]
    one = spec(**fields)
    instance = BatchingInstance(one)
    for handle, work in enumerate(calls):
        instance.add(
            handle,
            now_s=0.0,
            input_tokens=work.input_tokens,
            output_tokens=work.output_tokens,
            prefix=work.prefix,
        )
    events = instance.advance(1e9)
    makespan_s = max(event.at_s for event in events if event.kind == "finished")
    bound = qps([query(work, query_id=str(i)) for i, work in enumerate(calls)], one)
    assert len(calls) / makespan_s <= bound * (1 + 1e-9)


def test_a_long_backlog_comes_close_to_the_bound():
    """Decoding at a full batch reaches the bound but for its beginning and end."""
    one = spec(max_num_seqs=8, kv_s_per_token=1e-6)
    instance = BatchingInstance(one)
    for handle in range(80):
        instance.add(handle, now_s=0.0, input_tokens=10, output_tokens=200)
    makespan_s = max(event.at_s for event in instance.advance(1e9))
    assert 80 / makespan_s > 0.97 * qps([query(call(10, 200))], one)


@settings(max_examples=20, deadline=None)
@given(st.lists(speeds, min_size=2, max_size=4), st.lists(lengths, min_size=1, max_size=4))
def test_fleets_together_do_at_least_what_they_do_apart(drawn, mix):
    """Capacity never falls when instances are added, and is at least the parts' sum."""
    fleet = [spec(f"i{i}", **fields) for i, fields in enumerate(drawn)]
    queries = [query(*(call(size, output) for size, output, _ in mix))]
    whole = qps(queries, *fleet)
    parts = [qps(queries, one) for one in fleet]
    assert whole >= math.fsum(parts) * (1 - 1e-7)
    assert whole >= qps(queries, *fleet[1:]) * (1 - 1e-7)
