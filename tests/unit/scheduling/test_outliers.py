"""Slow and sick instances: what counts as one, and what it still gets."""

from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.outliers import Drift, OutlierRules, Probes, held_back, is_stalled

RULES = OutlierRules(stall_floor_s=5.0, stall_factor=6.0, first_pause_s=1.0, longest_pause_s=8.0)


def test_a_stall_is_long_compared_with_what_calls_take():
    """Below the floor nothing is a stall, above it a long call is given its time."""
    assert not is_stalled(5.0, 0.1, RULES)
    assert is_stalled(5.1, 0.1, RULES)
    assert not is_stalled(60.0, 10.0, RULES)
    assert is_stalled(60.1, 10.0, RULES)


def test_probes_come_at_pauses_that_double_up_to_a_bound():
    """A failing instance is tried after 1, 2, 4, 8, 8, ... seconds."""
    probes, at_s, times = Probes(RULES), 0.0, []
    while len(times) < 5:
        if probes.may_probe("a", at_s):
            probes.probed("a", at_s)
            times.append(at_s)
        at_s += 0.5
    assert times == [1.0, 3.0, 7.0, 15.0, 23.0]
    probes.well("a")
    assert not probes.may_probe("a", at_s)  # a new sickness begins with the first pause
    assert probes.may_probe("a", at_s + 1.0)


@given(st.dictionaries(st.text(max_size=3), st.booleans(), max_size=12))
def test_at_most_half_are_held_back(sick: dict[str, bool]):
    """Either all sick ones are, or none, where they are more than half."""
    found = held_back(sick)
    assert 2 * len(found) <= len(sick)
    ill = {one for one, is_sick in sick.items() if is_sick}
    assert found in (ill, set())
    assert found == ill or 2 * len(ill) > len(sick)


def feed(drift: Drift, ratios: dict[str, float], count: int) -> None:
    """Let calls end on each instance at a ratio of real to expected time."""
    for _ in range(count):
        for instance_id, ratio in ratios.items():
            drift.finished(instance_id, ratio * 2.0, 2.0)


def test_an_instance_that_becomes_slower_gets_its_factor():
    """Three times slower than it used to be, while the others are as they were."""
    drift = Drift(RULES)
    feed(drift, {"a": 1.0, "b": 4.0, "c": 2.0}, 200)
    assert [drift.factor(one) for one in "abc"] == [1.0, 1.0, 1.0]  # busy is not slow
    feed(drift, {"a": 3.0, "b": 4.0, "c": 2.0}, 100)
    assert 2.5 < drift.factor("a") <= 3.0
    assert [drift.factor(one) for one in "bc"] == [1.0, 1.0]
    feed(drift, {"a": 1.0, "b": 4.0, "c": 2.0}, 100)
    assert drift.factor("a") == 1.0


def test_load_that_slows_all_down_is_nobodys_drift():
    """Fuller batches make every instance slower, in relation to an idle one."""
    drift = Drift(RULES)
    feed(drift, {"a": 1.0, "b": 1.5, "c": 2.0}, 200)
    feed(drift, {"a": 4.0, "b": 6.0, "c": 8.0}, 100)
    assert [drift.factor(one) for one in "abc"] == [1.0, 1.0, 1.0]


def test_few_calls_prove_nothing():
    """An instance of which little is known, or that began anew, has no drift."""
    drift = Drift(RULES)
    feed(drift, {"a": 1.0}, 5)
    feed(drift, {"a": 9.0}, 5)
    assert drift.factor("a") == 1.0
    feed(drift, {"a": 1.0}, 200)
    feed(drift, {"a": 9.0}, 200)
    assert drift.factor("a") > 5.0
    drift.forget("a")
    assert drift.factor("a") == 1.0
    assert drift.factor("unknown") == 1.0
