"""A pool's rate is learned while it is busy, and never from idleness."""

import pytest

from shared.scheduling.throughput import Finished, Throughput

PRIOR = 5.0


def feed(throughput: Throughput, seconds: range, *, per_s: int, is_full: bool) -> None:
    """Let so many calls of one second's work end in every second."""
    for second in seconds:
        for _ in range(per_s):
            throughput.finished(
                Finished(
                    work_s=1.0,
                    t_comp_s=1.0,
                    is_full=is_full,
                    service_s=3.0,
                    ended_s=float(second),
                ),
                PRIOR,
            )


def test_before_anything_is_known_the_prior_counts():
    """A pool of which nothing was heard does what is believed of it."""
    assert Throughput(60.0).rate(PRIOR) == PRIOR


def test_a_busy_pool_shows_its_rate():
    """Twenty units a second with calls waiting are the rate, above or below the prior."""
    for per_s in (20, 2):
        throughput = Throughput(60.0)
        feed(throughput, range(300), per_s=per_s, is_full=True)
        assert throughput.rate(PRIOR) == pytest.approx(per_s, rel=0.1)


def test_an_idle_pool_proves_only_that_it_can_do_so_much():
    """With little to do and nothing waiting the rate does not fall."""
    throughput = Throughput(60.0)
    feed(throughput, range(300), per_s=20, is_full=True)
    feed(throughput, range(300, 900), per_s=1, is_full=False)
    assert throughput.rate(PRIOR) == pytest.approx(20.0, rel=0.1)


def test_a_pool_that_became_slower_is_believed_after_a_while():
    """Busy and slow is slow: the former rate is forgotten within minutes."""
    throughput = Throughput(60.0)
    feed(throughput, range(300), per_s=20, is_full=True)
    feed(throughput, range(300, 1_800), per_s=4, is_full=True)
    assert throughput.rate(PRIOR) == pytest.approx(4.0, rel=0.1)


def test_refusing_while_nothing_waits_proves_the_rate_too_low():
    """A rate believed too low grows with what it lets in, until calls wait."""
    throughput, per_s = Throughput(60.0), 2
    for second in range(0, 1_200, 10):
        throughput.refused()
        feed(throughput, range(second, second + 10), per_s=per_s, is_full=False)
        per_s = min(60, max(2, int(throughput.rate(PRIOR) * 0.6)))
    assert 60.0 <= throughput.rate(PRIOR) <= 4 * 60.0


def test_the_stretch_follows_service_times():
    """Calls that take three times as long as alone show a stretch of three."""
    throughput = Throughput(60.0)
    assert throughput.stretch == 1.0
    feed(throughput, range(300), per_s=20, is_full=True)
    assert throughput.stretch == pytest.approx(3.0, rel=0.05)


def test_a_pool_with_little_to_do_stretches_nobody():
    """Calls that were slow while nothing waited are no sign of overload."""
    throughput = Throughput(60.0)
    feed(throughput, range(300), per_s=20, is_full=False)
    assert throughput.stretch == 1.0
