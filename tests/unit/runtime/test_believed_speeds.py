"""What dispatchers believed of speeds is read off the costs they used."""

import msgspec
import numpy as np
import pytest

from shared.contracts.query_window import Window
from shared.runtime.believed_speeds import believed_speeds
from shared.scheduling.shapes import shape_from_trace
from shared.simulation.fleets import builtin_fleet
from shared.simulation.generator import generate
from shared.simulation.scenario import Change, Scenario
from shared.simulation.simulator import simulate
from shared.simulation.workload import PoissonArrivals, prepare
from tests.support.tuning import events_of_run

FLEET = builtin_fleet("hetero-1")
BY_ID = {spec.instance_id: spec for spec in FLEET}


def records_of(*changes: Change, **fields: object):
    """Return what the events of a simulated run tell."""
    rng = np.random.default_rng(4)
    queries = prepare(generate(40, rng), FLEET, PoissonArrivals(0.3), None, rng)
    scenario = Scenario(
        queries=queries, fleet=FLEET, shapes=shape_from_trace(queries), changes=changes
    )
    run = simulate(msgspec.structs.replace(scenario, **fields), core="interpreted")
    window = Window(1_000)
    for offset, event in enumerate(events_of_run(run, queries, from_s=100.0)):
        window.add(event, offset)
    return window.records()


def test_what_nobody_doubts_is_believed_from_the_first_call_on():
    """One step per instance that got work, at the factor that was in force."""
    found = believed_speeds(records_of(believed_factors={"a100-0": 2.0}), BY_ID)
    factors = {one.instance_id: one.factor for one in found}
    assert len(found) == len(factors)
    assert factors["a100-0"] == pytest.approx(2.0)
    assert factors["a100-1"] == pytest.approx(1.0)


def test_a_belief_that_changes_is_a_step_at_its_instant():
    """Whoever changed it: the tuner, or a dispatcher that saw for itself."""
    change = Change(at_s=60.0, believed_factors={"a100-1": 1.5}, hit_factors={"a100-1": 0.5})
    found = believed_speeds(records_of(change), BY_ID)
    (first, second) = [one for one in found if one.instance_id == "a100-1"]
    assert (first.factor, second.factor) == (pytest.approx(1.0), pytest.approx(1.5))
    assert 140.0 < second.at_s < 200.0


def test_events_that_do_not_tell_their_cost_tell_no_belief():
    """A call that was never dispatched, or on an instance that is gone."""
    records = records_of()
    assert believed_speeds(records, {}) == []
    for record in records:
        for key, event in record.calls.items():
            record.calls[key] = msgspec.structs.replace(event, t_comp_s=0.0)
    assert believed_speeds(records, BY_ID) == []
