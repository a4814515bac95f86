"""Arrivals, isolated times, SLOs."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from shared.errors import ConfigError
from shared.simulation.fleets import builtin_fleet
from shared.simulation.generator import generate
from shared.simulation.workload import (
    Arrivals,
    GammaArrivals,
    PoissonArrivals,
    RecordedArrivals,
    StepArrivals,
    TenantSlo,
    check_fits,
    isolated_s,
    parse_arrivals,
    prepare,
)
from tests.support.scheduling import make_spec, make_stage, make_trace_query

MANY = tuple(make_trace_query(f"q{n}") for n in range(20_000))
FEW = MANY[:50]


def _gaps(arrivals: Arrivals) -> np.ndarray:
    return np.diff([0.0, *arrivals.times_s(MANY, np.random.default_rng(5))])


def test_poisson_gaps_have_the_rate_and_no_memory() -> None:
    """Mean gap 1 / rate, coefficient of variation 1."""
    gaps = _gaps(PoissonArrivals(0.4))
    assert gaps.mean() == pytest.approx(2.5, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.03)


def test_gamma_gaps_have_the_rate_and_the_burstiness() -> None:
    """The mean stays that of the rate, the coefficient of variation is the one asked for."""
    gaps = _gaps(GammaArrivals(0.4, cv=3.0))
    assert gaps.mean() == pytest.approx(2.5, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.06)


def test_step_arrivals_change_their_rate_where_told() -> None:
    """1 per second for 1,000 s, 4 for 500 s, then 2 for ever."""
    arrivals = StepArrivals(((1.0, 1_000.0), (4.0, 500.0), (2.0, 1.0)))
    times = np.array(arrivals.times_s(MANY, np.random.default_rng(6)))
    assert ((times < 1_000).sum()) == pytest.approx(1_000, rel=0.1)
    assert ((times >= 1_000) & (times < 1_500)).sum() == pytest.approx(2_000, rel=0.1)
    assert ((times >= 1_600) & (times < 3_600)).sum() == pytest.approx(4_000, rel=0.1)


def test_recorded_arrivals_are_those_of_the_trace() -> None:
    """They can be replayed faster."""
    queries = [make_trace_query(f"q{n}", arrival_s=10.0 * n) for n in range(3)]
    rng = np.random.default_rng(0)
    assert RecordedArrivals().times_s(queries, rng) == [0.0, 10.0, 20.0]
    assert RecordedArrivals(speed=2.0).times_s(queries, rng) == [0.0, 5.0, 10.0]


def test_a_trace_without_arrivals_cannot_be_replayed_as_recorded() -> None:
    """The query is named, and what to do instead."""
    with pytest.raises(ConfigError, match="q0 has no recorded arrival; choose a rate"):
        RecordedArrivals().times_s(MANY[:1], np.random.default_rng(0))


def test_recorded_arrivals_must_be_in_order() -> None:
    """A trace that goes back in time is refused."""
    queries = [make_trace_query("a", arrival_s=5.0), make_trace_query("b", arrival_s=4.0)]
    with pytest.raises(ConfigError, match="sort the trace"):
        RecordedArrivals().times_s(queries, np.random.default_rng(0))


@pytest.mark.parametrize(
    "arrivals", [PoissonArrivals(2.0), GammaArrivals(2.0), StepArrivals(((1, 5), (9, 5)))]
)
def test_arrivals_never_decrease(arrivals: Arrivals) -> None:
    """One arrival per query, in order, after the start."""
    times = arrivals.times_s(FEW, np.random.default_rng(1))
    assert len(times) == len(FEW)
    assert times[0] > 0.0
    assert all(earlier <= later for earlier, later in pairwise(times))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "make",
    [
        PoissonArrivals,
        GammaArrivals,
        lambda bad: GammaArrivals(1.0, cv=bad),
        lambda bad: StepArrivals(((bad, 1.0),)),
        lambda bad: StepArrivals(((1.0, bad),)),
        lambda bad: RecordedArrivals(speed=bad),
    ],
)
def test_rates_must_be_positive_numbers(make, bad: float) -> None:
    """A rate of zero is refused, not waited for."""
    with pytest.raises(ConfigError, match="must be a positive number"):
        make(bad).times_s(FEW, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("text", "rate", "expected"),
    [
        ("poisson", 0.2, PoissonArrivals(0.2)),
        ("gamma", 0.2, GammaArrivals(0.2, 2.0)),
        ("gamma:3.5", 0.2, GammaArrivals(0.2, 3.5)),
        ("step:0.1x600,0.3x600", None, StepArrivals(((0.1, 600.0), (0.3, 600.0)))),
        ("recorded", None, RecordedArrivals()),
    ],
)
def test_arrivals_are_named_by_short_texts(
    text: str, rate: float | None, expected: Arrivals
) -> None:
    """The forms the command line accepts."""
    assert parse_arrivals(text, rate) == expected


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("poison", 0.2),
        ("poisson", None),
        ("gamma:x", 0.2),
        ("step:", None),
        ("step:1", None),
        ("step:1x2x3", None),
        ("", 0.2),
        ("poisson", 0.0),
    ],
)
def test_unreadable_arrivals_are_refused(text: str, rate: float | None) -> None:
    """Typos and missing rates are configuration errors."""
    with pytest.raises(ConfigError):
        parse_arrivals(text, rate)


def test_isolated_time_sums_stages_and_takes_the_longest_sibling() -> None:
    """0.2 s prefill + 100 · 0.035 s, then 1 s of thought and 0.2 + 200 · 0.035 s."""
    query = make_trace_query(
        "q",
        make_stage("one", (1_000, 101)),
        make_stage("two", (1_000, 1), (1_000, 201), think_s=1.0),
    )
    assert isolated_s(query, [make_spec()]) == pytest.approx(0.2 + 3.5 + 1.0 + 0.2 + 7.0)


def test_isolated_time_is_the_mean_over_the_instances_of_the_model() -> None:
    """Instances of other models do not count."""
    query = make_trace_query("q", make_stage("one", (1_000, 101)), model="m")
    fleet = [
        make_spec("a", decode_s=0.03, model="m"),
        make_spec("b", decode_s=0.05, model="m"),
        make_spec("c", decode_s=9.0, model="other"),
    ]
    assert isolated_s(query, fleet) == pytest.approx(0.2 + 4.0)


def test_a_model_nobody_serves_is_refused() -> None:
    """The query and what the fleet offers are named."""
    with pytest.raises(ConfigError, match="asks for model 'm'; the fleet offers: default"):
        isolated_s(make_trace_query("q", model="m"), [make_spec()])


def test_a_fleet_of_several_models_serves_no_query_without_a_model() -> None:
    """`default` is ambiguous there: the error says what the fleet offers."""
    fleet = [make_spec("a", model="m"), make_spec("b", model="n")]
    with pytest.raises(ConfigError, match="asks for model 'default'; the fleet offers: m, n"):
        prepare(MANY[:1], fleet, PoissonArrivals(1.0), (3.0,), np.random.default_rng(0))


def test_prepare_draws_scales_and_multiplies_the_isolated_time() -> None:
    """Every SLO is one of the scales times the query's own isolated time, each scale occurs."""
    fleet = builtin_fleet("hetero-1")
    queries = generate(200, np.random.default_rng(1))
    prepared = prepare(
        queries, fleet, PoissonArrivals(0.2), (3, 4, 6, 8, 10), np.random.default_rng(2)
    )
    for before, after in zip(queries, prepared, strict=True):
        assert after.slo_s == pytest.approx(after.slo_scale * isolated_s(before, fleet))
        assert after.stages == before.stages
    assert {after.slo_scale for after in prepared} == {3, 4, 6, 8, 10}
    assert [after.arrival_s for after in prepared] == sorted(after.arrival_s for after in prepared)


def test_prepare_is_deterministic_for_a_seed() -> None:
    """Equal generators give equal workloads."""
    fleet = builtin_fleet("hetero-2")
    one, same, other = (
        prepare(FEW, fleet, PoissonArrivals(1.0), (3, 10), np.random.default_rng(seed))
        for seed in (3, 3, 4)
    )
    assert one == same != other


def test_tenants_are_drawn_by_weight_and_bring_their_scales() -> None:
    """Three queries in four are the patient tenant's."""
    tenants = [
        TenantSlo(tenant="patient", weight=3.0, scales=(10.0,)),
        TenantSlo(tenant="hasty", weight=1.0, scales=(3.0,)),
    ]
    prepared = prepare(
        MANY[:4_000],
        [make_spec()],
        PoissonArrivals(1.0),
        (6.0,),
        np.random.default_rng(0),
        tenants=tenants,
    )
    assert {(query.tenant, query.slo_scale) for query in prepared} == {
        ("patient", 10.0),
        ("hasty", 3.0),
    }
    shares = Counter(query.tenant for query in prepared)
    assert shares["patient"] / len(prepared) == pytest.approx(0.75, abs=0.03)


def test_recorded_slos_are_kept_when_no_scales_are_given() -> None:
    """`slo_s` first, then the recorded scale, and only then a draw."""
    queries = [
        make_trace_query("a", slo_s=42.0),
        make_trace_query("b", slo_scale=7.0),
        make_trace_query("c"),
    ]
    fleet = [make_spec()]
    kept = prepare(queries, fleet, PoissonArrivals(1.0), None, np.random.default_rng(0))
    assert kept[0].slo_s == 42.0
    assert kept[1].slo_s == pytest.approx(7.0 * isolated_s(queries[1], fleet))
    assert kept[2].slo_scale in {3.0, 4.0, 6.0, 8.0, 10.0}
    drawn = prepare(queries, fleet, PoissonArrivals(1.0), (2.0,), np.random.default_rng(0))
    assert {query.slo_scale for query in drawn} == {2.0}


def test_a_trace_without_model_names_takes_the_fleets_only_model() -> None:
    """`default` becomes the model of a fleet that serves just one."""
    (query,) = prepare(
        MANY[:1],
        [make_spec(model="llama-70b")],
        PoissonArrivals(1.0),
        (5.0,),
        np.random.default_rng(0),
    )
    assert query.model == "llama-70b"


@pytest.mark.parametrize("scales", [(), (0.0,), (-1.0,), (3.0, float("nan"))])
def test_scales_must_be_positive_numbers(scales: tuple[float, ...]) -> None:
    """An SLO of zero is refused."""
    with pytest.raises(ConfigError, match="SLO scale"):
        prepare(FEW, [make_spec()], PoissonArrivals(1.0), scales, np.random.default_rng(0))


@pytest.mark.parametrize(
    "tenant",
    [
        TenantSlo(tenant="t", weight=0.0),
        TenantSlo(tenant="t", scales=()),
        TenantSlo(tenant="t", scales=(-1.0,)),
    ],
)
def test_impossible_tenants_are_refused(tenant: TenantSlo) -> None:
    """Weights and scales are positive."""
    with pytest.raises(ConfigError, match="tenant 't'"):
        prepare(
            FEW,
            [make_spec()],
            PoissonArrivals(1.0),
            (3.0,),
            np.random.default_rng(0),
            tenants=[tenant],
        )


def test_an_empty_workload_or_fleet_is_refused() -> None:
    """There must be something to run and somewhere to run it."""
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="no queries"):
        prepare([], [make_spec()], PoissonArrivals(1.0), (3.0,), rng)
    with pytest.raises(ConfigError, match="no instances"):
        prepare(FEW, [], PoissonArrivals(1.0), (3.0,), rng)


def test_a_prompt_beyond_every_instance_is_refused_with_its_place() -> None:
    """The largest instance decides; query, stage and call are named."""
    query = make_trace_query(
        "big", make_stage("one"), make_stage("two", (100, 10), (40_000, 2_000), iteration=0)
    )
    small, large = make_spec("a", kv_tokens=10_000), make_spec("b", max_context_tokens=42_000)
    check_fits([query], [small, large])
    with pytest.raises(ConfigError, match=r"query big, stage two/0, call 1: needs 42,000 tokens"):
        check_fits([query], [small])
