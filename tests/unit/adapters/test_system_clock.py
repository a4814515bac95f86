"""The system clock: anchoring, learning the broker's offset, slewing."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.adapters.clock import SkewEstimate, SystemClock

START_UNIX_S = 1_700_000_000.0


class Host:
    """A host whose wall and monotonic clocks a test moves."""

    def __init__(self) -> None:
        self.wall_s = START_UNIX_S
        self.mono_s = 500.0
        self.true_offset_s = 0.0

    def pass_time(self, seconds: float) -> None:
        """Let both clocks go on."""
        self.wall_s += seconds
        self.mono_s += seconds

    def clock(self, time_scale: float = 1.0) -> SystemClock:
        """Return a clock on this host."""
        return SystemClock(time_scale, wall=lambda: self.wall_s, monotonic=lambda: self.mono_s)

    def acknowledge(self, clock: SystemClock, *, there_s: float, back_s: float) -> None:
        """Publish a record: the broker stamps it, cut to milliseconds, between the two ways."""
        sent_s = self.mono_s
        self.pass_time(there_s)
        broker_s = START_UNIX_S + (self.mono_s - 500.0) + self.true_offset_s
        self.pass_time(back_s)
        clock.observe_append(math.floor(broker_s * 1000) / 1000, sent_s, self.mono_s)


def settle(host: Host, clock: SystemClock, seconds: float) -> None:
    """Let time pass and read the clock, as a service does all the time."""
    for _ in range(int(seconds * 10)):
        host.pass_time(0.1)
        clock.now_s()


@pytest.mark.parametrize("jump_s", [-3_600.0, 3_600.0])
def test_jump_of_the_host_clock_moves_nothing(jump_s: float) -> None:
    """When the host's wall clock jumps, mesh time goes on by the monotonic clock."""
    host = Host()
    clock = host.clock()
    host.pass_time(1.0)
    host.wall_s += jump_s
    host.pass_time(1.0)
    assert clock.now_s() == START_UNIX_S + 2.0
    assert clock.wall_unix_s() == START_UNIX_S + 2.0


@pytest.mark.parametrize("offset_s", [-90.0, -0.25, 0.0, 0.004, 90.0])
def test_unread_clock_takes_the_brokers_time_at_once(offset_s: float) -> None:
    """Until it is read, the clock steps to what it learns, in either direction."""
    host = Host()
    host.true_offset_s = offset_s
    clock = host.clock()
    host.acknowledge(clock, there_s=0.002, back_s=0.002)
    expected_s = START_UNIX_S + 0.004 + offset_s
    assert clock.now_s() == pytest.approx(expected_s, abs=0.003)
    assert clock.skew_s == pytest.approx(offset_s, abs=clock.skew_bound_s)
    assert clock.skew_bound_s == pytest.approx(0.0025, abs=1e-6)


def test_clock_that_was_read_slews_back_at_half_speed() -> None:
    """A host that is 2 s ahead runs at half speed for 4 s and is then right."""
    host = Host()
    host.true_offset_s = -2.0
    clock = host.clock()
    clock.now_s()
    host.acknowledge(clock, there_s=0.001, back_s=0.001)
    before_s = clock.now_s()
    host.pass_time(1.0)
    assert clock.now_s() - before_s == pytest.approx(0.5)
    host.pass_time(10.0)
    assert clock.now_s() == pytest.approx(START_UNIX_S + 11.002 - 2.0, abs=0.002)


def test_small_lag_is_slewed_and_a_large_one_stepped() -> None:
    """A host behind by half a second slews forward; behind by a minute it steps."""
    for offset_s, gained_s in ((0.5, 0.05), (60.0, 60.0)):
        host = Host()
        host.true_offset_s = offset_s
        clock = host.clock()
        clock.now_s()
        host.acknowledge(clock, there_s=0.001, back_s=0.001)
        before_s = clock.now_s() if offset_s < 1 else START_UNIX_S + 0.002
        host.pass_time(0.1)
        assert clock.now_s() - before_s == pytest.approx(0.1 + gained_s, abs=0.003)


def test_slow_acknowledgements_do_not_move_the_estimate() -> None:
    """The estimate follows the tightest acknowledgements, not those delayed on one way."""
    host = Host()
    host.true_offset_s = 0.040
    clock = host.clock()
    for index in range(80):
        late_s = 0.0 if index % 3 == 0 else 0.3
        host.acknowledge(clock, there_s=0.001, back_s=0.001 + late_s)
        host.pass_time(0.15)
    assert clock.skew_s == pytest.approx(0.040, abs=0.0015)
    assert clock.skew_bound_s < 0.002


def test_clock_follows_a_drifting_offset() -> None:
    """When the offset changes, the clock is right again within the window it remembers."""
    host = Host()
    clock = host.clock()
    for offset_s in (0.0, 0.2, -0.1):
        host.true_offset_s = offset_s
        for _ in range(100):
            host.acknowledge(clock, there_s=0.001, back_s=0.001)
            host.pass_time(0.2)
            clock.now_s()
        assert clock.skew_s == pytest.approx(offset_s, abs=0.002)
        assert clock.now_s() == pytest.approx(
            START_UNIX_S + host.mono_s - 500.0 + offset_s, abs=0.002
        )


@pytest.mark.parametrize(
    ("append_unix_s", "sent_s", "acked_s"),
    [(math.nan, 1.0, 2.0), (START_UNIX_S, 2.0, 1.0), (-1.0, 1.0, 2.0), (math.inf, 1.0, 2.0)],
)
def test_senseless_observations_are_ignored(
    append_unix_s: float, sent_s: float, acked_s: float
) -> None:
    """An observation that cannot be true teaches nothing."""
    host = Host()
    clock = host.clock()
    clock.observe_append(append_unix_s, sent_s, acked_s)
    assert clock.skew_s == 0.0
    assert math.isinf(clock.skew_bound_s)
    assert clock.now_s() == START_UNIX_S


@given(
    steps=st.lists(
        st.tuples(st.floats(-100, 100), st.floats(0, 5), st.floats(0, 2)), min_size=1, max_size=60
    )
)
def test_mesh_time_never_decreases(steps: Sequence[tuple[float, float, float]]) -> None:
    """Whatever offsets are observed, no reading is below an earlier one."""
    host = Host()
    clock = host.clock()
    readings = []
    for offset_s, wait_s, trip_s in steps:
        host.true_offset_s = offset_s
        host.acknowledge(clock, there_s=trip_s / 2, back_s=trip_s / 2)
        readings.append(clock.now_s())
        host.pass_time(wait_s)
        readings += [clock.now_s(), clock.now_s()]
    assert all(later >= earlier for earlier, later in itertools.pairwise(readings))


def test_scale_multiplies_broker_time() -> None:
    """At scale 20 a second of the broker is 20 mesh seconds, offsets included."""
    host = Host()
    host.true_offset_s = 3.0
    clock = host.clock(20.0)
    host.acknowledge(clock, there_s=0.0, back_s=0.0)
    first_s = clock.now_s()
    settle(host, clock, 2.0)
    assert first_s == pytest.approx((START_UNIX_S + 3.0) * 20, abs=0.1)
    assert clock.now_s() - first_s == pytest.approx(40.0, abs=0.1)
    assert clock.mesh_s(START_UNIX_S + 3.0) == pytest.approx(first_s, abs=0.1)


@pytest.mark.parametrize("time_scale", [0.0, -1.0, math.nan, math.inf])
def test_senseless_scales_are_refused(time_scale: float) -> None:
    """A scale that is no positive number is a ValueError."""
    with pytest.raises(ValueError, match="time_scale"):
        SystemClock(time_scale)


def test_bound_covers_the_truth() -> None:
    """The true offset lies within the bound of a single asymmetric observation."""
    estimate = SkewEstimate()
    assert estimate.observe(START_UNIX_S + 5.0, START_UNIX_S, START_UNIX_S + 0.2)
    assert abs(estimate.offset_s - 5.0) <= estimate.bound_s
