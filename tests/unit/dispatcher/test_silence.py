"""When an instance counts as dead."""

from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.silence import SilenceWatch


def test_silence_is_measured_between_append_times_of_the_partition():
    """From the last heartbeat to the last probe that came back."""
    watch = SilenceWatch(3.0)
    for second in range(10):
        watch.probe(100.0 + second)
    assert watch.silence_s(104.0) == 5.0


def test_silence_before_the_first_probe_does_not_count():
    """A new owner's timers begin with its own first probe."""
    watch = SilenceWatch(3.0)
    assert watch.silence_s(0.0) == 0.0
    watch.probe(100.0)
    watch.probe(101.0)
    assert watch.silence_s(20.0) == 1.0


def test_a_gap_between_probes_starts_all_timers_anew():
    """An outage, a pause of this process or a jump of the broker's clock is nobody's silence."""
    for jump_s in (3.5, 3_600.0, -3_600.0):
        watch = SilenceWatch(3.0)
        watch.probe(100.0)
        watch.probe(101.0)
        watch.probe(101.0 + jump_s)
        watch.probe(102.0 + jump_s)
        assert watch.silence_s(100.0) == 1.0


@given(
    gaps=st.lists(st.floats(0.0, 8.0), min_size=1, max_size=50),
    heard_before_s=st.floats(0.0, 400.0),
)
def test_silence_never_exceeds_what_unbroken_probes_cover(gaps: list[float], heard_before_s: float):
    """Silence is at most the time since the last gap, and at most the time since the heartbeat."""
    watch = SilenceWatch(3.0)
    now_s = chain_s = 0.0
    watch.probe(0.0)
    for gap_s in gaps:
        now_s += gap_s
        if now_s - (now_s - gap_s) > 3.0:
            chain_s = now_s
        watch.probe(now_s)
    heard_s = now_s - heard_before_s
    assert watch.silence_s(heard_s) <= now_s - chain_s
    assert watch.silence_s(heard_s) <= now_s - heard_s
