"""Who waited for whom: the dependencies between the calls of one query.

Three sources, best first:

1. The recording says so (`parents`).
2. Starts and ends are known: a call waited for the calls that had ended when it started, as far
   as no other call stands between them. The spans around the calls (`path`) keep branches apart:
   what happens inside two overlapping spans is independent.
3. Only starts are known: calls of one stage that start together are siblings, everything else is
   a chain.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from shared.simulation.importing.recording import NS_PER_S, RecordedCall

SIBLING_START_NS = NS_PER_S


class Structure(msgspec.Struct, kw_only=True):
    """Dependencies between the calls of one query.

    Attributes:
        source: `recorded`, `times` or `order`.
        calls: In an order in which every call comes after its parents.
        parents: For each of them, the positions of its parents.
        faults: Parents that were named and could not be taken, one sentence each.
    """

    source: str
    calls: tuple[RecordedCall, ...]
    parents: tuple[frozenset[int], ...]
    faults: list[str] = []


def find_structure(calls: Sequence[RecordedCall], tolerance_ns: int = 0) -> Structure:
    """Return the dependencies between the calls of one query.

    Args:
        calls: At least one.
        tolerance_ns: Overlaps up to this (half a call at most) count as one after the other, for
            recordings whose clocks disagree.
    """
    ordered = tuple(sorted(calls, key=lambda call: (call.start_ns, call.end_ns or call.start_ns)))
    if any(call.parents is not None for call in ordered):
        return _recorded(ordered)
    if all(call.end_ns is not None for call in ordered):
        return Structure(source="times", calls=ordered, parents=_by_times(ordered, tolerance_ns))
    return Structure(source="order", calls=ordered, parents=_by_order(ordered))


def _recorded(calls: Sequence[RecordedCall]) -> Structure:
    faults: list[str] = []
    position = {call.call_id: index for index, call in enumerate(calls) if call.call_id}
    wanted: list[set[int]] = []
    for call in calls:
        known = set()
        for name in call.parents or ():
            if name in position:
                known.add(position[name])
            else:
                faults.append(f"{call.place}: the query has no usable call {name!r} to wait for")
        wanted.append(known)
    order = _topological(wanted, calls, faults)
    new_position = {old: new for new, old in enumerate(order)}
    return Structure(
        source="recorded",
        calls=tuple(calls[old] for old in order),
        parents=tuple(frozenset(new_position[p] for p in wanted[old]) for old in order),
        faults=faults,
    )


def _topological(
    wanted: list[set[int]], calls: Sequence[RecordedCall], faults: list[str]
) -> list[int]:
    """Return positions, parents first, else by start; breaks circles at their earliest call."""
    children: list[list[int]] = [[] for _ in wanted]
    for index, parents in enumerate(wanted):
        for parent in parents:
            children[parent].append(index)
    missing = [len(parents) for parents in wanted]
    ready = [index for index, count in enumerate(missing) if count == 0]
    done: dict[int, None] = {}
    for earliest in range(len(calls)):
        _drain(ready, missing, children, done)
        if earliest not in done:
            faults.append(f"{calls[earliest].place}: it waits, through others, for itself")
            wanted[earliest] = {parent for parent in wanted[earliest] if parent in done}
            missing[earliest] = 0
            ready.append(earliest)
    _drain(ready, missing, children, done)
    return list(done)


def _drain(
    ready: list[int], missing: list[int], children: list[list[int]], done: dict[int, None]
) -> None:
    heapq.heapify(ready)
    while ready:
        index = heapq.heappop(ready)
        if index in done:
            continue
        done[index] = None
        for child in children[index]:
            missing[child] -= 1
            if missing[child] == 0:
                heapq.heappush(ready, child)


def _by_order(calls: Sequence[RecordedCall]) -> tuple[frozenset[int], ...]:
    parents: list[frozenset[int]] = []
    before: frozenset[int] = frozenset()
    group: list[int] = []
    for index, call in enumerate(calls):
        first = calls[group[0]] if group else None
        if first and (call.stage, call.start_ns) != (first.stage, first.start_ns):
            before, group = frozenset(group), []
        group.append(index)
        parents.append(before)
    return tuple(parents)


class _Node(NamedTuple):
    """A call, or a span with the calls in it.

    Attributes:
        start_ns: Start of its first call.
        end_ns: End of its last call, less the tolerance; above the start.
        first: Calls that wait for no other of the node.
        last: Calls that no other of the node waits for.
    """

    start_ns: int
    end_ns: int
    first: frozenset[int]
    last: frozenset[int]


def _by_times(calls: Sequence[RecordedCall], tolerance_ns: int) -> tuple[frozenset[int], ...]:
    parents: list[set[int]] = [set() for _ in calls]
    _link(list(range(len(calls))), 0, calls, tolerance_ns, parents)
    return tuple(frozenset(found) for found in parents)


def _link(
    members: list[int],
    depth: int,
    calls: Sequence[RecordedCall],
    tolerance_ns: int,
    parents: list[set[int]],
) -> _Node:
    """Connect the calls inside one span; `depth` is the span's place in their paths."""
    inner: dict[str, list[int]] = {}
    nodes: list[_Node] = []
    for index in members:
        path = calls[index].path
        if len(path) > depth:
            inner.setdefault(path[depth], []).append(index)
        else:
            nodes.append(_leaf(index, calls[index], tolerance_ns))
    nodes += [_link(group, depth + 1, calls, tolerance_ns, parents) for group in inner.values()]
    return _connect(nodes, parents)


def _leaf(index: int, call: RecordedCall, tolerance_ns: int) -> _Node:
    end_ns = call.end_ns if call.end_ns is not None else call.start_ns
    end_ns -= min(tolerance_ns, (end_ns - call.start_ns) // 2)
    only = frozenset({index})
    return _Node(call.start_ns, max(end_ns, call.start_ns + 1), only, only)


def _connect(nodes: list[_Node], parents: list[set[int]]) -> _Node:
    """Let each node wait for those that ended before it, except where another stands between."""
    nodes = sorted(nodes, key=lambda node: node.end_ns)
    ends_ns = [node.end_ns for node in nodes]
    latest_start_ns = [*accumulate((node.start_ns for node in nodes), max)]
    has_child = [False] * len(nodes)
    first: set[int] = set()
    for node in nodes:
        num_ended = bisect_right(ends_ns, node.start_ns)
        if num_ended == 0:
            first |= node.first
            continue
        for i in range(bisect_right(ends_ns, latest_start_ns[num_ended - 1]), num_ended):
            has_child[i] = True
            for call in node.first:
                parents[call] |= nodes[i].last
    last = {
        call
        for node, is_waited_for in zip(nodes, has_child, strict=True)
        if not is_waited_for
        for call in node.last
    }
    return _Node(
        min(node.start_ns for node in nodes), ends_ns[-1], frozenset(first), frozenset(last)
    )


def group_stages(structure: Structure) -> list[list[int]]:
    """Return the calls that form a stage together, in an order that puts parents first.

    Siblings have the same stage name, the same parents and the same children, and start within
    a second of each other.
    """
    children: list[set[int]] = [set() for _ in structure.calls]
    for index, parents in enumerate(structure.parents):
        for parent in parents:
            children[parent].add(index)
    groups: list[list[int]] = []
    latest: dict[tuple[str, frozenset[int], frozenset[int]], list[int]] = {}
    for index, call in enumerate(structure.calls):
        key = (call.stage, structure.parents[index], frozenset(children[index]))
        group = latest.get(key)
        if group is None or call.start_ns - structure.calls[group[0]].start_ns > SIBLING_START_NS:
            group = latest[key] = []
            groups.append(group)
        group.append(index)
    return groups
