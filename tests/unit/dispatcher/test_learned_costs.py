"""What the tuner learned of instances changes what later calls are expected to cost there."""

import pytest

from services.dispatcher.control import Control
from services.dispatcher.fleet_state import FleetState
from shared.contracts.messages import InstanceState, SpeedUpdate
from shared.scheduling.dispatch import cost_on
from shared.scheduling.prefix import PrefixCacheModel
from tests.support.scheduling import chain, make_call, make_spec


def cost_s(control: Control) -> float:
    """Return the expected cost of a call whose prompt should be cached, as the planner sees it."""
    fleet = FleetState(live_s=60.0)
    state = InstanceState(instance_id="a", phase="serving", epoch=0, spec=make_spec("a"))
    fleet.observe(0, state, 0.0)
    (view,) = fleet.views(1.0, control.speeds, control.hits)
    prefixes = PrefixCacheModel(10_000)
    prefixes.touch(chain(("template", 960)))
    call = make_call(prefix=chain(("template", 960)), output_tokens=1.0)
    return cost_on(call, view, prefixes).t_comp_s


def learned(**fields) -> Control:
    """Return what a dispatcher knows after one update of instance `a`."""
    control = Control("hexgen-flow", 0.1)
    control.apply(SpeedUpdate(instance_id="a", revision=1, **fields))
    return control


def test_a_slow_instance_costs_in_proportion():
    """Three times slower, three times the cost."""
    before = cost_s(Control("hexgen-flow", 0.1))
    assert cost_s(learned(factor=3.0)) == pytest.approx(3.0 * before)


def test_hits_that_do_not_happen_are_not_expected():
    """960 of 1,000 prompt tokens should be cached; without hits all 1,000 are computed."""
    assert cost_s(learned(factor=1.0)) == pytest.approx(0.035)
    assert cost_s(learned(factor=1.0, hit_factor=0.0)) == pytest.approx(1_000 / 5_000)


def test_absurd_factors_are_bounded():
    """Beyond a hundred times it is an error, not a speed."""
    assert learned(factor=1e6).speeds["a"] == 100.0
