"""How many calls an engine should be given at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.scheduling.knee import decode_rate, knee_calls


def instance(shared_s: float, seq_s: float, most: int = 64, kv_tokens: int = 10**6) -> InstanceSpec:
    """Return an instance with a speed."""
    return InstanceSpec(
        instance_id="a",
        gpu="X",
        max_num_seqs=most,
        kv_tokens=kv_tokens,
        latency=LatencyModel(prefill_s_per_token=1e-3, weights_s=shared_s, seq_s=seq_s),
    )


def test_worked_example():
    """40 ms shared and 10 ms per call: 42 of 64 calls bring 97% of the throughput."""
    spec = instance(0.04, 0.01)
    assert decode_rate(spec, 1, 512) == pytest.approx(20.0)
    assert knee_calls(spec) == 42
    assert decode_rate(spec, 42, 512) >= 0.97 * decode_rate(spec, 64, 512)
    assert decode_rate(spec, 41, 512) < 0.97 * decode_rate(spec, 64, 512)


def test_a_lone_call_that_is_quicker_is_not_the_knee_by_itself():
    """10 ms alone, 20 ms more for two and up: 64 make 64 times what 30 ms allow."""
    spec = InstanceSpec(
        instance_id="a",
        gpu="X",
        kv_tokens=10**6,
        latency=LatencyModel(prefill_s_per_token=1e-3, weights_s=0.01, batched_s=0.02),
    )
    assert decode_rate(spec, 1, 512) == pytest.approx(100.0)
    assert decode_rate(spec, 64, 512) == pytest.approx(64 / 0.03)
    assert knee_calls(spec) == 63


def test_where_nothing_is_shared_one_call_is_enough():
    """An engine that runs one call after the other gains nothing by a batch."""
    assert knee_calls(instance(1e-9, 0.02)) == 1


def test_the_kv_cache_bounds_it():
    """No more calls than fit at a typical context."""
    assert knee_calls(instance(0.04, 0.0, kv_tokens=2_048)) == 4
    assert knee_calls(instance(0.04, 0.0, kv_tokens=100)) == 1


@given(
    shared_s=st.floats(1e-6, 1.0),
    seq_s=st.floats(0.0, 1.0),
    most=st.integers(1, 512),
    slower=st.floats(0.01, 100.0),
)
def test_it_is_a_batch_and_does_not_depend_on_speed(
    shared_s: float, seq_s: float, most: int, slower: float
):
    """The knee lies within the batch size; an engine twice as slow throughout has the same."""
    spec = instance(shared_s, seq_s, most)
    knee = knee_calls(spec)
    assert 1 <= knee <= most
    assert abs(knee_calls(instance(shared_s * slower, seq_s * slower, most)) - knee) <= 1
    assert knee_calls(spec, share=0.5) <= knee
