"""The tuner's window: queries rebuilt from latency events, whatever comes in."""

import msgspec
import pytest

from shared.contracts.episodes import episode
from shared.contracts.messages import CallTimes, Usage
from shared.contracts.query_window import Window, implausible
from tests.support.tuning import query_events


def _fill(window: Window, count: int) -> None:
    offset = 0
    for index in range(count):
        for event in query_events(f"q{index}", arrival_s=10.0 * index, latency_s=20.0):
            window.add(event, offset)
            offset += 1


def test_a_query_is_rebuilt_with_its_stages_and_parallel_calls():
    """Arrival, structure and lengths survive; recorded call times do not."""
    window = Window(10)
    _fill(window, 2)
    found = episode(window.ended(now_s=1_000.0, quiet_s=1.0))
    assert [query.arrival_s for query in found.queries] == [0.0, 10.0]
    stages = found.queries[0].stages
    assert [(stage.stage, len(stage.calls)) for stage in stages] == [("draft", 1), ("judge", 2)]
    assert stages[0].calls[0].input_tokens == 500
    assert [end.latency_s for end in found.ends] == [20.0, 20.0]
    assert found.generated_tokens == {"a100-0": 300}


def test_a_query_with_a_missing_sibling_has_not_ended():
    """A stage that announced two calls and brought one is still running."""
    window = Window(10)
    for offset, event in enumerate(query_events("q", arrival_s=0.0, latency_s=10.0)[:-1]):
        window.add(event, offset)
    assert window.ended(now_s=1_000.0, quiet_s=1.0) == []


def test_a_query_ends_only_after_silence():
    """Another stage may follow; only silence ends a query."""
    window = Window(10)
    _fill(window, 1)
    assert window.ended(now_s=45.0, quiet_s=30.0) == []
    assert len(window.ended(now_s=50.0, quiet_s=30.0)) == 1


def test_duplicates_are_counted_and_change_nothing():
    """The topic is at-least-once."""
    window = Window(10)
    _fill(window, 1)
    before = episode(window.ended(1_000.0, 1.0))
    for event in query_events("q0", arrival_s=0.0, latency_s=20.0):
        assert window.add(event, 99) == "duplicate"
    assert window.num_duplicates == 3
    assert episode(window.ended(1_000.0, 1.0)) == before


def test_the_window_is_bounded_and_forgets_the_oldest():
    """Memory does not grow with time, and the commit position follows the oldest query."""
    window = Window(5)
    _fill(window, 20)
    assert len(window) == 5
    assert window.oldest_offset() == 45


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"times": CallTimes(ready_at_s=50.0, finished_at_s=10.0)}, "time_runs_backwards"),
        ({"times": CallTimes(ready_at_s=5.0, finished_at_s=1e12)}, "duration"),
        ({"arrival_s": -5.0}, "arrival_or_slo"),
        ({"slo_s": 0.0}, "arrival_or_slo"),
        ({"usage": Usage()}, "usage"),
    ],
)
def test_impossible_events_are_left_out_and_counted(change, fault):
    """Clock jumps and lies have no influence on what is replayed."""
    event = query_events("q", arrival_s=0.0, latency_s=10.0)[0]
    assert implausible(event) is None
    window = Window(10)
    assert window.add(msgspec.structs.replace(event, **change), 0) == fault
    assert window.num_implausible == {fault: 1}
    assert len(window) == 0
