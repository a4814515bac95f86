"""The auditor counts right: on hand-written topics and journals, each fault of a mesh is seen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.chaos.audit import Injected, audit
from services.cli.chaos.faults import KINDS, duration_s, make_plan, parse_kinds
from services.cli.chaos.journal import Entry, Journal, read_journal
from services.cli.chaos.ledger import Ledger
from services.cli.chaos.run import ChaosPlan, _portions, least_s
from services.cli.workload import load_fleet
from shared.contracts.codec import encode
from shared.contracts.messages import (
    BoundCall,
    CallOutcome,
    CallTimes,
    InstanceState,
    Message,
    ScoreTerms,
    StageRequest,
)
from shared.contracts.topics import Topics
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.ports import Record, TopicPartition

SPEC = load_fleet("hetero-1")[0]
TOPICS = Topics(prefix="p.")
SCALE = 10.0
NAMES = ["worker-a", "worker-b", "dispatcher-0", "dispatcher-1", "tuner-0"]


class Mesh:
    """Topics and a journal, written by hand; times are wall seconds."""

    def __init__(self) -> None:
        self.ledger = Ledger(TOPICS, "run", SCALE)
        self.journal: list[Entry] = []
        self._offset = 0

    def _put(self, topic: str, message: Message, at_s: float, partition: int = 0) -> None:
        self._offset += 1
        self.ledger.take(
            Record(
                tp=TopicPartition(TOPICS.name(topic), partition),
                offset=self._offset,
                append_unix_s=at_s,
                key=None,
                value=encode(message),
            )
        )

    @property
    def last_offset(self) -> int:
        """Offset of the record written last."""
        return self._offset

    def note(self, what: str, call: str, at_s: float = 0.0, **fields: Any) -> None:
        """Write a line of the journal."""
        query_id = f"run-{call[0]}"
        self.journal.append(
            Entry(what=what, at_s=at_s, request_id=call, query_id=query_id, **fields)
        )

    def ask(self, call: str, at_s: float, *, partition: int = 0, attempt: int = 0) -> None:
        """The producer submits a call, or the mesh hands it back."""
        if attempt == 0:
            self.note("submitting", call, at_s)
            self.note("taken", call, at_s)
        self._put("stage-requests", request(call, attempt), at_s, partition)

    def bind(self, call: str, at_s: float, instance: str = "a", by: str = "dispatcher-0") -> None:
        """A dispatcher binds a call."""
        bound = BoundCall(
            request=request(call),
            queue_score=0.0,
            t_comp_s=1.0,
            deadline_s=9.0,
            predicted_input_tokens=1,
            predicted_output_tokens=1.0,
            terms=ScoreTerms(policy="x", score=0.0, t_queue_s=0.0, t_comp_s=1.0),
            dispatched_at_s=0.0,
            dispatcher_id=by,
        )
        self._put(f"instance.{instance}", bound, at_s)

    def end(
        self,
        call: str,
        at_s: float,
        *,
        kind: str = "completed",
        instance: str = "a",
        queued_s: float = 0.0,
        acted: bool = True,
    ) -> None:
        """A worker ends a call; the producer acts on it unless told otherwise."""
        times = CallTimes(
            queued_at_s=queued_s * SCALE or None,
            started_at_s=(at_s - 0.5) * SCALE,
            finished_at_s=at_s * SCALE,
        )
        outcome = CallOutcome(
            request_id=call,
            query_id=f"run-{call[0]}",
            kind=kind,  # type: ignore[arg-type]  # tests name kinds as plain text
            instance_id=instance,
            times=times,
        )
        self._put("stage-results", outcome, at_s)
        if acted:
            self.act(call, at_s, kind=kind, instance=instance)

    def act(self, call: str, at_s: float, kind: str = "completed", instance: str = "a") -> None:
        """The producer acts on an outcome."""
        self.note("acted", call, at_s, kind=kind, instance_id=instance, finished_at_s=at_s * SCALE)

    def says(
        self, instance: str, at_s: float, running: int, *, epoch: int = 1, accounted: int = -1
    ) -> None:
        """An instance reports."""
        state = InstanceState(
            instance_id=instance,
            phase="serving",
            epoch=epoch,
            spec=SPEC,
            num_running=running,
            accounted_offset=accounted,
        )
        self._put("instance-states", state, at_s)

    def audit(self, calls: Sequence[str], *injected: Injected):
        """Return the reconciliation; calls with the same first letter are one query."""
        expected: dict[str, set[str]] = {}
        for call in calls:
            expected.setdefault(f"run-{call[0]}", set()).add(call)
        return audit(self.journal, self.ledger, expected, injected)


def request(call: str, attempt: int = 0) -> StageRequest:
    """Return a call as a producer writes it."""
    return StageRequest(request_id=call, query_id=f"run-{call[0]}", model="m", attempt=attempt)


@pytest.fixture
def mesh() -> Mesh:
    """Return empty topics."""
    return Mesh()


def test_a_quiet_run_reconciles(mesh: Mesh):
    """Two queries, each call asked, bound, ended and acted on once."""
    for call in ("x1", "x2", "y1"):
        mesh.ask(call, 1.0)
        mesh.bind(call, 1.1)
        mesh.end(call, 2.0)
    found = mesh.audit(["x1", "x2", "y1"])
    assert found.queries == {"submitted": 2, "lost": 0, "completed": 2}
    assert found.holds
    assert (found.duplicates, found.redone_calls, found.not_first) == (0, 0, 0)


def test_a_query_without_its_last_outcome_is_lost(mesh: Mesh):
    """One call of a query never ended: the query is lost, and the call has no outcome."""
    mesh.ask("x1", 1.0)
    mesh.end("x1", 2.0)
    mesh.ask("x2", 2.1)
    found = mesh.audit(["x1", "x2"])
    assert found.queries["lost"] == 1
    assert found.calls == {"submitted": 2, "unanswered": 1}
    assert not found.holds


def test_a_query_that_ends_after_the_producer_gave_up_is_lost(mesh: Mesh):
    """What is answered only because the run was ended does not count as answered."""
    mesh.ask("x1", 1.0)
    mesh.note("gave_up", "x1", 5.0)
    mesh.end("x1", 6.0, kind="cancelled")
    assert mesh.audit(["x1", "y1"]).queries["lost"] == 1  # y was never asked


def test_acting_twice_is_seen(mesh: Mesh):
    """A producer that acts on a duplicate is found out; dropping it is fine."""
    mesh.ask("x1", 1.0)
    mesh.end("x1", 2.0)
    mesh.end("x1", 3.0, acted=False)
    assert mesh.audit(["x1"]).holds
    assert mesh.audit(["x1"]).duplicates == 1
    mesh.act("x1", 2.0)
    found = mesh.audit(["x1"])
    assert found.answered_twice == 1
    assert not found.holds


def test_acting_on_a_later_outcome_is_seen(mesh: Mesh):
    """The outcome of a call is its first record: acting on another one is wrong."""
    mesh.ask("x1", 1.0)
    mesh.end("x1", 2.0, acted=False)
    mesh.end("x1", 3.0)
    found = mesh.audit(["x1"])
    assert found.not_first == 1
    assert not found.holds


def test_another_end_than_completed_names_the_query(mesh: Mesh):
    """A query with a failed call ended as failed, and is not lost."""
    mesh.ask("x1", 1.0)
    mesh.end("x1", 2.0, kind="failed")
    found = mesh.audit(["x1", "x2"])
    assert (found.queries["failed"], found.queries["lost"]) == (1, 0)
    assert found.holds


def test_recovery_from_a_dead_worker_is_timed_to_the_last_call(mesh: Mesh):
    """Two calls move to another instance 6 and 7 s after the kill; one had ended before it."""
    killed = Injected(kind="kill-worker", victim="worker-a", at_s=10.0, back_s=20.0)
    for call, again_s in (("x1", 16.0), ("x2", 17.0)):
        mesh.ask(call, 8.0)
        mesh.bind(call, 8.1)
        mesh.ask(call, again_s - 0.1, attempt=1)
        mesh.bind(call, again_s, "b")
        mesh.end(call, 18.0, instance="b")
    mesh.ask("y1", 8.0)
    mesh.bind("y1", 8.1)
    mesh.end("y1", 9.0)
    mesh.says("a", 9.5, running=1)
    found = mesh.audit(["x1", "x2", "y1"], killed)
    (effect,) = found.effects
    assert (effect.in_flight, effect.running, effect.moved) == (2, 1, 2)
    assert effect.recovery_s == pytest.approx(7.0)
    assert found.redone_calls == 2


def test_a_worker_that_returns_takes_its_calls_up_itself(mesh: Mesh):
    """A call queued again by the victim's next life is resumed, and redone if it was running."""
    killed = Injected(kind="kill-worker", victim="worker-a", at_s=10.0, back_s=12.0)
    mesh.ask("x1", 8.0)
    mesh.bind("x1", 8.1)
    mesh.says("a", 9.0, running=1)
    mesh.end("x1", 14.0, queued_s=12.5)
    found = mesh.audit(["x1"], killed)
    (effect,) = found.effects
    assert (effect.moved, effect.resumed, found.redone_calls) == (0, 1, 1)
    assert effect.recovery_s == pytest.approx(2.5)


def test_a_call_taken_up_by_the_next_life_has_recovered_whatever_befalls_it_later(mesh: Mesh):
    """The victim's new life counts it 3 s after the kill; a drain moves it on 20 s later."""
    mesh.ask("x1", 8.0)
    mesh.bind("x1", 8.1)
    offset = mesh.last_offset
    mesh.says("a", 9.0, running=1, accounted=offset)
    mesh.says("a", 12.0, running=0, epoch=7, accounted=offset - 1)
    mesh.says("a", 13.0, running=0, epoch=7, accounted=offset)
    mesh.ask("x1", 33.0, attempt=1)
    mesh.bind("x1", 33.1, "b")
    mesh.end("x1", 34.0, instance="b", queued_s=33.2)
    killed = Injected(kind="kill-worker", victim="worker-a", at_s=10.0, back_s=12.0)
    (effect,) = mesh.audit(["x1"], killed).effects
    assert effect.recovery_s == pytest.approx(3.0)
    assert (effect.moved, effect.resumed) == (1, 0)


def test_a_kill_without_calls_in_flight_does_not_count(mesh: Mesh):
    """Nothing was bound to the victim."""
    mesh.ask("x1", 8.0)
    mesh.bind("x1", 8.1, "b")
    mesh.end("x1", 11.0, instance="b")
    killed = Injected(kind="kill-worker", victim="worker-a", at_s=10.0, back_s=12.0)
    found = mesh.audit(["x1"], killed)
    assert not found.effects[0].counts
    assert found.recovery_s() == {}


def test_recovery_from_a_dead_dispatcher_is_of_its_own_partitions(mesh: Mesh):
    """Calls of the victim's partition waited 2 s; those of the other's never did."""
    for partition, owner in ((0, "dispatcher-0"), (1, "dispatcher-1")):
        mesh.ask(f"{partition}a", 5.0, partition=partition)
        mesh.bind(f"{partition}a", 5.1, by=owner)
        mesh.end(f"{partition}a", 6.0)
    mesh.ask("x1", 9.9, partition=0)
    mesh.ask("x2", 10.5, partition=0)
    mesh.ask("y1", 9.99, partition=1)
    mesh.bind("y1", 10.01, by="dispatcher-1")
    mesh.bind("x1", 11.9, by="dispatcher-1")
    mesh.bind("x2", 12.0, by="dispatcher-1")
    mesh.ask("z1", 30.0, partition=0)
    mesh.bind("z1", 33.0, by="dispatcher-1")  # slow for another reason
    mesh.ask("w1", 9.5, partition=0)
    mesh.bind("w1", 9.6, by="dispatcher-0")
    mesh.ask("w1", 9.9, partition=0)  # a copy, which nobody waits for
    mesh.end("w1", 10.5)
    mesh.bind("w1", 46.0, by="dispatcher-1")
    killed = Injected(kind="kill-dispatcher", victim="dispatcher-0", at_s=10.0, back_s=14.0)
    (effect,) = mesh.audit([], killed).effects
    assert effect.in_flight == 2
    assert effect.recovery_s == pytest.approx(2.0)


def test_recovery_from_a_wiped_store_is_until_an_engine_begins(mesh: Mesh):
    """Work went on when an engine first began with a call after the wipe."""
    mesh.ask("x1", 9.0)
    mesh.bind("x1", 9.1)
    mesh.end("x1", 12.0)  # began at 11.5
    wiped = Injected(kind="flush-redis", victim="", at_s=10.0, back_s=10.1)
    (effect,) = mesh.audit(["x1"], wiped).effects
    assert effect.in_flight == 1
    assert effect.recovery_s == pytest.approx(1.4)


def test_calls_of_other_runs_are_left_out(mesh: Mesh):
    """Two runs on one mesh do not count each other's calls."""
    other = StageRequest(request_id="o", query_id="other-1", model="m")
    mesh._put("stage-requests", other, 1.0)
    assert mesh.ledger.calls == {}


def test_a_journal_begins_anew_and_survives_a_crash(tmp_path: Path):
    """An earlier run's entries are gone; a line that a crash cut off is left out."""
    path = tmp_path / "journal.jsonl"
    for call in ("old", "new"):
        with Journal(path) as journal:
            journal.write("taken", request_id=call, query_id="q")
    with path.open("ab") as file:
        file.write(b'{"what":"ac')
    (entry,) = read_journal(path)
    assert (entry.what, entry.request_id) == ("taken", "new")


def test_plans_are_seeded_and_hit_every_process():
    """The same seed gives the same plan, another one another; each process is killed once."""
    plan = make_plan(1, KINDS, NAMES)
    assert plan == make_plan(1, KINDS, NAMES)
    assert plan != make_plan(2, KINDS, NAMES)
    killed = [fault.victim for fault in plan if fault.kind.startswith("kill-") and fault.victim]
    assert sorted(killed) == sorted([*NAMES, "producer"])
    assert {fault.kind for fault in plan} == set(KINDS)
    assert duration_s(plan) > sum(fault.down_s for fault in plan)


def test_faults_go_on_for_as_long_as_queries_come():
    """A long plan begins like the short one of its seed and repeats all but the producer's end."""
    once = make_plan(1, KINDS, NAMES)
    long = make_plan(1, KINDS, NAMES, least_s=2.5 * duration_s(once))
    assert long[: len(once)] == once
    assert len(long) == 3 * len(once) - 2
    assert duration_s(long) >= 2.5 * duration_s(once)
    assert [fault.kind for fault in long].count("kill-producer") == 1
    assert long[len(once) : 2 * len(once) - 1] != long[2 * len(once) - 1 :]
    assert len(make_plan(1, ["kill-producer"], NAMES, least_s=1e6)) == 1


def test_a_run_asks_for_no_more_than_the_mesh_can_do(tmp_path: Path):
    """A thousand queries on four calls per engine take longer than on sixteen, and than thirty."""
    plan = ChaosPlan(
        seed=1,
        num_queries=1_000,
        kinds=KINDS,
        short=False,
        fleet="hetero-1",
        time_scale=10.0,
        capacity=4,
        patience_s=60.0,
        settings=None,
        folder=tmp_path,
    )
    fleet = load_fleet("hetero-1")
    long_s = least_s(plan, fleet)
    assert 600 < long_s < 2_000
    assert least_s(msgspec.structs.replace(plan, capacity=16), fleet) < long_s / 2
    assert least_s(msgspec.structs.replace(plan, num_queries=30), fleet) == pytest.approx(
        0.03 * long_s
    )


def test_short_plans_have_one_victim_per_kind():
    """One worker and one dispatcher are enough for the short form."""
    plan = make_plan(1, ("kill-worker", "kill-dispatcher"), NAMES, short=True)
    assert sorted(fault.kind for fault in plan) == ["kill-dispatcher", "kill-worker"]


def test_unknown_faults_are_refused():
    """A misspelt fault is named, together with the known ones."""
    assert parse_kinds("") == KINDS
    with pytest.raises(ConfigError, match=r"kill-redis.*known: kill-worker"):
        parse_kinds("kill-redis")


@given(num=st.integers(0, 40), count=st.integers(1, 15))
def test_portions_hold_every_query_once(num: int, count: int):
    """Queries are divided among the faults, none twice, each portion's first arriving at once."""
    queries = [
        TraceQuery(query_id=f"q{n}", stages=(), arrival_s=float(num - n)) for n in range(num)
    ]
    portions = _portions(queries, count)
    assert len(portions) == count
    assert sorted(q.query_id for part in portions for q in part) == sorted(
        q.query_id for q in queries
    )
    assert all(part[0].arrival_s == 0.0 for part in portions if part)
