"""Which queries count as cancelled, and for how long."""

from services.worker.tombstones import Tombstones
from shared.contracts.codec import encode
from shared.contracts.messages import CancelQuery
from shared.ports import Record, TopicPartition


def _record(value: bytes | None) -> Record:
    tp = TopicPartition("cancellations", 0)
    return Record(tp=tp, offset=0, append_unix_s=0.0, key=b"q", value=value)


def _tombstone(query_id: str, until_s: float) -> Record:
    return _record(encode(CancelQuery(query_id=query_id, until_s=until_s, reason="r")))


def test_tombstone_holds_until_it_expires() -> None:
    """A query stays cancelled up to its tombstone's end, and is forgotten then."""
    tombstones = Tombstones()
    assert tombstones.put(_tombstone("q", 10.0), now_s=0.0) == "q"
    tombstones.prune(10.0)
    found = tombstones.find("q")
    assert found is not None
    assert found.reason == "r"
    tombstones.prune(10.1)
    assert tombstones.find("q") is None
    assert len(tombstones) == 0


def test_expired_tombstone_is_ignored() -> None:
    """A tombstone replayed after its end cancels nothing."""
    tombstones = Tombstones()
    assert tombstones.put(_tombstone("q", 10.0), now_s=11.0) is None
    assert tombstones.find("q") is None


def test_longest_tombstone_counts() -> None:
    """A second cancellation can only prolong the first."""
    tombstones = Tombstones()
    tombstones.put(_tombstone("q", 20.0), now_s=0.0)
    assert tombstones.put(_tombstone("q", 10.0), now_s=0.0) == "q"
    tombstones.prune(15.0)
    assert tombstones.find("q") is not None


def test_number_of_tombstones_is_bounded() -> None:
    """Whoever cancels without end pushes out the oldest tombstones, not the process."""
    tombstones = Tombstones(limit=2)
    for name in "abc":
        tombstones.put(_tombstone(name, 1e15), now_s=0.0)
    assert [tombstones.find(name) is None for name in "abc"] == [True, False, False]


def test_what_cannot_be_read_cancels_nothing() -> None:
    """Junk and deletions on the topic are skipped."""
    tombstones = Tombstones()
    assert tombstones.put(_record(b"junk"), now_s=0.0) is None
    assert tombstones.put(_record(None), now_s=0.0) is None
    assert len(tombstones) == 0
