"""Removes instances that are gone for good: their topic, and their state.

Only what is certain is removed: the instance said goodbye, or was fenced, long enough ago, and
every call on its topic was handed on. The topic goes first: whoever dies in between leaves a state
without a topic, which a dispatcher forgets by itself.
"""

import time

import msgspec

from shared.contracts.codec import decode_any
from shared.contracts.epochs import epoch_of
from shared.contracts.messages import InstanceState, RecoveryProbe
from shared.contracts.topics import INSTANCE_PREFIX, INSTANCE_STATES, Topics
from shared.errors import ContractError
from shared.ports import Broker, Record, TopicPartition
from shared.runtime.offsets import OffsetTracker

GONE_FOR_S = 60.0


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that is not at work.

    Attributes:
        instance_id: The instance.
        reason: Why it is kept; empty where it was, or can be, removed.
    """

    instance_id: str
    reason: str = ""


async def departed(broker: Broker, topics: Topics, now_unix_s: float) -> list[Departed]:
    """Return the instances whose topic exists and that are gone, with what speaks against removal.

    Args:
        broker: Where to look.
        topics: Names.
        now_unix_s: Wall clock, Unix seconds.
    """
    last = await _last_states(broker, topics)
    prefix = topics.name(INSTANCE_PREFIX)
    found = []
    for name in sorted(await broker.describe_topics()):
        instance_id = name.removeprefix(prefix)
        if not name.startswith(prefix):
            continue
        known = last.get(instance_id)
        if known is None:
            found.append(Departed(instance_id=instance_id, reason="nothing is known of it"))
        elif known[1].phase == "gone":
            reason = await _against(broker, topics, instance_id, now_unix_s - known[0])
            found.append(Departed(instance_id=instance_id, reason=reason))
    return found


async def prune(broker: Broker, topics: Topics, now_unix_s: float | None = None) -> list[Departed]:
    """Remove the instances that nothing speaks against, and return all that are gone."""
    found = await departed(broker, topics, time.time() if now_unix_s is None else now_unix_s)
    for one in found:
        if not one.reason:
            await broker.delete_topics([topics.instance(one.instance_id)])
            name = topics.name(INSTANCE_STATES)
            await broker.publish(name, None, key=one.instance_id.encode())
    return found


async def _against(broker: Broker, topics: Topics, instance_id: str, gone_s: float) -> str:
    if gone_s < GONE_FOR_S:
        return f"gone for {gone_s:.0f} s only; dispatchers may still send it calls"
    tp = TopicPartition(topics.instance(instance_id), 0)
    async with broker.partition_consumer(
        [tp], start="end", group=topics.worker_group(instance_id)
    ) as consumer:
        begin = (await consumer.beginning_offsets())[tp]
        end = (await consumer.end_offsets())[tp]
        tracker = OffsetTracker.restore(await consumer.committed(tp), begin)
    open_calls = sum(not tracker.is_finished(offset) for offset in range(tracker.position, end))
    if open_calls:
        return f"{open_calls} of its calls are not handed on yet: a dispatcher does that"
    return ""


async def _last_states(broker: Broker, topics: Topics) -> dict[str, tuple[float, InstanceState]]:
    """Return instance -> (append time, last state of its highest epoch)."""
    name = topics.name(INSTANCE_STATES)
    tps = [TopicPartition(name, index) for index in range(await broker.partitions_of(name))]
    found: dict[str, tuple[int, float, InstanceState]] = {}
    async with broker.partition_consumer(tps, start="beginning") as consumer:
        ends = await consumer.end_offsets()
        while any([await consumer.position(tp) < end for tp, end in ends.items()]):
            for record in await consumer.fetch(timeout_s=1.0):
                _note(record, found)
    return {instance_id: (at_s, state) for instance_id, (_, at_s, state) in found.items()}


def _note(record: Record, found: dict[str, tuple[int, float, InstanceState]]) -> None:
    key = (record.key or b"").decode(errors="replace")
    if record.value is None:
        found.pop(key, None)
        return
    try:
        state = decode_any(record.value, InstanceState, RecoveryProbe)
    except ContractError:
        return
    if isinstance(state, InstanceState):
        epoch = epoch_of(record.offset, state)
        if key not in found or epoch >= found[key][0]:
            found[key] = (epoch, record.append_unix_s, state)
