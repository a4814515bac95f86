"""How much work a pool of instances does per second, as its finished calls tell.

Work is counted in seconds of t_comp, the time a call takes alone; a batching pool does many of
them per second. The number is learned in both directions, but never from idleness: a window in
which nothing had to wait shows only that the pool can do at least so much.
"""

from collections import deque

import msgspec

BUCKETS = 6
FORGET = 0.03
PROBE = 1.15
REACH = 4.0
FULL_SHARE = 0.3


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A call that an engine finished.

    Attributes:
        work_s: What it counts, in the unit in which work is asked for, seconds.
        t_comp_s: Its expected service time where it ran, seconds.
        is_full: Whether the pool had more to do than it could begin, when it ended.
        service_s: Time in the engine, seconds.
        ended_s: When it ended, mesh clock.
    """

    work_s: float
    t_comp_s: float
    is_full: bool
    service_s: float
    ended_s: float


class _Bucket(msgspec.Struct):
    number: int
    work_s: float = 0.0
    num_calls: int = 0
    num_full: int = 0


class Throughput:
    """Learns a pool's rate.

    Args:
        window_s: How far back a rate looks, mesh seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._bucket_s = window_s / BUCKETS
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)
        self._rate: float | None = None
        self._stretch = 1.0
        self._num_refused = 0
        self._is_busy = False

    def rate(self, prior: float) -> float:
        """Return the work done per second when there is enough of it.

        Args:
            prior: What is believed before anything was learned.
        """
        return prior if self._rate is None else self._rate

    @property
    def stretch(self) -> float:
        """How much longer calls take in the engine than alone, while there is enough to do."""
        return self._stretch if self._is_busy else 1.0

    def refused(self) -> None:
        """Note that a query was turned away: if nothing waits meanwhile, the rate is too low."""
        self._num_refused += 1

    def finished(self, call: Finished, prior: float) -> None:
        """Take a finished call."""
        number = int(call.ended_s // self._bucket_s)
        if not self._buckets or number > self._buckets[-1].number:
            self._learn(number, prior)
            self._buckets.append(_Bucket(number))
        bucket = self._buckets[-1]  # one that comes late counts where it comes
        bucket.work_s += call.work_s
        bucket.num_calls += 1
        bucket.num_full += call.is_full
        if call.t_comp_s > 0.0:
            now = max(1.0, call.service_s / call.t_comp_s)
            self._stretch += 0.02 * (now - self._stretch)

    def _learn(self, number: int, prior: float) -> None:
        """Judge the window that ends with the bucket before this one."""
        recent = [one for one in self._buckets if one.number >= number - BUCKETS]
        if len(recent) < 2:  # the first one began before the first call ended
            return
        span_s = (number - recent[0].number) * self._bucket_s
        seen = sum(one.work_s for one in recent) / span_s
        num_calls = sum(one.num_calls for one in recent)
        known = prior if self._rate is None else self._rate
        is_busy = sum(one.num_full for one in recent) >= FULL_SHARE * num_calls
        self._is_busy = is_busy
        if is_busy and self._rate is not None:
            known = max(seen, known + FORGET * (seen - known))
        elif is_busy:
            known = seen
        else:
            grown = min(known * PROBE, REACH * seen) if self._num_refused else 0.0
            known = max(known, grown, seen)
        self._rate = known
        self._num_refused = 0
