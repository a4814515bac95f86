"""Watches the instance's own records on `instance-states` for a newer life or a recovery's fence.

See `shared.contracts.epochs`. A worker that was paused or cut off finds here that its calls were
given to others. Where the other life is a live worker under the same instance id, this one stands
by until that one is silent: two workers that kept taking over from each other would finish nothing.
"""

import structlog

from services.worker.life import End, Life
from services.worker.vitals import BROKER
from shared.contracts.codec import decode
from shared.contracts.epochs import epoch_of
from shared.contracts.messages import InstanceState
from shared.errors import BrokerUnavailable, ContractError
from shared.ports import Consumer, Record

FETCH_S = 0.5
BACKOFF_S = 0.2
log = structlog.get_logger(__name__)


class EpochWatch:
    """Ends a life when its epoch is no longer the highest.

    Args:
        life: Whose epoch.
        consumer: Reads the partition of `instance-states` with the instance's key, from after the
            record that began the life.
    """

    def __init__(self, life: Life, consumer: Consumer) -> None:
        self._life = life
        self._consumer = consumer
        self._rival_heard_at_s: float | None = None

    async def watch_forever(self) -> None:
        """Read states until cancelled."""
        life = self._life
        while True:
            life.vitals.beat("epoch")
            try:
                records = await self._consumer.fetch(timeout_s=FETCH_S)
            except BrokerUnavailable as exc:
                life.vitals.trouble(BROKER, exc)
                await life.clock.sleep_wall(BACKOFF_S)
                continue
            for record in records:
                self.see(record)

    def see(self, record: Record) -> None:
        """Take one record of `instance-states`."""
        life = self._life
        if record.key != life.params.instance_id.encode() or record.value is None:
            return
        try:
            state = decode(record.value, InstanceState)
        except ContractError as exc:
            log.warning("state_undecodable", offset=record.offset, detail=exc.detail)
            return
        if epoch_of(record.offset, state) <= life.epoch:
            return
        is_alive = state.phase != "gone" and state.nonce != life.nonce
        self._rival_heard_at_s = life.clock.monotonic_s() if is_alive else None
        if life.over.end is not End.FENCED:
            log.warning("life_fenced", epoch=life.epoch, by=epoch_of(record.offset, state))
        life.over.set(End.FENCED)

    async def rival_silent(self) -> None:
        """Return when no other life has reported for `standby_s`; `watch_forever` must run."""
        life = self._life
        while self._rival_heard_at_s is not None:
            left_s = self._rival_heard_at_s + life.params.standby_s - life.clock.monotonic_s()
            if left_s <= 0:
                return
            life.vitals.block("standby", "another worker runs under this instance id")
            await life.clock.sleep_wall(left_s)
