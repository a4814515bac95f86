"""Expected service time of a call."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.scheduling.latency import batch_extra_s, decode_s, prefill_s, service_s
from tests.support.scheduling import make_spec

tokens = st.integers(0, 40_000)


def test_a_short_prompt_costs_one_pass_over_the_weights() -> None:
    """100 tokens compute in 0.02 s, but streaming the weights takes 0.035 s."""
    assert prefill_s(100, 2_048, 0.035, 0.0, 1 / 5_000, 0, 0, 0.0) == 0.035


def test_a_long_prompt_is_cut_into_chunks() -> None:
    """5,000 tokens are two full chunks and 904: each loses 64 tokens' worth of time."""
    expected_s = (2 * (2_048 + 64) + (904 + 64)) / 5_000
    assert prefill_s(5_000, 2_048, 0.035, 0.0, 1 / 5_000, 64, 0, 0.0) == pytest.approx(expected_s)


def test_an_entirely_cached_prompt_takes_one_iteration() -> None:
    """At least one token is always computed."""
    assert prefill_s(0, 2_048, 0.035, 0.001, 1 / 5_000, 0, 0, 0.0) == pytest.approx(0.036)


def test_overhead_is_paid_per_chunk() -> None:
    """Two full chunks pay the fixed time twice."""
    with_overhead = prefill_s(4_096, 2_048, 0.01, 0.5, 1 / 5_000, 0, 0, 0.0)
    without = prefill_s(4_096, 2_048, 0.01, 0.0, 1 / 5_000, 0, 0, 0.0)
    assert with_overhead - without == pytest.approx(1.0)


def test_every_prompt_token_attends_to_those_before_it() -> None:
    """1,000 tokens after 3,000 cached ones make 1,000 · (3,000 + 500) pairs, in chunks or not."""
    for chunk in (128, 2_048):
        slow = prefill_s(1_000, chunk, 0.01, 0.0, 1 / 5_000, 0, 3_000, 1e-6)
        quick = prefill_s(1_000, chunk, 0.01, 0.0, 1 / 5_000, 0, 3_000, 0.0)
        assert slow - quick == pytest.approx(3.5)


def test_decode_counts_the_tokens_after_the_first() -> None:
    """The first token comes out of the prefill: 101 tokens are 100 iterations."""
    assert decode_s(101, 1_000, 1, 0.035, 0.0, 0.0, 0.0) == pytest.approx(3.5)


def test_decode_reads_the_cache_of_the_whole_batch() -> None:
    """4 sequences of mean context 1,050 cost 4 · (1 ms + 1,050 · 1 µs) more per iteration."""
    step_s = 0.035 + 4 * (0.001 + 1_050 * 1e-6)
    assert decode_s(100, 1_000, 4, 0.035, 0.0, 0.001, 1e-6) == pytest.approx(99 * step_s)


@pytest.mark.parametrize("output_tokens", [0.0, 0.5, 1.0])
def test_no_output_takes_no_decode_time(output_tokens: float) -> None:
    """Zero or one token needs no iteration after the prefill."""
    assert decode_s(output_tokens, 1_000, 1, 0.035, 0.0, 0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("batch", "extra_s"),
    [
        (1.0, 0.0),
        (1.5, 0.001),
        (2.0, 0.002),
        (2.5, 0.004),
        (3.0, 0.006),
        (3.5, 0.005),
        (4.0, 0.004),
        (64.0, 0.004),
    ],
)
def test_only_a_call_alone_takes_the_quick_way(batch: float, extra_s: float) -> None:
    """A prompt always costs what batching costs, a decode step only from two calls on."""
    latency = LatencyModel(
        prefill_s_per_token=0.001, weights_s=0.01, pair_s=0.002, trio_s=0.006, batched_s=0.004
    )
    spec = make_spec(latency=latency)
    plain = make_spec(latency=LatencyModel(prefill_s_per_token=0.001, weights_s=0.01))

    def time_s(one: InstanceSpec) -> float:
        return service_s(one, input_tokens=100, cached_tokens=0, output_tokens=11, batch=batch)

    assert batch_extra_s(batch, 0.002, 0.006, 0.004) == pytest.approx(extra_s)
    assert time_s(spec) - time_s(plain) == pytest.approx(0.004 + 10 * extra_s)


def test_a_slower_instance_is_slower_by_its_factor() -> None:
    """The learned factor scales the whole service time."""
    spec = make_spec()
    plain = service_s(spec, input_tokens=3_000, cached_tokens=0, output_tokens=50)
    slow = service_s(spec, input_tokens=3_000, cached_tokens=0, output_tokens=50, speed_factor=3.0)
    assert slow == pytest.approx(3.0 * plain)


@given(input_tokens=tokens, cached=tokens, output_tokens=tokens, more=st.integers(1, 5_000))
def test_service_time_is_finite_positive_and_monotone(
    input_tokens: int, cached: int, output_tokens: int, more: int
) -> None:
    """More prompt or output never takes less time; more cached prompt never takes more."""
    latency = LatencyModel(
        prefill_s_per_token=1 / 5_000,
        weights_s=0.035,
        overhead_s=0.002,
        seq_s=1e-4,
        kv_s_per_token=1e-8,
        chunk_waste_tokens=64,
    )
    spec = make_spec(latency=latency)

    def time_s(*, prompt: int, held: int, output: int) -> float:
        return service_s(spec, input_tokens=prompt, cached_tokens=held, output_tokens=output)

    base_s = time_s(prompt=input_tokens, held=cached, output=output_tokens)
    assert math.isfinite(base_s)
    assert base_s > 0.0
    slack = 1e-9 * base_s
    assert time_s(prompt=input_tokens + more, held=cached, output=output_tokens) >= base_s - slack
    assert time_s(prompt=input_tokens, held=cached, output=output_tokens + more) >= base_s - slack
    assert time_s(prompt=input_tokens, held=cached + more, output=output_tokens) <= base_s + slack
