"""Watches the instances of the partitions it owns, and rescues the calls of those that are gone.

Ownership is the membership in the group `recovery` on `instance-states`: whoever owns an
instance's partition watches it. The group commits nothing, so a new owner reads its partitions
from the beginning and knows every instance there. It acts only on reading back a probe of its own,
which proves that it has read everything before it (see `silence`).

What an owner does: an instance that was silent for too long is fenced and rescued; one that left
(`gone`, or fenced by an earlier owner) is rescued without a fence; a rescue ends when the instance
begins a new epoch or the partition moves on. Probes of owners that are no more are removed.
"""

import asyncio
import secrets
from collections.abc import Collection

import structlog

from services.dispatcher.params import DispatcherParams
from services.dispatcher.peers import PROBE_KEY
from services.dispatcher.rescue import Rescue
from services.dispatcher.silence import SilenceWatch
from shared.contracts.codec import decode_any
from shared.contracts.epochs import epoch_of
from shared.contracts.messages import InstanceState, RecoveryProbe
from shared.contracts.topics import INSTANCE_STATES, Topics
from shared.errors import BrokerUnavailable, ContractError
from shared.ports import Broker, Clock, Consumer, Record, TopicPartition
from shared.runtime.health import Health
from shared.runtime.metrics import Metrics
from shared.runtime.publishing import Publisher

GROUP = "recovery"
LONGEST_SILENCE_S = 90.0  # while the broker is away: a look at it, and a new consumer
MAX_GAP_PROBES = 3.0
MAX_GAP_S = 3.0
OLD_PROBE_S = 600.0
OLD_PROBES_AT_ONCE = 16
RETRY_S = 0.2
HANDOVER_S = 2.0
SIGN_OF_LIFE = 0
"""Partition on which a dispatcher probes that owns none: a spare one, or all after an outage."""
log = structlog.get_logger(__name__)


class Watched:
    """One instance as its partition tells it."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.state: InstanceState | None = None
        self.heard_unix_s = 0.0
        self.rescue: Rescue | None = None
        self.task: asyncio.Task[None] | None = None


class Ward:
    """One owned partition of `instance-states`.

    Args:
        max_gap_s: See `SilenceWatch`.
        after_seq: Own probes up to this number belong to an earlier time of ownership: what they
            say about silence is history, and later records may tell otherwise.
    """

    def __init__(self, max_gap_s: float, after_seq: int) -> None:
        self.after_seq = after_seq
        self.silence = SilenceWatch(max_gap_s)
        self.instances: dict[str, Watched] = {}
        self.old_probes: dict[str, float] = {}

    def observe(self, record: Record, state: InstanceState) -> Watched | None:
        """Take a state; returns the instance when it has begun a new epoch and is at work."""
        epoch = epoch_of(record.offset, state)
        watched = self.instances.setdefault(state.instance_id, Watched(epoch))
        if epoch < watched.epoch:
            return None
        is_new_life = epoch > watched.epoch and state.phase != "gone"
        watched.epoch = epoch
        watched.state = state
        watched.heard_unix_s = record.append_unix_s
        return watched if is_new_life else None


class Recovery:
    """The recovery duty of one dispatcher.

    Args:
        broker: Messages.
        clock: Paces the probes.
        topics: Names.
        params: Intervals and bounds.
        metrics: Counts.
        health: Progress: probes that come back.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        clock: Clock,
        topics: Topics,
        params: DispatcherParams,
        metrics: Metrics,
        health: Health,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._topics = topics
        self._params = params
        self._metrics = metrics
        self._health = health
        self._publisher = Publisher(broker, topics, clock)
        self._wards: dict[TopicPartition, Ward] = {}
        # One life of this process: probes of an earlier one are another owner's.
        self._owner_id = f"{params.dispatcher_id}.{secrets.token_hex(3)}"
        self._own_key = f"{PROBE_KEY}{self._owner_id}"
        self._probed: set[int] = set()
        self._seq = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set."""
        self._beat()
        name = self._topics.name(INSTANCE_STATES)
        async with (
            self._broker.group_consumer(
                [name], self._topics.group(GROUP), on_revoked=self._give_up
            ) as consumer,
            asyncio.TaskGroup() as group,
        ):
            probing = group.create_task(self._probe_regularly(consumer), name="probe")
            await self._read(consumer, group, stop)
            probing.cancel()
            await self._give_up(list(self._wards))
            for partition in sorted(self._probed):
                await self._remove_probe(self._own_key, partition)
        self._health.retire("recovery")

    async def _read(
        self, consumer: Consumer, group: asyncio.TaskGroup, stop: asyncio.Event
    ) -> None:
        while not stop.is_set():
            try:
                records = await consumer.fetch()
            except BrokerUnavailable:
                self._beat()  # no probe can come back, and no new process would change that
                await asyncio.sleep(RETRY_S)
                continue
            if not consumer.assignment():
                self._beat()  # a standby: no probe can come back
            for record in records:
                ward = self._wards.get(record.tp)
                if ward is None:
                    gap_s = max(MAX_GAP_S, MAX_GAP_PROBES * self._params.probe_interval_s)
                    ward = self._wards[record.tp] = Ward(gap_s, self._seq)
                self._take(record, ward, group)

    def _beat(self) -> None:
        self._health.beat("recovery", LONGEST_SILENCE_S)

    def _take(self, record: Record, ward: Ward, group: asyncio.TaskGroup) -> None:
        key = (record.key or b"").decode(errors="replace")
        if record.value is None:
            self._forget(key, ward)
            return
        try:
            message = decode_any(record.value, InstanceState, RecoveryProbe)
        except ContractError as exc:
            self._metrics.unreadable.add(topic=INSTANCE_STATES, reason=exc.reason)
            return
        if isinstance(message, InstanceState):
            reborn = ward.observe(record, message)
            if reborn is not None and reborn.rescue is not None:
                reborn.rescue.end()
                reborn.rescue = reborn.task = None
        elif key == self._own_key and isinstance(message, RecoveryProbe):
            if message.seq <= ward.after_seq:
                return
            self._beat()
            ward.silence.probe(record.append_unix_s)
            self._look_around(record, ward, group)
        else:
            ward.old_probes[key] = record.append_unix_s

    def _forget(self, key: str, ward: Ward) -> None:
        ward.old_probes.pop(key, None)
        watched = ward.instances.pop(key, None)
        if watched is not None and watched.rescue is not None:
            watched.rescue.end()

    def _look_around(self, probe: Record, ward: Ward, group: asyncio.TaskGroup) -> None:
        """Start what is due, now that everything before the probe has been read."""
        for watched in ward.instances.values():
            if watched.state is None or (watched.task is not None and not watched.task.done()):
                continue
            silence_s = ward.silence.silence_s(watched.heard_unix_s)
            if watched.state.phase == "gone" or silence_s >= self._params.dead_after_s:
                self._rescue(watched, silence_s, group)
        old = [k for k, at_s in ward.old_probes.items() if probe.append_unix_s - at_s > OLD_PROBE_S]
        for key in old[:OLD_PROBES_AT_ONCE]:
            del ward.old_probes[key]
            group.create_task(self._remove_probe(key, probe.tp.partition), name="remove-probe")

    def _rescue(self, watched: Watched, silence_s: float, group: asyncio.TaskGroup) -> None:
        if watched.state is None:
            return
        instance_id = watched.state.instance_id
        log.warning(
            "rescue_started",
            instance_id=instance_id,
            phase=watched.state.phase,
            silence_s=silence_s,
        )
        watched.rescue = Rescue(
            watched.state,
            broker=self._broker,
            clock=self._clock,
            topics=self._topics,
            params=self._params,
            metrics=self._metrics,
        )
        watched.task = group.create_task(watched.rescue.run(), name=f"rescue-{instance_id}")

    async def _give_up(self, tps: Collection[TopicPartition]) -> None:
        """End the rescues of partitions that move on; their next owner takes them up."""
        tasks = []
        for tp in tps:
            ward = self._wards.pop(tp, None)
            for watched in ward.instances.values() if ward else ():
                if watched.rescue is not None:
                    watched.rescue.end()
                if watched.task is not None:
                    tasks.append(watched.task)
        if tasks:
            await asyncio.wait(tasks, timeout=HANDOVER_S)

    # Probes.

    async def _probe_regularly(self, consumer: Consumer) -> None:
        """Probe every owned partition; who owns none says on another that it is alive."""
        while True:
            partitions = {tp.partition for tp in consumer.assignment()} or {SIGN_OF_LIFE}
            self._probed |= partitions
            async with asyncio.TaskGroup() as group:
                for partition in sorted(partitions):
                    group.create_task(self._probe(partition), name="probe-one")
            await self._clock.sleep_wall(self._params.probe_interval_s)

    async def _probe(self, partition: int) -> None:
        self._seq += 1
        probe = RecoveryProbe(owner_id=self._owner_id, seq=self._seq)
        try:
            await self._publisher.once(
                INSTANCE_STATES, probe, key=self._own_key, partition=partition
            )
        except BrokerUnavailable as exc:
            log.warning("probe_failed", partition=partition, error=str(exc))

    async def _remove_probe(self, key: str, partition: int) -> None:
        try:
            await self._publisher.once(INSTANCE_STATES, None, key=key, partition=partition)
        except BrokerUnavailable:
            log.debug("probe_left", key=key)
