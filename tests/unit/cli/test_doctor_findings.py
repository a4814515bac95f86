"""The doctor's rules: each finding from what causes it, and none from a mesh that is well."""

from typing import Any

import msgspec
import pytest

from services.cli.doctor.examination import _place
from services.cli.doctor.findings import Finding, diagnose
from services.cli.doctor.snapshot import (
    DeadLetterView,
    InstanceView,
    PartitionView,
    RedisView,
    Snapshot,
)
from services.cli.topics import Finding as TopicFinding
from services.cli.workload import load_fleet
from shared.contracts.messages import DeadLetter, InstanceState
from shared.ports import Committed
from shared.runtime.offsets import OffsetTracker

SPEC = load_fleet("hetero-1")[0]


def state(**fields: Any) -> InstanceState:
    """Return what an instance at work says."""
    known = {"instance_id": SPEC.instance_id, "phase": "serving", "epoch": 1, "spec": SPEC}
    return InstanceState(**{**known, **fields})


def view(first: InstanceState | None = None, **fields: Any) -> InstanceView:
    """Return an instance heard a moment ago."""
    last = fields.pop("last", first or state())
    known = {"first": first or last, "last": last, "age_s": 0.5, "phase_age_s": 60, "clock_s": 0.01}
    return InstanceView(**{**known, **fields})


def reader(**fields: Any) -> PartitionView:
    """Return a reader that is done with everything."""
    known = {"service": "the dispatchers", "topic": "t", "partition": 0}
    return PartitionView(**{**known, "first_lag": 0, "last_lag": 0, "moved": False, **fields})


WELL = Snapshot(
    address="k:9092",
    prefix="p.",
    watched_s=4.0,
    topics=(TopicFinding(name="p.stage-requests", state="ok"),),
    instances={SPEC.instance_id: view()},
    partitions=(reader(),),
    dispatcher_age_s=0.5,
    host_clock_s=0.02,
)


def found(**changes: Any) -> list[Finding]:
    """Return what is wrong with a mesh that is well but for these changes."""
    return diagnose(msgspec.structs.replace(WELL, **changes))


def problems(**changes: Any) -> list[str]:
    """Return the names of what is wrong."""
    return [finding.problem for finding in found(**changes)]


def test_a_mesh_that_is_well_has_no_finding():
    """Nothing is said about calls that run, wait and are read in time."""
    busy = view(state(num_waiting=5, num_running=4))
    lagging = reader(first_lag=9, last_lag=12, moved=True, oldest_s=30.0)
    assert problems() == []
    assert problems(instances={"a": busy}, partitions=(lagging,)) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kafka_error": "refused"}, "kafka-unreachable"),
        ({"redis": RedisView(error="refused")}, "redis-unreachable"),
        ({"redis": RedisView(eviction="allkeys-lru")}, "redis-evicts"),
        ({"instances": {}}, "no-instance"),
        ({"dispatcher_age_s": None}, "no-dispatcher"),
        ({"dispatcher_age_s": 9.0}, "no-dispatcher"),
        ({"host_clock_s": -3.0}, "clock-skew"),
        ({"instances": {"a": view(clock_s=4.0)}}, "clock-skew"),
        ({"instances": {"a": view(clock_s=1.5e10)}}, "time-scale"),
        ({"instances": {"a": view(state(num_waiting=2))}}, "engine-unready"),
        (
            {"instances": {"a": view(), "b": view(state(phase="begin"), phase_age_s=300.0)}},
            "engine-unready",
        ),
        ({"instances": {"a": view(), "b": view(age_s=20.0)}}, "instance-silent"),
        ({"instances": {"a": view(state(failures_in_a_row=3))}}, "engine-failing"),
        (
            {"instances": {"a": view(state(num_running=1, stalled_s=90.0))}},
            "engine-stalled",
        ),
        (
            {"instances": {"a": view(state(num_waiting=8, num_running=1, queue_bound=8))}},
            "queue-full",
        ),
        ({"partitions": (reader(first_lag=3, last_lag=3, oldest_s=50.0),)}, "reader-stuck"),
        (
            {
                "partitions": (
                    reader(instance_id=SPEC.instance_id, first_lag=3, oldest_s=11.0, first_end=9),
                ),
                "instances": {SPEC.instance_id: view(state(accounted_offset=5, num_running=1))},
            },
            "reader-stuck",
        ),
        (
            {"partitions": (reader(first_lag=3, last_lag=9, oldest_s=90.0, moved=True),)},
            "lag-grows",
        ),
        ({"partitions": (reader(num_forgotten=4),)}, "retention-too-short"),
        (
            {"topics": (TopicFinding(name="p.x", state="wrong", problems=("has 1: do y",)),)},
            "topic-wrong",
        ),
    ],
)
def test_each_cause_has_its_finding_and_no_other(changes: dict[str, Any], problem: str):
    """One thing wrong gives exactly one finding, with something to do."""
    findings = found(**changes)
    assert [finding.problem for finding in findings] == [problem]
    assert findings[0].advice
    assert findings[0].detail


def test_work_that_takes_long_is_no_stuck_reader():
    """A call in its engine for minutes; a call that a dispatcher keeps for an instance to come."""
    long = reader(
        instance_id=SPEC.instance_id, first_lag=1, last_lag=1, oldest_s=300.0, first_end=9
    )
    busy = view(state(accounted_offset=8, num_running=1))
    assert problems(partitions=(long,), instances={SPEC.instance_id: busy}) == []
    kept = reader(first_lag=1, last_lag=1, oldest_s=30.0)
    assert problems(partitions=(kept,)) == []
    assert problems(partitions=(kept,), dispatcher_age_s=None) == ["no-dispatcher", "reader-stuck"]


def test_an_instance_that_said_goodbye_is_no_finding():
    """`gone` is not silence."""
    left = view(state(phase="gone"), age_s=500.0)
    assert problems(instances={"a": view(), "b": left}) == []


def test_a_burst_between_the_looks_is_no_dead_engine():
    """An engine counts as unready only if calls waited for it at both looks."""
    burst = view(state(), last=state(num_waiting=3))
    assert problems(instances={"a": burst}) == []


def test_missing_topics_hide_what_follows_from_them():
    """Without topics there is no word about dispatchers and instances, only what to run."""
    missing = (TopicFinding(name="p.x", state="missing"), TopicFinding(name="p.y", state="ok"))
    (finding,) = found(topics=missing, instances={}, dispatcher_age_s=None)
    assert finding.problem == "topic-missing"
    assert "hexflow topics --kafka k:9092" in finding.advice


def test_a_mesh_under_another_prefix_is_named():
    """All topics missing and other meshes present: the prefix is what is wrong."""
    missing = (TopicFinding(name="p.x", state="missing"),)
    (finding,) = found(topics=missing, other_prefixes=("live.",))
    assert finding.problem == "wrong-prefix"
    assert "'live.'" in finding.detail


def test_workers_on_another_redis_are_found():
    """Calls wait at instances, yet this Redis has no key of theirs."""
    busy = view(state(num_waiting=2, num_running=4))
    assert problems(instances={"a": busy}, redis=RedisView(has_keys=False)) == ["redis-mismatch"]
    assert problems(redis=RedisView(has_keys=False)) == []


def test_dead_letters_tell_the_last_one():
    """Recent dead letters are a finding that names the error, the topic and who gave up."""
    last = DeadLetter(
        value=b"",
        topic="stage-requests",
        partition=0,
        offset=1,
        error="not_a_map",
        detail="",
        service="dispatcher",
    )
    letters = DeadLetterView(first_end=3, last_end=5, recent=5, last=last)
    (finding,) = found(dead_letters=letters)
    assert "not_a_map on stage-requests by dispatcher" in finding.detail
    assert problems(dead_letters=DeadLetterView(first_end=9, last_end=9)) == []


def test_lag_counts_only_what_is_unfinished():
    """Finished records above the committed position are no lag; deleted open ones are lost."""
    tracker = OffsetTracker(10)
    tracker.finish(12)
    tracker.finish(13)
    committed = tracker.committable()
    place = _place(committed, 0, 16)
    assert (place.lag, place.oldest, place.num_forgotten) == (4, 10, 0)
    late = _place(committed, 13, 16)
    assert (late.lag, late.oldest, late.num_forgotten) == (2, 14, 2)
    assert _place(None, 5, 5).lag == 0
    assert _place(Committed(offset=7), 0, 7).oldest is None
