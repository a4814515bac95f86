"""When an engine that fails is given another call."""

from services.worker.running import Breaker


def _breaker(num_failures: int, now_s: float = 100.0) -> Breaker:
    breaker = Breaker(threshold=3, first_pause_s=1.0, longest_pause_s=5.0)
    for _ in range(num_failures):
        breaker.failed(now_s)
    return breaker


def test_few_failures_change_nothing() -> None:
    """Below the threshold calls start as ever."""
    assert _breaker(2).allows(num_running=7, now_s=100.0)


def test_failing_engine_gets_one_call_after_a_pause() -> None:
    """At the threshold one call at a time is tried, once the pause is over."""
    breaker = _breaker(3)
    assert not breaker.allows(num_running=0, now_s=100.9)
    assert breaker.allows(num_running=0, now_s=101.0)
    assert not breaker.allows(num_running=1, now_s=101.0)


def test_pauses_double_up_to_a_bound() -> None:
    """Each further failure doubles the pause; it never exceeds the longest."""
    assert not _breaker(4).allows(num_running=0, now_s=101.9)
    assert _breaker(4).allows(num_running=0, now_s=102.0)
    assert _breaker(5_000).allows(num_running=0, now_s=105.0)


def test_one_result_ends_the_caution() -> None:
    """A call that succeeds makes the engine trusted again."""
    breaker = _breaker(9)
    breaker.succeeded()
    assert breaker.allows(num_running=7, now_s=100.0)
