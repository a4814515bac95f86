"""Other dispatchers: who of them has died, long before Kafka notices.

Every dispatcher writes probes on the partitions of `instance-states` that it owns, on another one
where it owns none, and all of them read all probes. One whose probes stop, while we go on hearing
others (instances too), is dismissed from its groups: its partitions move at once instead of after
the session time-out. A dispatcher that was only paused finds that its partitions have moved and
joins again; nothing it does meanwhile counts twice.
"""

import math

from shared.contracts.messages import RecoveryProbe

PROBE_KEY = "probe/"
LONGEST_GAP_S = 1.1
"""Longest time without a record that is no deafness, wall seconds; instances report each second."""
OUTAGE_GRACE_S = 3.0
"""Time that others get to reach the broker again after an outage, wall seconds."""


class Peers:
    """Who was heard of when, on this host's monotonic clock.

    Args:
        own_id: This dispatcher's id.
        silence_s: Silence after which a peer is taken for dead, wall seconds.
    """

    def __init__(self, own_id: str, silence_s: float) -> None:
        self._own_id = own_id
        self._silence_s = silence_s
        self._heard: dict[str, tuple[float, str]] = {}
        self._listening_since_s = self._last_s = -math.inf
        self._grace_s = silence_s

    def listen(self, now_s: float) -> None:
        """Note that a record of the topic has come, whoever wrote it."""
        if now_s - self._last_s > LONGEST_GAP_S:
            self._listening_since_s = now_s
            if math.isfinite(self._last_s):  # no beginning, but an outage
                self._grace_s = max(self._silence_s, OUTAGE_GRACE_S)
        self._last_s = now_s

    def heard(self, probe: RecoveryProbe, now_s: float) -> None:
        """Take a probe."""
        dispatcher_id, _, _ = probe.owner_id.rpartition(".")
        if dispatcher_id:
            self._heard[dispatcher_id] = (now_s, probe.owner_id)

    def left(self, key: str) -> None:
        """Note that a probe was withdrawn: its owner has stopped in order, or is long gone."""
        owner_id = key.removeprefix(PROBE_KEY)
        dispatcher_id, _, _ = owner_id.rpartition(".")
        known = self._heard.get(dispatcher_id)
        if known is not None and known[1] == owner_id:
            del self._heard[dispatcher_id]

    def take_dead(self, now_s: float) -> list[str]:
        """Return the ids of those that have died, each once.

        Nobody is dead unless we have heard others all the time: the broker may be away, or we. When
        it comes back, others may need longer than we do to reach it.
        """
        is_deaf = now_s - self._last_s > LONGEST_GAP_S
        if is_deaf or now_s - self._listening_since_s < self._grace_s:
            return []
        dead = [
            one
            for one, (at_s, _) in self._heard.items()
            if one != self._own_id and now_s - at_s > self._silence_s
        ]
        for dispatcher_id in dead:
            del self._heard[dispatcher_id]
        return dead
