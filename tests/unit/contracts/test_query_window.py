"""The tuner's window: queries rebuilt from latency events, whatever comes in."""

import msgspec
import pytest

from shared.contracts.episodes import episode
from shared.contracts.messages import CallTimes, Usage
from shared.contracts.query_window import Window, implausible
from shared.domain.trace import PrefixPart
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


def _think(event, think_s: float, ready_s: float, parents: tuple[str, ...]):
    times = msgspec.structs.replace(
        event.times, ready_at_s=ready_s, started_at_s=ready_s, first_token_at_s=ready_s
    )
    return msgspec.structs.replace(event, think_s=think_s, times=times, parents=parents)


@pytest.mark.parametrize(("claimed_s", "believed_s"), [(2.0, 2.0), (500.0, 3.0), (-7.0, 0.0)])
def test_a_think_time_is_at_most_the_gap_that_was_seen(claimed_s, believed_s):
    """The parent ended at 5 s and the call was ready at 8 s: a producer cannot claim more."""
    first, *rest = query_events("q", arrival_s=0.0, latency_s=10.0, siblings=1)
    window = Window(10)
    window.add(first, 0)
    window.add(_think(rest[0], claimed_s, 8.0, (first.request_id,)), 1)
    (record,) = window.records()
    assert record.trace().stages[1].think_s == pytest.approx(believed_s)


def test_a_prefix_longer_than_its_prompt_is_cut():
    """Claimed shared text beyond the prompt is no shared text."""
    event = query_events("q", arrival_s=0.0, latency_s=10.0)[0]
    chain = (PrefixPart("a", 400), PrefixPart("b", 400))
    window = Window(10)
    window.add(msgspec.structs.replace(event, prefix=chain), 0)
    (record,) = window.records()
    assert record.trace().stages[0].calls[0].prefix == chain[:1]


def test_events_of_instances_that_never_were_are_left_out():
    """Nobody reported such an instance: it may be anything."""
    window = Window(10)
    event = query_events("q", arrival_s=0.0, latency_s=10.0)[0]
    assert window.add(event, 0, instances={"l40s-0"}) == "unknown_instance"
    assert window.add(event, 0, instances={"a100-0"}) is None


def test_events_of_the_future_are_left_out():
    """A clock that jumped ahead by an hour: the event ended in an hour's time."""
    window = Window(10)
    event = query_events("q", arrival_s=3_600.0, latency_s=10.0)[0]
    assert window.add(event, 0, now_s=20.0) == "future"


def test_a_query_has_one_owner():
    """A second tenant that uses a known query id changes nothing of that query."""
    first, second, _ = query_events("q", arrival_s=0.0, latency_s=10.0)
    window = Window(10)
    window.add(first, 0)
    assert window.add(msgspec.structs.replace(second, tenant="mallory"), 1) == "two_owners"


def test_a_stage_that_was_always_the_last_ends_a_query_at_once():
    """Twelve queries ended after `judge`; the thirteenth need not be waited for."""
    window = Window(50)
    _fill(window, 12)
    late = query_events("late", arrival_s=990.0, latency_s=9.0)
    for offset, event in enumerate(late):
        window.add(event, 1_000 + offset)
    assert len(window.ended(now_s=1_000.0, quiet_s=60.0)) == 13


def test_under_overload_silence_is_longer_than_the_slowest_response():
    """Calls took up to 500 s to answer; 120 s of silence do not end a query."""
    window = Window(50)
    for index in range(5):
        for offset, event in enumerate(query_events(f"q{index}", arrival_s=0.0, latency_s=1_000.0)):
            window.add(event, offset)
    window.add(query_events("open", arrival_s=500.0, latency_s=1_000.0)[0], 99)
    ended, running = window.split(now_s=1_200.0, quiet_s=120.0)
    assert "open" in {record.query_id for record in running}
    assert ended == []


def test_a_running_query_is_completed_from_one_that_went_the_same_way_and_is_censored():
    """Its remainder is borrowed, its time so far is a lower bound."""
    window = Window(50)
    _fill(window, 12)
    window.add(query_events("open", arrival_s=500.0, latency_s=100.0)[0], 99)
    ended, running = window.split(now_s=600.0, quiet_s=60.0)
    found = episode(ended, running, now_s=600.0)
    assert found.is_censored == (*[False] * 12, True)
    assert [len(stage.calls) for stage in found.queries[-1].stages] == [1, 2]
    assert found.ends[-1].latency_s == 100.0
    assert found.percentile_s(95) == 100.0
    assert episode(ended, running, now_s=600.0) == found


def test_a_running_query_nobody_went_before_is_left_out():
    """There is nothing to borrow from."""
    window = Window(50)
    window.add(query_events("open", arrival_s=500.0, latency_s=100.0)[0], 99)
    ended, running = window.split(now_s=560.0, quiet_s=60.0)
    assert len(running) == 1
    assert len(episode(ended, running, now_s=560.0).queries) == 0
