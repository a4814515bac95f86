"""`hexflow topics`: what it finds and what it tells people to do."""

import msgspec
import pytest

from services.cli.topics import as_json, examine, is_fine, problems_of
from shared.adapters.clock import SystemClock
from shared.adapters.memory_broker import MemoryBroker
from shared.contracts.topics import (
    CONTROL,
    INSTANCE_STATES,
    LATENCY_EVENTS,
    STAGE_REQUESTS,
    Topics,
    TopicSpec,
)

TOPICS = Topics(prefix="t.")


def changed(**changes: object) -> tuple[TopicSpec, TopicSpec]:
    """Return a topic as wanted, and as found with changes."""
    wanted = TOPICS.specs()[0]
    return wanted, msgspec.structs.replace(wanted, **changes)


async def test_missing_topics_are_created_once():
    """The first run creates, the second finds everything in order."""
    broker = MemoryBroker(SystemClock())
    first = await examine(broker, TOPICS, create=True)
    second = await examine(broker, TOPICS, create=True)
    assert {finding.state for finding in first} == {"created"}
    assert {finding.state for finding in second} == {"ok"}
    assert is_fine(first)
    assert is_fine(second)


async def test_checking_creates_nothing():
    """With --check a missing topic stays missing, and the verdict is not fine."""
    broker = MemoryBroker(SystemClock())
    findings = await examine(broker, TOPICS, create=False)
    assert {finding.state for finding in findings} == {"missing"}
    assert await broker.describe_topics() == {}
    assert not is_fine(findings)
    assert as_json("here", findings)["ok"] is False


async def test_topics_of_instances_are_checked_too():
    """An instance's topic with two partitions is wrong: its offsets would be no order."""
    broker = MemoryBroker(SystemClock())
    wrong = msgspec.structs.replace(TOPICS.instance_spec("a100-0"), partitions=2)
    await broker.create_topics([wrong])
    findings = {finding.name: finding for finding in await examine(broker, TOPICS, create=True)}
    assert findings["t.instance.a100-0"].state == "wrong"
    assert "must have 1" in findings["t.instance.a100-0"].problems[0]


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"partitions": 3}, "--partitions 12"),
        ({"compacted": True}, "cleanup.policy=delete"),
        ({"retention_s": 60}, "retention.ms=86400000"),
        ({"max_message_bytes": 1_000}, "max.message.bytes=4194304"),
    ],
)
def test_each_shortcoming_comes_with_the_command_that_mends_it(
    changes: dict[str, object], advice: str
):
    """One changed setting gives one problem, and the problem says what to do."""
    problems = problems_of(*changed(**changes))
    assert len(problems) == 1
    assert advice in problems[0]


def test_more_than_wanted_is_fine():
    """More partitions, longer retention and larger records are no fault."""
    assert problems_of(*changed(partitions=48, retention_s=10**9, max_message_bytes=10**8)) == ()


@pytest.mark.parametrize("partitions", [2, 8])
def test_instance_states_are_never_given_more_partitions(partitions: int):
    """The advice is not to alter it: an instance's epochs compare within one partition only."""
    wanted = next(spec for spec in TOPICS.specs() if spec.name == TOPICS.name(INSTANCE_STATES))
    (problem,) = problems_of(wanted, msgspec.structs.replace(wanted, partitions=partitions))
    assert "never be given more" in problem
    assert "--alter" not in problem


def test_a_topic_read_in_one_order_keeps_one_partition():
    """`latency-events` and `control` have a single reader and a single order."""
    for name in (LATENCY_EVENTS, CONTROL):
        wanted = next(spec for spec in TOPICS.specs() if spec.name == TOPICS.name(name))
        assert problems_of(wanted, msgspec.structs.replace(wanted, partitions=2))
    many = next(spec for spec in TOPICS.specs() if spec.name == TOPICS.name(STAGE_REQUESTS))
    assert not problems_of(many, many)
