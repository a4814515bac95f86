"""What a pool should do per second, before it was seen at work."""

import pytest

from shared.scheduling.policy import InstanceView
from shared.scheduling.pool_rate import pool_rate
from shared.scheduling.shapes import default_shapes
from shared.simulation.fleets import builtin_fleet

SHAPES = default_shapes()


def rate(*, capacity: int = 64, num: int = 4, speed_factor: float = 1.0) -> float:
    """Return the rate of a built-in fleet for Text-to-SQL."""
    views = [
        InstanceView(spec=spec, capacity=capacity, speed_factor=speed_factor)
        for spec in builtin_fleet("hetero-1")[:num]
    ]
    return pool_rate(SHAPES, "text2sql", "information_retriever", views)


def test_it_agrees_with_what_the_simulated_fleet_does():
    """Saturated, `hetero-1` does 62 to 75 seconds of calls' own time per second."""
    assert 60.0 < rate() < 78.0


def test_it_grows_with_instances_and_places_and_not_beyond():
    """One call at a time is one second per second and instance; more places give less and less."""
    one, two, four = (rate(capacity=places, num=2) for places in (1, 2, 4))
    assert one == pytest.approx(2.0)
    assert one < two < four < 4 * one
    assert rate(num=2) < rate(num=4)


def test_an_unknown_workflow_has_a_rate_too():
    """Nothing is known of it, and something has to be believed."""
    views = [InstanceView(spec=spec, capacity=4) for spec in builtin_fleet("hetero-1")]
    assert 4.0 < pool_rate({}, "w", "s", views) < 16.0
    assert pool_rate({}, "w", "s", []) == 0.0
