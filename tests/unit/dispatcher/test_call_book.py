"""The calls a dispatcher holds, and their places on the request topic."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.dispatcher.call_book import CallBook, OpenCall, Origin
from shared.contracts.messages import StageRequest
from shared.ports import TopicPartition
from shared.runtime.offsets import OffsetTracker

TPS = [TopicPartition("t", index) for index in range(2)]


def make_open(request_id: str, origin: Origin, attempt: int = 0) -> OpenCall:
    """Return an open call of 10 bytes."""
    request = StageRequest(request_id=request_id, model=f"m{len(request_id)}", attempt=attempt)
    return OpenCall(request, origin, 10, 0.0)


def make_origin(tracker: OffsetTracker, offset: int, tp: TopicPartition = TPS[0]) -> Origin:
    """Return a place that has been seen."""
    tracker.seen(offset)
    return Origin(tp, offset, tracker)


def test_a_duplicate_of_an_open_call_is_finished_with_it():
    """A repeated delivery is not committed before the one it repeats."""
    tracker, book = OffsetTracker(0), CallBook(10)
    call = make_open("r", make_origin(tracker, 0))
    assert book.add(call)
    assert not book.add(make_open("r", make_origin(tracker, 1)))
    assert tracker.position == 0
    assert not tracker.is_finished(1)
    book.begin_publish(call)
    book.end(call)
    assert tracker.position == 2


def test_a_duplicate_of_an_ended_call_is_finished_at_once():
    """What is handed on needs no second time."""
    tracker, book = OffsetTracker(0), CallBook(10)
    call = make_open("r", make_origin(tracker, 0))
    book.add(call)
    book.begin_publish(call)
    book.end(call)
    assert not book.add(make_open("r", make_origin(tracker, 1)))
    assert tracker.position == 2
    assert book.add(make_open("r", make_origin(tracker, 2), attempt=1))


def test_remembered_deliveries_are_bounded():
    """The oldest ended delivery is forgotten first."""
    tracker, book = OffsetTracker(0), CallBook(2)
    for offset, name in enumerate(("a", "b", "c")):
        call = make_open(name, make_origin(tracker, offset))
        book.add(call)
        book.begin_publish(call)
        book.end(call)
    assert not book.add(make_open("b", make_origin(tracker, 3)))
    assert book.add(make_open("a", make_origin(tracker, 4)))


def test_a_call_also_read_elsewhere_survives_the_move_of_one_partition():
    """Only a call whose every place has moved is dropped."""
    first, second, book = OffsetTracker(0), OffsetTracker(0), CallBook(10)
    book.add(make_open("r", make_origin(first, 0, TPS[0])))
    book.add(make_open("r", make_origin(second, 0, TPS[1])))
    assert book.drop_origins([TPS[0]], waiting_only=True) == 0
    assert book.num_waiting == 1
    assert book.drop_origins([TPS[1]], waiting_only=True) == 1
    assert book.num_waiting == 0
    assert book.add(make_open("r", make_origin(first, 0, TPS[0])))


class BookMachine(RuleBasedStateMachine):
    """A book against a model: every offset is finished exactly when its call is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.book = CallBook(1_000)
        self.trackers = {tp: OffsetTracker(0) for tp in TPS}
        self.next_offset = dict.fromkeys(TPS, 0)
        self.places: dict[str, set[tuple[TopicPartition, int]]] = {}
        self.open: dict[str, OpenCall] = {}
        self.handed_on: set[str] = set()

    @rule(name=st.sampled_from(["a", "b", "cc", "dd"]), tp=st.sampled_from(TPS))
    def deliver(self, name: str, tp: TopicPartition) -> None:
        offset = self.next_offset[tp]
        self.next_offset[tp] += 1
        call = make_open(name, make_origin(self.trackers[tp], offset, tp))
        self.places.setdefault(name, set()).add((tp, offset))
        is_new = self.book.add(call)
        assert is_new == (name not in self.open and name not in self.handed_on)
        if is_new:
            self.open[name] = call

    @rule(name=st.sampled_from(["a", "b", "cc", "dd"]))
    def publish(self, name: str) -> None:
        call = self.open.get(name)
        if call and not call.is_publishing:
            self.book.begin_publish(call)

    @rule(name=st.sampled_from(["a", "b", "cc", "dd"]), is_taken=st.booleans())
    def settle(self, name: str, is_taken: bool) -> None:
        call = self.open.get(name)
        if not call or not call.is_publishing:
            return
        if is_taken:
            self.book.end(call)
            self.handed_on.add(name)
            del self.open[name]
        elif not self.book.put_back(call):
            del self.open[name]

    @rule(tp=st.sampled_from(TPS))
    def move(self, tp: TopicPartition) -> None:
        """The partition moves away and comes back: it is read again from its position."""
        self.book.drop_origins([tp], waiting_only=True)
        self.book.drop_origins([tp], waiting_only=False)
        for name, call in list(self.open.items()):
            if not call.origins and not call.is_publishing:
                del self.open[name]
        committed = self.trackers[tp].committable()
        tracker = self.trackers[tp] = OffsetTracker.restore(committed, 0)
        for offset in range(committed.offset, self.next_offset[tp]):
            tracker.seen(offset)
            if tracker.is_finished(offset):
                continue
            name = next(n for n, places in self.places.items() if (tp, offset) in places)
            call = make_open(name, Origin(tp, offset, tracker))
            if self.book.add(call):
                self.open[name] = call

    @invariant()
    def finished_means_handed_on(self) -> None:
        for name, places in self.places.items():
            for tp, offset in places:
                if self.trackers[tp].is_finished(offset):
                    assert name in self.handed_on
                elif name in self.handed_on:
                    raise AssertionError("a call that was handed on is read again")

    @invariant()
    def counts_agree(self) -> None:
        waiting = [call for call in self.open.values() if not call.is_publishing]
        assert self.book.num_waiting == len(waiting)
        assert self.book.num_publishing == len(self.open) - len(waiting)
        assert self.book.waiting_bytes == 10 * len(waiting)
        grouped = [c for group in self.book.groups() for c in self.book.waiting_in(group)]
        assert {c.key for c in grouped} == {c.key for c in waiting}


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
