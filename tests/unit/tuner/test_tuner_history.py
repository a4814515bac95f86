"""What was in force and what was true while a window happened."""

import msgspec

from services.tuner.history import Truth, past_of
from shared.contracts.messages import AlphaUpdate, SpeedUpdate, WorkflowProfile
from shared.runtime.believed_speeds import Believed
from shared.scheduling.shapes import default_shapes
from shared.simulation.scenario import Change
from shared.simulation.speed_fit import SpeedFit


def alpha(value: float, at_s: float, pool: str = "p") -> AlphaUpdate:
    """Something said about α."""
    return AlphaUpdate(pool=pool, alpha=value, revision=1, at_s=at_s)


def speed(factor: float, hit_factor: float, at_s: float) -> SpeedUpdate:
    """Something said about an instance."""
    return SpeedUpdate(instance_id="a", factor=factor, hit_factor=hit_factor, revision=1, at_s=at_s)


def test_what_was_said_before_the_window_was_in_force_when_it_began():
    """The latest of each kind, whatever the order in which it is given; other pools aside."""
    said = [
        alpha(0.2, 50.0),
        alpha(0.4, 20.0),
        alpha(0.9, 60.0, pool="q"),
        speed(2.0, 0.5, 30.0),
        speed(3.0, 0.0, 70.0),
    ]
    believed = [Believed(40.0, "a", 2.0), Believed(80.0, "a", 3.0)]
    past = past_of(said, believed, "p", 0.7, from_s=100.0, now_s=400.0)
    assert (past.alpha, past.believed_factors, past.hit_factors) == (0.2, {"a": 3.0}, {"a": 0.0})
    assert past.shapes == default_shapes()
    assert past.changes == ()
    assert past.seen_until_s == 300.0


def test_nothing_said_means_what_services_start_with():
    """The initial α, the built-in shapes, speeds as profiled."""
    past = past_of([], [], "p", 0.7, from_s=0.0, now_s=10.0)
    assert (past.alpha, past.believed_factors, past.hit_factors) == (0.7, {}, {})


def test_of_an_instance_without_calls_is_believed_what_was_said():
    """A slow instance that gets nothing is not taken for a fast one; calls tell better."""
    said = [speed(2.0, 1.0, 30.0), speed(3.0, 1.0, 130.0)]
    past = past_of(said, [], "p", 0.7, from_s=100.0, now_s=400.0)
    assert past.believed_factors == {"a": 2.0}
    assert [one.believed_factors for one in past.changes if one.believed_factors] == [{"a": 3.0}]
    past = past_of(said[1:], [], "p", 0.7, from_s=100.0, now_s=400.0)
    assert past.believed_factors == {"a": 1.0}
    past = past_of(said, [Believed(90.0, "a", 1.5)], "p", 0.7, from_s=100.0, now_s=400.0)
    assert past.believed_factors == {"a": 1.5}
    assert not any(one.believed_factors for one in past.changes)


def test_what_was_said_later_comes_at_its_instant():
    """On the window's own clock, and nothing of it counts before."""
    (shape,) = default_shapes().values()
    other = msgspec.structs.replace(shape, workflow="other")
    said = [
        alpha(0.2, 150.0),
        WorkflowProfile(shape=other, revision=1, at_s=130.0),
        speed(2.0, 0.5, 110.0),
    ]
    believed = [Believed(105.0, "a", 1.5), Believed(112.0, "a", 2.0)]
    past = past_of(said, believed, "p", 0.7, from_s=100.0, now_s=400.0)
    assert past.alpha == 0.7
    assert past.believed_factors == {"a": 1.5}
    assert "other" not in past.shapes
    assert [change.at_s for change in past.changes] == [10.0, 12.0, 30.0, 50.0]
    assert past.changes[0].hit_factors == {"a": 0.5}
    assert past.changes[1].believed_factors == {"a": 2.0}
    assert past.changes[2].shapes == {**default_shapes(), "other": other}
    assert past.changes[3].alpha == 0.2


def test_an_instance_was_as_fast_as_before_until_its_speed_changed():
    """A window that begins earlier is replayed with the change in it."""
    truth = Truth()
    truth.take_speeds({"a": SpeedFit(factor=1.1, num_calls=50)})
    truth.take_speeds({"a": SpeedFit(factor=3.0, num_calls=50, changed_at_s=200.0)})
    assert truth.speeds_at(150.0) == {"a": 1.1}
    assert truth.speeds_at(200.0) == {"a": 3.0}
    assert truth.changes(150.0) == (Change(at_s=50.0, speed_factors={"a": 3.0}),)
    assert truth.changes(200.0) == ()


def test_a_cache_is_lost_and_found_again():
    """From the instant on since which its hits are counted; without news it stays as it was."""
    truth = Truth()
    truth.take_hits({"a": 0.9, "b": 1.0}, 0.0)
    truth.take_hits({"a": 0.01, "b": 1.0}, 100.0)
    truth.take_hits({"b": 0.0}, 200.0)
    truth.take_hits({"a": 0.8}, 300.0)
    assert [truth.cold_at(at_s) for at_s in (50.0, 100.0, 250.0, 300.0)] == [
        (),
        ("a",),
        ("a", "b"),
        ("b",),
    ]
    assert truth.changes(150.0) == (
        Change(at_s=50.0, cold=("a", "b")),
        Change(at_s=150.0, cold=("b",)),
    )
