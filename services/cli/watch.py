"""Watches a mesh through its own topics: instances, how calls end, α. Reads, never writes."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rich.table import Table

from services.cli.report import seconds
from services.cli.session import MeshAccess
from shared.contracts.codec import decode_any
from shared.contracts.messages import (
    AlphaUpdate,
    InstanceState,
    LatencyEvent,
    RecoveryProbe,
    SpeedUpdate,
    WorkflowProfile,
)
from shared.contracts.topics import CONTROL, INSTANCE_STATES, LATENCY_EVENTS
from shared.errors import ContractError
from shared.ports import Record, StartAt, TopicPartition
from shared.runtime.tables import Follower, OnRecord
from shared.scheduling.attainment import percentile
from shared.scheduling.outliers import OutlierRules, is_failing

DRIFT = 1.25
REMEMBERED_CALLS = 500
RULES = OutlierRules()


class MeshWatch:
    """What is known of a running mesh; kept up to date by `watching`."""

    def __init__(self) -> None:
        self.states: dict[str, InstanceState] = {}
        self.alphas: dict[str, AlphaUpdate] = {}
        self.speeds: dict[str, float] = {}
        self.outcomes: Counter[str] = Counter()
        self._call_times_s: deque[float] = deque(maxlen=REMEMBERED_CALLS)

    @property
    def num_waiting(self) -> int:
        """Calls that wait at an instance."""
        return sum(state.num_waiting for state in self.states.values())

    @property
    def num_running(self) -> int:
        """Calls in an engine."""
        return sum(state.num_running for state in self.states.values())

    def call_p95_s(self) -> float:
        """Return P95 of the last calls' time from ready to finished, seconds; NaN when none."""
        return percentile(list(self._call_times_s), 95)

    def on_state(self, record: Record) -> None:
        """Take a record of `instance-states`."""
        key = (record.key or b"").decode(errors="replace")
        if record.value is None:
            self.states.pop(key, None)
            return
        state = _read(record, InstanceState, RecoveryProbe)
        if isinstance(state, InstanceState):
            if state.phase == "gone":
                self.states.pop(key, None)
            else:
                self.states[key] = state

    def on_event(self, record: Record) -> None:
        """Take a record of `latency-events`."""
        event = _read(record, LatencyEvent)
        if not isinstance(event, LatencyEvent):
            return
        self.outcomes[event.kind] += 1
        times = event.times
        if event.kind == "completed" and times.ready_at_s and times.finished_at_s:
            self._call_times_s.append(times.finished_at_s - times.ready_at_s)

    def on_control(self, record: Record) -> None:
        """Take a record of `control`."""
        update = _read(record, AlphaUpdate, WorkflowProfile, SpeedUpdate)
        if isinstance(update, AlphaUpdate):
            self.alphas[update.pool] = update
        elif isinstance(update, SpeedUpdate):
            self.speeds[update.instance_id] = update.factor

    def failing(self) -> list[str]:
        """Return the instances whose engine fails call after call."""
        return [name for name, state in self.states.items() if _is_failing(state)]

    def drifted(self) -> dict[str, float]:
        """Return the instances far from their profile: real time divided by the profile's."""
        return {
            name: self.speeds[name]
            for name in sorted(self.states)
            if not 1 / DRIFT < self.speeds.get(name, 1.0) < DRIFT
        }


def _read(record: Record, *classes: type) -> object:
    try:
        return decode_any(record.value or b"", *classes)
    except ContractError:
        return None


@asynccontextmanager
async def watching(access: MeshAccess) -> AsyncIterator[MeshWatch]:
    """Watch a mesh while the block runs."""
    watch = MeshWatch()
    stop = asyncio.Event()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        sources: tuple[tuple[str, OnRecord, StartAt], ...] = (
            (INSTANCE_STATES, watch.on_state, "beginning"),
            (LATENCY_EVENTS, watch.on_event, "end"),
            (CONTROL, watch.on_control, "beginning"),
        )
        for topic, take, start in sources:
            name = access.topics.name(topic)
            count = await access.broker.partitions_of(name)
            partitions = [TopicPartition(name, index) for index in range(count)]
            consumer = await stack.enter_async_context(
                access.broker.partition_consumer(partitions, start=start)
            )
            group.create_task(Follower(consumer, take).follow(stop), name=f"watch-{topic}")
        try:
            yield watch
        finally:
            stop.set()


def watch_table(watch: MeshWatch) -> Table:
    """Return the live table of instances."""
    table = Table(title="instances", title_justify="left")
    table.add_column("instance")
    table.add_column("GPU")
    table.add_column("state")
    for name in ("waiting", "running", "backlog", "others'", "KV used", "time × profile"):
        table.add_column(name, justify="right")
    for instance_id in sorted(watch.states):
        state = watch.states[instance_id]
        table.add_row(
            instance_id,
            state.spec.gpu,
            _phase(state),
            str(state.num_waiting),
            f"{state.num_running}/{state.capacity}",
            seconds(state.backlog_s),
            seconds(state.foreign_s) if state.foreign_s else "",
            f"{state.kv_used_tokens / max(1, state.spec.kv_tokens):.0%}",
            f"{watch.speeds[instance_id]:.2f}" if instance_id in watch.speeds else "",
        )
    return table


def end_line(watch: MeshWatch) -> str:
    """Return what is left to say of a mesh that has ended."""
    return f"The mesh has ended. Calls until its drain: {_outcomes(watch) or 'none'}."


def _outcomes(watch: MeshWatch) -> str:
    return ", ".join(f"{kind} {num}" for kind, num in sorted(watch.outcomes.items()))


def _is_failing(state: InstanceState) -> bool:
    return is_failing(state.failures_in_a_row, RULES)


def _phase(state: InstanceState) -> str:
    if state.phase != "serving" or not _is_failing(state):
        return state.phase
    return f"failing ({state.failures_in_a_row} in a row)"


def watch_line(watch: MeshWatch) -> str:
    """Return the outcomes so far in one line."""
    parts = [
        f"calls: waiting {watch.num_waiting}, running {watch.num_running}",
        _outcomes(watch) or "none ended yet",
    ]
    p95_s = watch.call_p95_s()
    if p95_s == p95_s:  # noqa: PLR0124 - NaN before the first call
        parts.append(f"call P95 {p95_s:.1f} s")
    parts += [f"{name} takes {x:.1f} × its profile" for name, x in watch.drifted().items()]
    parts += [f"α of {pool} {update.alpha:g}" for pool, update in sorted(watch.alphas.items())]
    return " · ".join(parts)
