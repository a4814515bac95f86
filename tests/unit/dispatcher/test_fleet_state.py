"""What a dispatcher knows of the fleet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.fleet_state import FleetState, OwnAssignments
from shared.contracts.messages import InstanceState
from shared.domain.trace import PrefixPart
from tests.support.scheduling import make_spec

LIVE_S = 5.0


def make_state(phase: str = "serving", epoch: int = 0, **fields: object) -> InstanceState:
    """Return a state of instance `a`."""
    return InstanceState(
        instance_id="a",
        phase=phase,  # type: ignore[arg-type]
        epoch=epoch,
        spec=make_spec("a"),
        **fields,  # type: ignore[arg-type]
    )


def fleet_of(*records: tuple[int, InstanceState], heard_at_s: float = 100.0) -> FleetState:
    """Return a fleet that has seen (offset, state) records."""
    fleet = FleetState(LIVE_S)
    for offset, state in records:
        fleet.observe(offset, state, heard_at_s)
    return fleet


ONE_CALL = st.tuples(st.sampled_from(["ack", "state"]), st.integers(0, 40))


@given(
    t_comps=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12),
    foreign=st.lists(st.booleans(), min_size=12, max_size=40),
    steps=st.lists(ONE_CALL, max_size=60),
)
def test_exactly_the_own_assignments_after_the_accounted_offset_count(
    t_comps: list[float], foreign: list[bool], steps: list[tuple[str, int]]
):
    """Whatever the order of acknowledgements and states, nothing is counted twice or forgotten.

    The model: the topic holds own calls and other dispatchers' calls in some order; a state says
    how far the worker has read; an acknowledgement may come before or after the state that
    contains it. What counts is the set of own calls that are unacknowledged, or lie after the last
    state's offset.
    """
    offsets = [i for i, is_foreign in enumerate(foreign) if not is_foreign][: len(t_comps)]
    own = OwnAssignments()
    cost = dict(zip(offsets, t_comps, strict=False))
    for offset, t_comp_s in cost.items():
        own.reserve((str(offset), 0), t_comp_s)
    acknowledged: set[int] = set()
    accounted = -1
    ever_accounted: dict[int, int] = {}
    for kind, number in steps:
        if kind == "ack" and offsets:
            offset = offsets[number % len(offsets)]
            own.acknowledge((str(offset), 0), offset)
            acknowledged.add(offset)
        else:
            accounted = max(accounted, number)  # within one epoch it never goes back
            own.account(accounted)
        ever_accounted[accounted] = accounted
        expected = {o for o in cost if o not in acknowledged or o > accounted}
        assert own.count == len(expected)
        assert own.t_comp_s == pytest.approx(sum(cost[o] for o in expected))
    for offset in cost:
        own.acknowledge((str(offset), 0), offset)
    own.account(10_000)
    assert (own.count, own.t_comp_s) == (0, 0.0)


def test_a_released_assignment_no_longer_counts():
    """A publish that failed leaves no trace, and releasing twice subtracts once."""
    own = OwnAssignments()
    own.reserve(("r", 0), 3.0)
    own.reserve(("s", 0), 4.0)
    own.release(("r", 0))
    own.release(("r", 0))
    assert (own.count, own.t_comp_s) == (1, 4.0)


def test_a_view_adds_backlog_foreign_load_and_own_later_assignments():
    """Backlog, waiting calls and speed are what the policy sees."""
    fleet = fleet_of(
        (1, make_state(backlog_s=10.0, foreign_s=2.0, num_waiting=3, accounted_offset=5))
    )
    own = fleet.reserve("a", ("r", 0), 1.5)
    own.acknowledge(("r", 0), 6)
    fleet.reserve("a", ("s", 0), 0.5)
    (view,) = fleet.views(100.0, {"a": 1.25})
    assert (view.backlog_s, view.num_waiting, view.speed_factor) == (14.0, 5, 1.25)
    fleet.observe(2, make_state(backlog_s=11.5, accounted_offset=6), 101.0)
    (view,) = fleet.views(101.0, {})
    assert (view.backlog_s, view.num_waiting, view.speed_factor) == (12.0, 1, 1.0)


def test_the_latest_state_of_the_highest_epoch_counts():
    """A begin record's epoch is its offset; records of lower epochs are ignored."""
    fleet = fleet_of((10, make_state("begin", -1)), (11, make_state(epoch=10, backlog_s=1.0)))
    assert not fleet.observe(12, make_state(epoch=4, backlog_s=99.0), 100.0)
    (view,) = fleet.views(100.0, {})
    assert view.backlog_s == 1.0
    fleet.observe(13, make_state("begin", -1), 100.0)
    assert fleet.views(100.0, {}) == []
    assert not fleet.observe(14, make_state(epoch=10), 100.0)
    assert fleet.observe(15, make_state(epoch=13), 100.0)
    assert len(fleet.views(100.0, {})) == 1


def test_a_fence_ends_the_epoch_before_it():
    """`gone` with epoch -1 begins an epoch in which the old worker's states do not count."""
    fleet = fleet_of((3, make_state(epoch=1)), (7, make_state("gone", -1)))
    assert fleet.views(100.0, {}) == []
    assert not fleet.observe(8, make_state(epoch=1), 100.0)
    assert fleet.views(100.0, {}) == []


@pytest.mark.parametrize("phase", ["begin", "draining", "gone"])
def test_only_serving_instances_get_calls(phase: str):
    """Any other phase is not offered."""
    assert fleet_of((1, make_state(phase))).views(100.0, {}) == []


def test_silence_beyond_the_bound_ends_liveness():
    """Liveness is silence on our own monotonic clock since we read the last state."""
    fleet = fleet_of((1, make_state()))
    assert fleet.is_live("a", 100.0 + LIVE_S)
    assert not fleet.is_live("a", 100.1 + LIVE_S)


def test_silence_counts_only_while_somebody_is_heard():
    """Where nothing at all was read for a while, no instance's silence is certain."""
    fleet = fleet_of((1, make_state()))
    for now_s in (99.0, 102.0, 105.0, 108.0):
        fleet.listen(now_s)
    assert len(fleet.heard_within(99.0, 108.0)) == 1
    assert fleet.heard_within(101.0, 108.0) == []
    assert len(fleet.heard_within(101.0, 108.1 + LIVE_S)) == 1  # nothing is read at present
    fleet.listen(208.0)
    assert len(fleet.heard_within(207.0, 208.0)) == 1  # since then nothing could be heard
    fleet.listen(211.0)
    assert fleet.heard_within(208.0, 211.0) == []


def test_a_tombstone_removes_the_instance():
    """What is removed is not known any more, and late acknowledgements harm nobody."""
    fleet = fleet_of((1, make_state()))
    own = fleet.reserve("a", ("r", 0), 1.0)
    fleet.remove("a")
    own.acknowledge(("r", 0), 3)
    assert fleet.views(100.0, {}) == []


def test_an_unreachable_instance_is_offered_again_in_its_next_life():
    """A missing topic disqualifies one life only."""
    fleet = fleet_of((1, make_state(epoch=1)))
    fleet.mark_unreachable("a")
    fleet.observe(2, make_state(epoch=1), 100.0)
    assert fleet.views(100.0, {}) == []
    fleet.observe(3, make_state(epoch=3), 100.0)
    assert len(fleet.views(100.0, {})) == 1


def test_a_new_life_has_a_cold_prefix_cache():
    """The model of the cache is kept within an epoch and dropped with it."""
    chain = (PrefixPart("p", 320),)
    fleet = fleet_of((1, make_state(epoch=1)))
    fleet.prefixes()["a"].touch(chain)
    fleet.observe(2, make_state(epoch=1, backlog_s=3.0), 100.0)
    assert fleet.prefixes()["a"].expected_cached_tokens(chain, 1_000) == 320
    fleet.observe(3, make_state(epoch=3), 100.0)
    assert fleet.prefixes()["a"].expected_cached_tokens(chain, 1_000) == 0


def test_equal_specs_stay_the_same_object():
    """Predictions are cached by identity, and every heartbeat decodes a new spec."""
    fleet = fleet_of((1, make_state(epoch=1)))
    (before,) = fleet.views(100.0, {})
    fleet.observe(2, make_state(epoch=1), 100.0)
    (after,) = fleet.views(100.0, {})
    assert before.spec is after.spec
