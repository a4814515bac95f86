"""What the commands run: traces, generated workloads, fleets, arrivals."""

from pathlib import Path

import pytest

from services.cli.capacity import capacity_qps
from services.cli.options import check_address, parse_scales
from services.cli.workload import WorkloadParams, build_workload, generated, load_fleet
from shared.errors import ConfigError
from shared.simulation.fleets import dump_fleet
from shared.simulation.trace_file import dump_trace
from shared.simulation.traces import dump_authors_trace

HETERO = load_fleet("hetero-1")


def params(**changes: object) -> WorkloadParams:
    """Return parameters of a small generated workload."""
    return WorkloadParams(**{"limit": 20, **changes})  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_workload():
    """Queries, arrivals and SLOs are drawn from the seed alone."""
    assert build_workload(params(), HETERO) == build_workload(params(), HETERO)
    assert build_workload(params(seed=1), HETERO) != build_workload(params(), HETERO)


@pytest.mark.parametrize("arrivals", ["poisson", "bursty", "step", "gamma:3"])
def test_every_arrival_process_keeps_the_mean_rate(arrivals: str):
    """Over many queries the arrivals come at the rate asked for, within a quarter."""
    workload = build_workload(params(limit=400, rate_qps=0.5, arrivals=arrivals), HETERO)
    span_s = workload.queries[-1].arrival_s
    assert span_s is not None
    assert 400 / span_s == pytest.approx(0.5, rel=0.25)


def test_without_a_rate_half_of_the_capacity_is_used():
    """The default load follows the fleet; over many queries it is met within a quarter."""
    workload = build_workload(params(limit=400), HETERO)
    assert workload.rate_qps == pytest.approx(workload.capacity_qps / 2, rel=0.25)


def test_every_query_has_an_slo_of_the_scales_asked_for():
    """The SLO is one of the scales times the query's isolated time."""
    workload = build_workload(params(slo_scales=(2.0, 5.0)), HETERO)
    assert {query.slo_scale for query in workload.queries} == {2.0, 5.0}
    assert all(query.slo_s for query in workload.queries)


def test_a_trace_file_is_read_and_cut(tmp_path: Path):
    """The limit takes the first queries of a trace."""
    path = tmp_path / "trace.json"
    path.write_text(dump_authors_trace(generated(5, "natural", 0)))
    workload = build_workload(WorkloadParams(trace=path, limit=3), HETERO)
    assert len(workload.queries) == 3
    assert workload.name == "trace.json"


def test_a_fleet_file_is_read(tmp_path: Path):
    """A name with a suffix is a file; the file gives the same fleet."""
    path = tmp_path / "fleet.toml"
    path.write_text(dump_fleet(HETERO))
    assert load_fleet(str(path)) == HETERO


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rate_qps": 0.0}, "above 0"),
        ({"rate_qps": -1.0}, "above 0"),
        ({"limit": 0}, "at least 1"),
        ({"limit": 10**12}, "at most 100,000 queries"),
        ({"seed": -1}, "the seed must not be negative, is -1"),
        ({"mode": "wild"}, "natural"),
        ({"arrivals": "never"}, "unknown arrivals"),
        ({"slo_scales": (-1.0,)}, "scale"),
        ({"trace": Path("no/such/file.json")}, "no/such/file.json"),
        ({"trace": Path("x.json"), "mode": "natural"}, "exclude"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(changes: dict[str, object], said: str):
    """Nothing is started for a workload that cannot be built; the message names the culprit."""
    with pytest.raises(ConfigError, match=said):
        build_workload(params(**changes), HETERO)


def test_an_unknown_fleet_is_refused_with_the_known_ones():
    """The message lists what is built in."""
    with pytest.raises(ConfigError, match="hetero-2"):
        load_fleet("hetero-3")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_fleet("missing/fleet.toml")


def test_capacity_grows_with_the_fleet_and_shrinks_with_the_work():
    """Twice the instances carry twice the queries; more revisions carry fewer."""
    natural, stress = generated(50, "natural", 0), generated(50, "stress", 0)
    assert capacity_qps(natural, HETERO * 2) == pytest.approx(2 * capacity_qps(natural, HETERO))
    assert capacity_qps(stress, HETERO) < capacity_qps(natural, HETERO)


def test_scales_are_numbers_above_zero():
    """`3,4` is two scales; anything else is refused."""
    assert parse_scales("3, 4.5") == (3.0, 4.5)
    assert parse_scales("") == ()
    for text in ("3,x", "0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError):
            parse_scales(text)


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":9092", "a:b", "h:70000", "h:0"])
def test_an_address_without_host_or_port_is_refused(address: str):
    """A typo is told at once, not after a time-out."""
    with pytest.raises(ConfigError, match="host:port"):
        check_address(address)


def test_several_addresses_are_accepted():
    """Bootstrap servers come as a list."""
    check_address("a:9092, b:9093")


def test_recorded_arrivals_are_kept_unless_a_rate_is_asked_for(tmp_path: Path):
    """A trace with arrivals is replayed as recorded; a rate replaces them."""
    recorded = build_workload(params(limit=5), HETERO).queries
    path = tmp_path / "recorded.trace"
    path.write_text(dump_trace(recorded))
    kept = build_workload(WorkloadParams(trace=path), HETERO)
    assert [q.arrival_s for q in kept.queries] == [q.arrival_s for q in recorded]
    assert [q.slo_s for q in kept.queries] == [q.slo_s for q in recorded]
    redrawn = build_workload(WorkloadParams(trace=path, rate_qps=5.0), HETERO)
    assert [q.arrival_s for q in redrawn.queries] != [q.arrival_s for q in recorded]


def test_the_rate_told_is_the_one_of_the_arrivals():
    """Without a rate asked for, the report names what really arrives."""
    workload = build_workload(params(arrivals="step:1x10,2x1000", limit=50), HETERO)
    last_s, first_s = workload.queries[-1].arrival_s, workload.queries[0].arrival_s
    assert last_s is not None
    assert first_s is not None
    assert workload.rate_qps == pytest.approx(49 / (last_s - first_s))
