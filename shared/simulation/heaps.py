"""Binary heaps of indices: waiting calls of an instance, and timers."""

from shared.simulation.tables import Tables


def push_call(tables: Tables, base: int, size: int, index: int) -> None:
    """Add a call to the heap of `size` calls that starts at `base`."""
    place = size
    while place > 0:
        above = (place - 1) // 2
        other = tables.line_heap[base + above]
        if not call_precedes(tables, index, other):
            break
        tables.line_heap[base + place] = other
        place = above
    tables.line_heap[base + place] = index


def pop_call(tables: Tables, base: int, size: int) -> int:
    """Take the first call out of the heap of `size` calls that starts at `base`."""
    first = tables.line_heap[base]
    moved = tables.line_heap[base + size - 1]
    place = 0
    child = 1
    while child < size - 1:
        below = tables.line_heap[base + child]
        if child + 1 < size - 1 and call_precedes(
            tables, tables.line_heap[base + child + 1], below
        ):
            child += 1
            below = tables.line_heap[base + child]
        if not call_precedes(tables, below, moved):
            break
        tables.line_heap[base + place] = below
        place = child
        child = 2 * place + 1
    tables.line_heap[base + place] = moved
    return first


def call_precedes(tables: Tables, first: int, second: int) -> bool:
    """Return whether one call waits before another: by score, then by arrival."""
    call = tables.calls[first]
    other = tables.calls[second]
    if call.priority != other.priority:
        return call.priority < other.priority
    return call.order < other.order


def push_timer(tables: Tables, size: int, index: int) -> None:
    """Add a timer slot to the heap of `size` timers."""
    place = size
    while place > 0:
        above = (place - 1) // 2
        other = tables.timer_heap[above]
        if not timer_precedes(tables, index, other):
            break
        tables.timer_heap[place] = other
        place = above
    tables.timer_heap[place] = index


def pop_timer(tables: Tables, size: int) -> int:
    """Take the first slot out of the heap of `size` timers."""
    first = tables.timer_heap[0]
    moved = tables.timer_heap[size - 1]
    place = 0
    child = 1
    while child < size - 1:
        below = tables.timer_heap[child]
        if child + 1 < size - 1 and timer_precedes(tables, tables.timer_heap[child + 1], below):
            child += 1
            below = tables.timer_heap[child]
        if not timer_precedes(tables, below, moved):
            break
        tables.timer_heap[place] = below
        place = child
        child = 2 * place + 1
    tables.timer_heap[place] = moved
    return first


def timer_precedes(tables: Tables, first: int, second: int) -> bool:
    """Return whether one timer runs before another: by instant, then as they were set."""
    timer = tables.timers[first]
    other = tables.timers[second]
    if timer.at_s != other.at_s:
        return timer.at_s < other.at_s
    return timer.order < other.order
