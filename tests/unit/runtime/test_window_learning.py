"""What a window teaches, and how little a liar can change of it."""

import msgspec
import numpy as np
import pytest

from shared.contracts.messages import Usage
from shared.contracts.query_window import QueryRecord, Window
from shared.domain.trace import PrefixPart
from shared.runtime.window_learning import (
    clipped,
    hit_factors,
    is_notable,
    learned_shapes,
    speed_requests,
    window_cut_s,
)
from tests.support.scheduling import make_spec
from tests.support.tuning import query_events


def records(
    count: int,
    *,
    tenant: str = "default",
    output_tokens: int = 50,
    gap_s: float = 10.0,
    start_s: float = 0.0,
    cached_tokens: int = 0,
    seed: int = 0,
) -> list[QueryRecord]:
    """Return ended queries with exponential gaps and lengths that vary by a tenth."""
    rng = np.random.default_rng(seed)
    window, at_s, offset = Window(10_000), start_s, 0
    for index in range(count):
        at_s += float(rng.exponential(gap_s))
        for event in query_events(f"{tenant}-{start_s}-{index}", arrival_s=at_s, latency_s=20.0):
            tokens = max(1, round(output_tokens * rng.uniform(0.9, 1.1)))
            usage = Usage(input_tokens=500, output_tokens=tokens, cached_tokens=cached_tokens)
            prefix = (PrefixPart("template", 400),)
            window.add(
                msgspec.structs.replace(
                    event, tenant=tenant, usage=usage, prefix=prefix, prompt_bytes=2_000
                ),
                offset,
            )
            offset += 1
    return window.records()


def shape_of(found: list[QueryRecord]):
    """Return the learned shape of the test's workflow."""
    return learned_shapes([record.trace() for record in found], found, {})["demo"]


def test_lengths_cache_hits_and_bytes_per_token_are_learned():
    """Means of what the engine reported."""
    shape = shape_of(records(50, cached_tokens=384))
    stage = shape.stages["draft"]
    assert stage.output_tokens == pytest.approx(50, rel=0.05)
    assert stage.cached_tokens == 384
    assert stage.bytes_per_token == 4.0


def test_a_tenant_that_sends_nonsense_moves_a_shared_profile_by_a_bounded_amount():
    """One of four tenants claims outputs of a million tokens: at most four times the usual."""
    honest = [r for name in "abc" for r in records(40, tenant=name, seed=ord(name))]
    liar = records(40, tenant="liar", output_tokens=1_000_000)
    stage = shape_of([*honest, *liar]).stages["draft"]
    assert stage.output_tokens < 50 * (0.75 + 0.25 * 4 * 1.2)


def test_even_one_of_two_tenants_moves_a_profile_by_a_bounded_amount_and_is_counted():
    """There is no majority: the shorter calls set the limit; the longer ones are named."""
    honest, liar = records(40, tenant="a"), records(40, tenant="b", output_tokens=1_000_000)
    stage = shape_of([*honest, *liar]).stages["draft"]
    assert stage.output_tokens < 50 * (0.5 + 0.5 * 4 * 1.2)
    found = clipped([record.trace() for record in [*honest, *liar]])
    assert found == [record.query_id for record in liar]
    assert clipped([record.trace() for record in honest]) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"gap_s": 10.0}, {"gap_s": 5.0}),
        ({"output_tokens": 50}, {"output_tokens": 150}),
        ({"cached_tokens": 400}, {"cached_tokens": 0}),
    ],
)
def test_a_window_is_cut_where_the_workload_changed(before, after):
    """Rate, lengths or cache hits: the cut lies within 25 queries of the change."""
    old = records(200, seed=1, **before)
    start_s = old[-1].arrival_s
    new = records(200, seed=2, start_s=start_s, **after)
    cut_s = window_cut_s([*old, *new])
    assert cut_s is not None
    assert old[-25].arrival_s < cut_s < new[25].arrival_s


def test_a_steady_window_is_not_cut():
    """Twenty windows without a change stay whole."""
    assert all(window_cut_s(records(300, seed=seed)) is None for seed in range(20))


def test_a_lost_cache_shows_as_a_hit_factor_near_zero():
    """The template was sent before, so it should have been found, and was not."""
    assert hit_factors(records(50, cached_tokens=0))["a100-0"] == 0.0
    assert hit_factors(records(50, cached_tokens=384))["a100-0"] == pytest.approx(0.96, abs=0.02)


def test_speeds_are_asked_of_the_fleet_only_and_leave_out_cached_tokens():
    """A prompt of 500 tokens of which 384 were cached is a prompt of 116."""
    found = speed_requests(records(5, cached_tokens=384), {"a100-0": make_spec("a100-0")})
    assert len(found["a100-0"].calls) == 15
    assert {call.input_tokens for call in found["a100-0"].calls} == {116}
    assert speed_requests(records(5), {"l40s-0": make_spec("l40s-0")}) == {}


def test_small_differences_are_not_worth_a_message():
    """`control` is compacted, dispatchers forget their caches at each profile."""
    shape = shape_of(records(50))
    close = shape_of(records(50, output_tokens=52))
    assert not is_notable(close, shape)
    assert is_notable(shape_of(records(50, output_tokens=70)), shape)
    assert is_notable(shape, None)
