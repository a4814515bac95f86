"""What policies believe, and what is true: apart in a run, and changing while it goes on."""

import msgspec
import numpy as np
import pytest

from shared.domain.trace import PrefixPart, TraceCall, TraceQuery, TraceStage
from shared.errors import ConfigError
from shared.scheduling.shapes import shape_from_trace
from shared.simulation.results import RunResult
from shared.simulation.scenario import Change, Scenario
from shared.simulation.simulator import simulate
from tests.support.simulated_queries import make_query, make_spec

FLEET = (make_spec("i0"), make_spec("i1"))
QUERIES = tuple(
    make_query(number, [[(800, 60)], [(400, 30)] * 2], arrival_s=1.5 * number, slo_s=60.0)
    for number in range(60)
)
PLAIN = Scenario(queries=QUERIES, fleet=FLEET, alpha=0.1, shapes=shape_from_trace(QUERIES))
SLOW = {"i0": 3.0}


def changed(scenario: Scenario = PLAIN, **fields: object) -> Scenario:
    """A scenario with some fields replaced."""
    return msgspec.structs.replace(scenario, **fields)


def share_of_first(result: RunResult) -> float:
    """Share of the calls that the first instance got."""
    return float(np.mean(result.call_instance == 0))


@pytest.mark.parametrize("policy", ["hexgen-flow", "qlm", "vtc"])
def test_beliefs_equal_to_the_truth_change_no_byte(policy: str):
    """Naming what is true as what is believed is the run without a word about beliefs."""
    silent = changed(policy=policy, speed_factors=SLOW)
    told = changed(
        silent, believed_factors=SLOW, hit_factors={"i0": 1.0}, changes=(Change(at_s=20.0),)
    )
    assert simulate(silent).to_bytes() == simulate(told).to_bytes()


def test_a_wrong_belief_moves_calls_and_no_instance():
    """A call's cost follows what is believed; its duration follows what is true."""
    misled = simulate(changed(believed_factors={"i0": 3.0}))
    assert share_of_first(misled) < share_of_first(simulate(PLAIN)) - 0.05
    first = misled.call_instance == 0
    span_s = (misled.first_token_s - misled.started_s)[first]
    assert span_s.min() < 0.5  # 800 tokens at 5,000 tokens/s, not three times that


def test_an_unnoticed_slow_instance_hurts_more_than_a_known_one():
    """The calls that nobody leads away from it take longer."""
    unnoticed = simulate(changed(speed_factors=SLOW, believed_factors={}))
    known = simulate(changed(speed_factors=SLOW))
    assert share_of_first(unnoticed) > share_of_first(known)
    assert unnoticed.summary().p95_s > known.summary().p95_s


@pytest.mark.parametrize("policy", ["hexgen-flow", "vtc"])
@pytest.mark.parametrize("core", ["interpreted", "compiled"])
def test_what_changes_changes_from_then_on(policy: str, core):
    """Until the change the run is as without it; afterwards it is another."""
    change = Change(at_s=30.0, alpha=1.0, believed_factors={"i0": 5.0}, speed_factors={"i0": 2.0})
    before, after = (
        simulate(changed(policy=policy, changes=some), core=core) for some in ((), (change,))
    )
    early = before.call_end_s < 30.0
    assert early.sum() > 10
    assert np.array_equal(before.call_instance[early], after.call_instance[early])
    np.testing.assert_allclose(before.call_end_s[early], after.call_end_s[early], atol=1e-9)
    assert not np.array_equal(before.call_end_s, after.call_end_s)
    after.check()


def test_both_cores_make_the_same_changes():
    """The same bytes, compiled and interpreted."""
    change = Change(
        at_s=25.3,
        alpha=0.02,
        shapes=shape_from_trace(QUERIES[:3]),
        believed_factors={"i1": 2.0},
        hit_factors={"i0": 0.5},
        speed_factors={"i1": 2.5},
    )
    scenario = changed(changes=(change, Change(at_s=40.0, speed_factors={})))
    runs = [simulate(scenario, core=core).to_bytes() for core in ("compiled", "interpreted")]
    assert runs[0] == runs[1]


def cached_queries() -> tuple[TraceQuery, ...]:
    """Queries whose prompts share a long part."""
    call = TraceCall(input_tokens=2_000, output_tokens=20, prefix=(PrefixPart("t", 1_600),))
    return tuple(
        TraceQuery(
            query_id=f"c{number}",
            workflow="w",
            stages=(TraceStage(stage="s0", calls=(call,)),),
            arrival_s=2.0 * number,
            slo_s=60.0,
        )
        for number in range(20)
    )


def test_a_cold_instance_is_believed_to_cache_and_does_not():
    """Its calls are costed as if their prefix were found; none is."""
    queries = cached_queries()
    warm = Scenario(queries=queries, fleet=FLEET[:1], shapes=shape_from_trace(queries))
    cold = simulate(changed(warm, cold=("i0",)))
    assert simulate(warm).cached_tokens[1:].min() == 1_600
    assert cold.cached_tokens.max() == 0
    assert np.array_equal(cold.t_comp_s, simulate(warm).t_comp_s)
    assert cold.summary().p95_s > simulate(warm).summary().p95_s
    disbelieved = simulate(changed(warm, cold=("i0",), hit_factors={"i0": 0.0}))
    assert disbelieved.t_comp_s[1:].min() > cold.t_comp_s[1:].max()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"believed_factors": {"i0": 0.0}}, "speed factor 0.0 of instance i0"),
        ({"hit_factors": {"i0": 1.5}}, "hit factor 1.5 of instance i0"),
        ({"changes": (Change(at_s=5.0), Change(at_s=4.0))}, "a change at 4.0 s"),
        ({"changes": (Change(at_s=float("nan")),)}, "a change at nan s"),
        ({"changes": (Change(at_s=1.0, alpha=2.0),)}, "alpha of the change at 1 s"),
        ({"changes": (Change(at_s=1.0, speed_factors={"i0": -1.0}),)}, "speed factor -1.0"),
    ],
)
def test_what_makes_no_run_is_refused(fields: dict[str, object], text: str):
    """The setting is named."""
    with pytest.raises(ConfigError, match=text):
        simulate(changed(**fields))
