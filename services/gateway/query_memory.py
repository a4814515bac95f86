"""What a replica remembers of recent queries, so that clients need not say it: pure bookkeeping.

An agent that calls an OpenAI API says which query a call belongs to, at most. The tuner wants
more: when the query arrived, which occurrence of a stage this is, which calls this one waited for,
and how long the agent thought in between. All of it can be seen from here while a query's calls
come to the same replica; where they do not, the mesh still works, with less to learn from.
"""

from collections import OrderedDict, defaultdict

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A call's place in its query, as seen from here.

    Attributes:
        arrival_s: When the query arrived, mesh clock; None: with this call.
        iteration: Earlier occurrences of the stage.
        parents: Calls that it waited for.
        think_s: Time since the last of them ended, mesh seconds.
    """

    arrival_s: float | None
    iteration: int
    parents: tuple[str, ...]
    think_s: float


class _Query:
    def __init__(self) -> None:
        self.arrival_s: float | None = None
        self.rounds: defaultdict[str, int] = defaultdict(int)
        self.open: defaultdict[str, int] = defaultdict(int)
        self.frontier: dict[str, float] = {}


class QueryMemory:
    """Remembers recent queries.

    The calls that a new one waited for are the *frontier*: those that ended, and that no ended
    call has waited for. Calls of one stage that are open at the same time are siblings of one
    occurrence.

    Args:
        limit: Most queries remembered; the least recently used is forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[str, _Query] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, query_id: str, stage: str, now_s: float) -> Place:
        """Note that a call begins; returns its place (mesh clock)."""
        query = self._known.pop(query_id, None) or _Query()
        self._known[query_id] = query
        if len(self._known) > self._limit:
            self._known.popitem(last=False)
        query.open[stage] += 1
        last_s = max(query.frontier.values(), default=now_s)
        return Place(
            arrival_s=query.arrival_s,
            iteration=query.rounds[stage],
            parents=tuple(query.frontier),
            think_s=max(0.0, now_s - last_s),
        )

    def arrived(self, query_id: str, arrival_s: float) -> None:
        """Note when a query's first call was taken (mesh clock)."""
        query = self._known.get(query_id)
        if query is not None and query.arrival_s is None:
            query.arrival_s = arrival_s

    def end(
        self, query_id: str, stage: str, *, request_id: str, parents: tuple[str, ...], at_s: float
    ) -> None:
        """Note that a call ended, however it did (mesh clock)."""
        query = self._known.get(query_id)
        if query is None:
            return
        query.open[stage] -= 1
        if query.open[stage] <= 0:
            del query.open[stage]
            query.rounds[stage] += 1
        for parent in parents:
            query.frontier.pop(parent, None)
        query.frontier[request_id] = at_s
