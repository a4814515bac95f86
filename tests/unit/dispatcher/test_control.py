"""Control messages and cancellations as the dispatcher applies them."""

import itertools

import pytest

from services.dispatcher.control import Cancellations, Control, pool_of
from shared.contracts.messages import AlphaUpdate, CancelQuery, SpeedUpdate, WorkflowProfile
from shared.domain.profile import StageEstimate, WorkflowShape
from shared.errors import ConfigError
from tests.support.scheduling import make_spec


def test_the_highest_revision_wins_in_any_order():
    """Of a key only the newest value is in force; equal revisions change nothing."""
    updates = [AlphaUpdate(pool="m", alpha=r / 10, revision=r) for r in (1, 2, 3)]
    for order in itertools.permutations(updates):
        control = Control("hexgen-flow", 0.5)
        for update in order:
            control.apply(update)
        assert control.alpha("m") == 0.3
        assert not control.apply(AlphaUpdate(pool="m", alpha=0.9, revision=3))
        assert control.alpha("other") == 0.5


def test_revisions_of_different_keys_are_independent():
    """A profile, a speed and an α do not shadow one another."""
    control = Control("hexgen-flow", 0.5)
    shape = WorkflowShape(
        workflow="w", stages={"s": StageEstimate(input_tokens=10, output_tokens=77)}
    )
    assert control.apply(AlphaUpdate(pool="w", alpha=0.1, revision=9))
    assert control.apply(WorkflowProfile(shape=shape, revision=1))
    assert control.apply(SpeedUpdate(instance_id="w", factor=2.0, revision=1))
    assert control.predictor.output_tokens("w", "s") == 77
    assert control.speeds == {"w": 2.0}


def test_a_wrong_policy_or_alpha_fails_at_once():
    """Settings are judged at start."""
    with pytest.raises(ConfigError):
        Control("nonsense", 0.5)
    with pytest.raises(ConfigError):
        Control("hexgen-flow", 2.0)


def test_an_adapter_belongs_to_the_pool_of_its_base_model():
    """α is kept per pool of equal base models."""
    specs = [make_spec("a", model="base", adapters=("lora",)), make_spec("b", model="other")]
    assert pool_of("lora", specs) == "base"
    assert pool_of("other", specs) == "other"
    assert pool_of("unknown", specs) == "unknown"


def test_a_tombstone_holds_until_it_runs_out():
    """A cancelled query's calls are due to end until `until_s`, not after."""
    cancelled = Cancellations()
    assert cancelled.add(CancelQuery(query_id="q", until_s=50.0), 10.0)
    assert cancelled.take_due() == ["q"]
    assert cancelled.take_due() == []
    cancelled.check(49.0, "q")
    assert cancelled.take_due() == ["q"]
    cancelled.check(51.0, "q")
    cancelled.check(20.0, "other")
    assert cancelled.take_due() == []
    assert not cancelled.add(CancelQuery(query_id="late", until_s=5.0), 10.0)
    cancelled.forget_expired(51.0)
    cancelled.check(49.0, "q")
    assert cancelled.take_due() == []


def test_a_later_tombstone_never_shortens_an_earlier_one():
    """Of two tombstones of a query the longer one counts."""
    cancelled = Cancellations()
    cancelled.add(CancelQuery(query_id="q", until_s=50.0), 0.0)
    cancelled.add(CancelQuery(query_id="q", until_s=20.0), 0.0)
    cancelled.take_due()
    cancelled.check(40.0, "q")
    assert cancelled.take_due() == ["q"]


def test_a_tombstone_may_name_a_call_instead_of_its_query():
    """A call that comes to wait is due to end when its own id is cancelled."""
    cancelled = Cancellations()
    cancelled.add(CancelQuery(query_id="call", until_s=50.0), 0.0)
    cancelled.take_due()
    cancelled.check(40.0, "query", "call")
    cancelled.check(40.0, "query", "sibling")
    assert cancelled.take_due() == ["call"]
