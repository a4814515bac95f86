"""One speed factor per instance, found from what ran on it."""

import msgspec
import numpy as np
import pytest

from shared.simulation.fleets import builtin_fleet
from shared.simulation.generator import generate
from shared.simulation.scenario import Scenario
from shared.simulation.simulator import simulate
from shared.simulation.speed_fit import RanCall, fit_speed
from shared.simulation.workload import PoissonArrivals, prepare

FLEET = builtin_fleet("hetero-1")


def ran(factors: dict[str, float], seed: int = 0) -> dict[str, list[RanCall]]:
    """Return what ran on each instance of a fleet with these real speeds."""
    rng = np.random.default_rng(seed)
    queries = prepare(generate(60, rng), FLEET, PoissonArrivals(0.3), None, rng)
    run = simulate(Scenario(queries=queries, fleet=FLEET, alpha=0.0, speed_factors=factors))
    calls: dict[str, list[RanCall]] = {spec.instance_id: [] for spec in FLEET}
    for index in range(len(run.call_query)):
        calls[FLEET[run.call_instance[index]].instance_id].append(
            RanCall(
                started_s=float(run.started_s[index]),
                finished_s=float(run.call_end_s[index]),
                input_tokens=int(max(1, run.input_tokens[index] - run.cached_tokens[index])),
                output_tokens=int(run.output_tokens[index]),
            )
        )
    return calls


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_factor_is_found_whatever_else_was_in_the_batch(factor):
    """Within 3% of the truth, although calls slow each other down."""
    spec = FLEET[0]
    fit = fit_speed(spec, ran({spec.instance_id: factor})[spec.instance_id])
    assert fit is not None
    assert fit.factor == pytest.approx(factor, rel=0.03)
    assert fit.changed_at_s is None


def test_outliers_have_no_say():
    """A third of the calls took a hundred times longer for reasons of their own."""
    spec = FLEET[1]
    calls = ran({})[spec.instance_id]
    broken = [
        msgspec.structs.replace(call, finished_s=call.started_s + 3_000.0)
        if index % 3 == 0
        else call
        for index, call in enumerate(calls)
    ]
    fit = fit_speed(spec, broken)
    assert fit is not None
    assert fit.factor == pytest.approx(1.0, rel=0.25)


def test_a_change_of_speed_is_found_and_what_was_before_it_left_out():
    """An instance that becomes three times slower: the factor is the one of now."""
    spec = FLEET[0]
    before, after = ran({})[spec.instance_id], ran({spec.instance_id: 3.0}, 1)[spec.instance_id]
    shift_s = max(call.finished_s for call in before) + 10.0
    moved = [
        msgspec.structs.replace(
            call, started_s=call.started_s + shift_s, finished_s=call.finished_s + shift_s
        )
        for call in after
    ]
    fit = fit_speed(spec, [*before, *moved])
    assert fit is not None
    assert fit.changed_at_s == pytest.approx(shift_s, abs=60.0)
    assert fit.factor == pytest.approx(3.0, rel=0.05)


def test_too_few_calls_say_nothing():
    """An instance that got little work keeps what is believed of it."""
    assert fit_speed(FLEET[0], ran({})[FLEET[0].instance_id][:10]) is None
