"""A latency model is found again from calls that ran under it."""

import msgspec
import numpy as np
import pytest

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.simulation.latency_fit import FitStopped, ProbedCall, errors_of, fit_latency, modelled

TRUE = LatencyModel(
    prefill_s_per_token=0.008,
    weights_s=0.02,
    overhead_s=0.006,
    seq_s=0.003,
    kv_s_per_token=6e-6,
    chunk_waste_tokens=6,
    attention_s_per_pair=1.5e-5,
    pair_s=0.003,
    trio_s=0.006,
    batched_s=0.004,
    joined_s=0.005,
)
SPEC = InstanceSpec(
    instance_id="a",
    gpu="CPU",
    max_num_seqs=8,
    max_batched_tokens=256,
    kv_tokens=20_000,
    latency=TRUE,
)


def experiment(spec: InstanceSpec, noise: float = 0.0, seed: int = 0) -> list[list[ProbedCall]]:
    """Return lone calls, batches and a mixed run, with times from the batching model."""
    rng = np.random.default_rng(seed)
    plans = [[(0.0, length, 12)] for length in (16, 64, 128, 300, 600)]
    plans += [[(0.0, length, 24)] * batch for batch in (2, 3, 4, 8) for length in (24, 200)]
    arrivals = np.cumsum(rng.exponential(0.5, 30))
    plans.append(
        [(float(at), int(rng.integers(10, 400)), int(rng.integers(2, 40))) for at in arrivals]
    )
    return [_run(spec, plan, noise, rng) for plan in plans]


def _run(
    spec: InstanceSpec,
    plan: list[tuple[float, int, int]],
    noise: float,
    rng: np.random.Generator,
) -> list[ProbedCall]:
    calls = [
        ProbedCall(
            started_s=at_s,
            first_token_s=0.0,
            finished_s=0.0,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )
        for at_s, input_tokens, output_tokens in plan
    ]
    done = []
    for call, (first_s, last_s) in zip(calls, modelled(spec, spec.latency, calls), strict=True):
        factor = float(np.exp(rng.normal(0.0, noise)))
        done.append(
            msgspec.structs.replace(
                call,
                first_token_s=call.started_s + first_s * factor,
                finished_s=call.started_s + last_s * factor,
            )
        )
    return done


def test_the_true_model_is_found():
    """Without noise the fit explains every call within a thousandth."""
    runs = experiment(SPEC)
    fit = fit_latency(SPEC, runs)
    assert fit.num_calls == sum(map(len, runs))
    assert fit.errors.latency_p95 < 0.002
    assert fit.errors.ttft_p95 < 0.005
    assert fit.latency.prefill_s_per_token == pytest.approx(TRUE.prefill_s_per_token, rel=0.02)
    assert fit.latency.attention_s_per_pair == pytest.approx(TRUE.attention_s_per_pair, rel=0.05)
    assert fit.latency.pair_s == pytest.approx(TRUE.pair_s, rel=0.2)
    assert fit.latency.trio_s == pytest.approx(TRUE.trio_s, rel=0.2)
    assert fit.latency.batched_s == pytest.approx(TRUE.batched_s, rel=0.2)
    assert fit.latency.joined_s == pytest.approx(TRUE.joined_s, rel=0.1)


def test_what_was_cached_is_not_computed_but_attended_to():
    """200 tokens after 400 cached ones: 200 are computed, and make 200 · (400 + 100) pairs."""
    whole = ProbedCall(
        started_s=0.5,
        first_token_s=0.0,
        finished_s=0.0,
        input_tokens=600,
        output_tokens=1,
        cached_tokens=400,
    )
    computed_s = (200 + TRUE.chunk_waste_tokens) * TRUE.prefill_s_per_token
    pairs_s = 200 * (400 + 100) * TRUE.attention_s_per_pair
    ((first_s, last_s),) = modelled(SPEC, TRUE, [whole])
    assert (
        first_s == last_s == pytest.approx(TRUE.overhead_s + TRUE.batched_s + computed_s + pairs_s)
    )


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_averaged_out(seed: int):
    """Fitted on calls that are off by 5%, the model predicts other calls within 3%."""
    fit = fit_latency(SPEC, experiment(SPEC, noise=0.05, seed=seed))
    fresh = experiment(SPEC, seed=seed + 100)
    errors = errors_of(SPEC, fit.latency, fresh)
    assert errors.latency_median < 0.03
    assert errors.ttft_median < 0.03


def test_a_few_wild_calls_do_not_bend_it():
    """One call in twenty that took five times as long moves the median error by little."""
    runs = experiment(SPEC, noise=0.01)
    flat = [
        [
            msgspec.structs.replace(call, finished_s=call.started_s + 5 * _took(call))
            if (index + position) % 20 == 0
            else call
            for position, call in enumerate(run)
        ]
        for index, run in enumerate(runs)
    ]
    fit = fit_latency(SPEC, flat)
    assert errors_of(SPEC, fit.latency, experiment(SPEC, seed=7)).latency_median < 0.03


def test_too_few_calls_are_refused():
    """Seven calls fix no six numbers."""
    with pytest.raises(ValueError, match="too few"):
        fit_latency(SPEC, [experiment(SPEC)[0]] * 7)


def test_a_search_that_nobody_waits_for_ends_at_its_next_step():
    """It asks before each of its hundreds of simulations."""
    asked: list[bool] = []

    def is_stopped() -> bool:
        asked.append(len(asked) == 20)
        return asked[-1]

    with pytest.raises(FitStopped):
        fit_latency(SPEC, experiment(SPEC), is_stopped)
    assert len(asked) == 21


def _took(call: ProbedCall) -> float:
    return call.finished_s - call.started_s
