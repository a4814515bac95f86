"""Who is let in when more is asked for than can be done in time.

*Promises.* A query that is let in is promised its share of the pool: its expected work divided by
its time, for as long as it is open. It is let in while the shares promised stay below a part of
what the pool does per second: the utilisation bound of periodic tasks (Liu, Layland 1973), with a
pool's learned rate in place of one processor. The part is well below one, because a query's calls
wait for each other and lengths vary. It is asked once, at a query's first call: a query that was
let in is never refused later, because by then the work done for it would be lost.

*Hopeless calls.* A query that can no longer meet its deadline leaves the demand, and its calls go
behind all others that still can: late work is done with what is left over.

*Tenants.* When the tenants together ask for more than the pool does, what each may have is its
max-min fair share (by weight): tenants that ask for less get all they ask for, the others share
what is left. A small part of the margin is kept from those that ask for more than their share.
"""

import bisect
import math
from collections.abc import Mapping

import msgspec

OVERLOADED = "overloaded"
REST_S = 2.0
"""Until what a pool is doing is known everywhere, mesh seconds."""
DEMOTION_S = 1e9
"""Put on the queue score of a hopeless call: no two calls that may still be in time differ so."""


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True):
    """When to say no.

    Attributes:
        margin: Work promised per second ÷ work done per second, at first.
        lowest_margin: What the margin never falls below.
        misses: Share of late queries among those let in that is put up with.
        gain: How much a late query takes from the margin; others give it back.
        window_s: Over which the pool's rate is learned, mesh seconds.
        horizon_s: Over which a tenant's demand is remembered, mesh seconds.
        reserve: Share of the margin kept from tenants above their fair share.
        weights: tenant -> weight; 1 for others.
    """

    margin: float = 0.6
    lowest_margin: float = 0.2
    misses: float = 0.05
    gain: float = 0.005
    window_s: float = 60.0
    horizon_s: float = 120.0
    reserve: float = 0.1
    weights: Mapping[str, float] = {}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A query at its first call.

    Attributes:
        query_id: The query.
        tenant: Who asks.
        deadline_s: When it is due, mesh clock.
        work_s: Expected service times of all its calls together, seconds.
        path_s: Expected duration on an idle pool, seconds.
    """

    query_id: str
    tenant: str
    deadline_s: float
    work_s: float
    path_s: float


class _Open(msgspec.Struct):
    deadline_s: float
    density: float
    stage: tuple[str, int] = ("", 0)
    num_ended: int = 0
    seen_s: float = 0.0
    patience_s: float = math.inf


class Demand:
    """The queries that were let in and have not ended, by deadline."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._order: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, query_id: str) -> bool:
        return query_id in self._open

    @property
    def density(self) -> float:
        """Work per second that has been promised."""
        return sum(one.density for one in self._open.values())

    def add(self, query_id: str, deadline_s: float, work_s: float, now_s: float) -> None:
        """Take in a query, with its work from now on, seconds."""
        self.remove(query_id)
        time_s = max(1e-9, deadline_s - now_s)
        self._open[query_id] = _Open(
            deadline_s, work_s / time_s, seen_s=now_s, patience_s=time_s / 2
        )
        bisect.insort(self._order, (deadline_s, query_id))

    def stage_begins(self, query_id: str, stage: tuple[str, int], now_s: float) -> None:
        """Note a call of a stage that is ready."""
        one = self._open.get(query_id)
        if one is not None:
            one.seen_s = now_s
            if one.stage != stage:
                one.stage, one.num_ended = stage, 0

    def call_ended(
        self, query_id: str, stage: tuple[str, int], siblings: int, now_s: float, *, is_last: bool
    ) -> bool:
        """Note the end of a call; returns whether the query has ended with it.

        Args:
            query_id: Its query.
            stage: Its stage and iteration.
            siblings: Calls of the stage.
            now_s: Present instant, mesh clock.
            is_last: Whether nothing is expected after its stage.
        """
        one = self._open.get(query_id)
        if one is None:
            return False
        self.stage_begins(query_id, stage, now_s)
        one.num_ended += 1
        has_ended = is_last and one.num_ended >= siblings
        if has_ended:
            self.remove(query_id)
        return has_ended

    def remove(self, query_id: str) -> None:
        """Forget a query."""
        one = self._open.pop(query_id, None)
        if one is not None:
            index = bisect.bisect_left(self._order, (one.deadline_s, query_id))
            del self._order[index]

    def take_late(self, now_s: float) -> list[str]:
        """Forget the queries whose deadline has passed, and return them."""
        late = []
        while self._order and self._order[0][0] <= now_s:
            late.append(self._order[0][1])
            self.remove(late[-1])
        return late

    def forget_resting(self, now_s: float) -> None:
        """Forget what an idle pool owes nobody: queries of which nothing was heard for a moment.

        One that rests between two stages is counted again with its next call.
        """
        for query_id in [q for q, one in self._open.items() if now_s - one.seen_s > REST_S]:
            self.remove(query_id)

    def forget_silent(self, now_s: float) -> int:
        """Forget queries nothing was heard of for half of their time: they ended before we knew."""
        silent = [
            query_id for query_id, one in self._open.items() if now_s - one.seen_s > one.patience_s
        ]
        for query_id in silent:
            self.remove(query_id)
        return len(silent)


class Shares:
    """What tenants ask for and get, as rates that forget.

    Args:
        horizon_s: How long they remember, mesh seconds.
        weights: tenant -> weight; 1 for others.
    """

    def __init__(self, horizon_s: float, weights: Mapping[str, float]) -> None:
        self._horizon_s = horizon_s
        self._weights = weights
        self._asked: dict[str, tuple[float, float]] = {}
        self._given: dict[str, tuple[float, float]] = {}

    def asks(self, tenant: str, work_s: float, now_s: float) -> None:
        """Note that a tenant asks for work."""
        self._asked[tenant] = (self._now(self._asked, tenant, now_s) + work_s, now_s)

    def gets(self, tenant: str, work_s: float, now_s: float) -> None:
        """Note that a tenant's query was let in."""
        self._given[tenant] = (self._now(self._given, tenant, now_s) + work_s, now_s)

    def is_above(self, tenant: str, rate: float, now_s: float) -> bool:
        """Return whether a tenant asks for more than its share of a rate that is short."""
        asked = self._rates(self._asked, now_s)
        if len(asked) < 2 or sum(asked.values()) <= rate:
            return False
        return asked.get(tenant, 0.0) > self._level(asked, rate) * self._weight(tenant)

    def has_had_enough(self, tenant: str, rate: float, now_s: float) -> bool:
        """Return whether a tenant above its share got all of its share already."""
        asked = self._rates(self._asked, now_s)
        share = self._level(asked, rate) * self._weight(tenant)
        return self._now(self._given, tenant, now_s) / self._horizon_s >= share

    def forget(self, now_s: float) -> None:
        """Drop tenants that asked for nothing in a long time."""
        for table in (self._asked, self._given):
            for tenant in [
                t for t, (_, at_s) in table.items() if now_s - at_s > 10 * self._horizon_s
            ]:
                del table[tenant]

    def _level(self, asked: Mapping[str, float], rate: float) -> float:
        """Return the share of weight 1 where tenants with less get all they ask for."""
        left, weight = rate, sum(self._weight(tenant) for tenant in asked)
        for tenant in sorted(asked, key=lambda one: (asked[one] / self._weight(one), one)):
            if asked[tenant] / self._weight(tenant) > left / weight:
                return left / weight
            left -= asked[tenant]
            weight -= self._weight(tenant)
        return math.inf

    def _rates(self, table: Mapping[str, tuple[float, float]], now_s: float) -> dict[str, float]:
        return {tenant: self._now(table, tenant, now_s) / self._horizon_s for tenant in table}

    def _now(self, table: Mapping[str, tuple[float, float]], tenant: str, now_s: float) -> float:
        amount, at_s = table.get(tenant, (0.0, now_s))
        return amount * math.exp(-max(0.0, now_s - at_s) / self._horizon_s)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


class Admission:
    """Decides about the queries of one pool; hears of their calls.

    Args:
        rules: When to say no.
    """

    def __init__(self, rules: AdmissionRules) -> None:
        self._rules = rules
        self.margin = rules.margin
        self.demand = Demand()
        self.shares = Shares(rules.horizon_s, rules.weights)

    def offer(self, asked: Asked, now_s: float, rate: float, stretch: float) -> str | None:
        """Return None and take the query in, or the reason for turning it away.

        Args:
            asked: The query.
            now_s: Present instant, mesh clock.
            rate: Work that the pool does, seconds per second.
            stretch: How much longer calls take in a busy engine than alone.
        """
        self._settle_late(now_s)
        self.shares.asks(asked.tenant, asked.work_s, now_s)
        promised = rate * self.margin
        if self.shares.is_above(asked.tenant, rate, now_s):
            promised *= 1.0 - self._rules.reserve
            if self.shares.has_had_enough(asked.tenant, rate, now_s):
                return OVERLOADED
        if self.demand and asked.path_s * stretch > asked.deadline_s - now_s:
            return OVERLOADED
        density = asked.work_s / max(asked.deadline_s - now_s, 1e-9)
        if self.demand and self.demand.density + density > promised:
            return OVERLOADED
        self.demand.add(asked.query_id, asked.deadline_s, asked.work_s, now_s)
        self.shares.gets(asked.tenant, asked.work_s, now_s)
        return None

    def ended(self, *, in_time: bool) -> None:
        """Note what came of a promise: where too many are broken, less is promised."""
        rules = self._rules
        factor = math.exp(rules.gain * (rules.misses if in_time else rules.misses - 1.0))
        self.margin = min(rules.margin, max(rules.lowest_margin, self.margin * factor))

    def tidy(self, now_s: float) -> None:
        """Forget what is over; to be called now and then."""
        self._settle_late(now_s)
        self.demand.forget_silent(now_s)
        self.shares.forget(now_s)

    def _settle_late(self, now_s: float) -> None:
        for _ in self.demand.take_late(now_s):
            self.ended(in_time=False)


def is_hopeless(now_s: float, deadline_s: float, left_s: float) -> bool:
    """Return whether a query can no longer meet its deadline (leaf).

    Args:
        now_s: Present instant, mesh clock.
        deadline_s: When it is due.
        left_s: Expected time of its call and what follows on an idle instance, seconds.
    """
    return now_s + left_s > deadline_s


def demoted(queue_score: float) -> float:
    """Return the queue score of a hopeless call: behind every other, in its old order (leaf)."""
    return queue_score + DEMOTION_S
