"""The log of one partition."""

from hypothesis import given
from hypothesis import strategies as st

from shared.adapters.memory_log import (
    COMPACT_AT_LEAST,
    TOMBSTONE_KEEP_S,
    PartitionLog,
    record_bytes,
)
from shared.ports import Record, TopicPartition

TP = TopicPartition("t", 0)


def append(
    log: PartitionLog, value: bytes | None, key: bytes | None = None, at_s: float = 100.0
) -> Record:
    """Add a record at the end."""
    record = Record(tp=TP, offset=log.end, append_unix_s=at_s, key=key, value=value)
    log.append(record)
    return record


@given(st.lists(st.one_of(st.integers(0, 30), st.none()), max_size=120), st.integers(1, 7))
def test_log_equals_a_plain_list(steps: list[int | None], limit: int) -> None:
    """Appending, dropping and reading agree with a list that is never shortened."""
    log = PartitionLog(compacted=False)
    model: list[Record] = []
    begin = 0
    for step in steps:
        if step is None:
            model.append(append(log, b"v" * len(model)))
        else:
            begin = max(begin, min(step, len(model)))
            log.drop_below(step, bytes_at_most=0)
    assert (log.begin, log.end) == (begin, len(model))
    assert log.bytes == sum(map(record_bytes, model[begin:]))
    for offset in range(len(model) + 2):
        start = max(offset, begin)
        assert log.read(offset, limit) == model[start : start + limit]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=400))
def test_compacted_log_keeps_the_last_of_every_key(writes: list[tuple[int, bool]]) -> None:
    """Whatever was written, the last record of each key is kept, in offset order."""
    log = PartitionLog(compacted=True)
    last: dict[bytes, Record] = {}
    for key, is_tombstone in writes:
        name = b"k%d" % key
        last[name] = append(log, None if is_tombstone else b"v", name)
    kept = log.read(0, 1_000)
    offsets = [record.offset for record in kept]
    assert offsets == sorted(set(offsets))
    assert {record.key: record for record in kept} == last
    assert len(kept) <= len(last) + max(COMPACT_AT_LEAST, len(kept) // 2) + 1
    assert log.bytes == sum(map(record_bytes, kept))


def test_reading_a_compacted_log_skips_gaps() -> None:
    """Reading at an offset that is gone goes on at the next that is there."""
    log = PartitionLog(compacted=True)
    for index in range(200):
        append(log, b"v", b"rare" if index == 50 else b"often")
    kept = [record.offset for record in log.read(0, 1_000)]
    assert 50 in kept
    assert kept[-1] == 199
    assert [record.offset for record in log.read(51, 1)] == [kept[kept.index(50) + 1]]


def test_old_tombstones_go() -> None:
    """A tombstone outlives its key by an hour, so that every reader sees it, then it goes."""
    log = PartitionLog(compacted=True)
    append(log, None, b"gone", at_s=100.0)
    for _ in range(COMPACT_AT_LEAST + 2):
        append(log, b"v", b"live", at_s=200.0)
    assert log.begin == 0
    for _ in range(2 * COMPACT_AT_LEAST + 2):
        append(log, b"v", b"live", at_s=200.0 + TOMBSTONE_KEEP_S)
    assert b"gone" not in {record.key for record in log.read(0, 1_000)}


def test_old_records_go_by_age() -> None:
    """Dropping by age keeps what was appended at or after the instant, and all offsets."""
    log = PartitionLog(compacted=False)
    for at_s in (1.0, 2.0, 2.0, 3.0):
        append(log, b"v", at_s=at_s)
    assert log.drop_older(2.0) == 1
    assert (log.begin, log.end) == (1, 4)
    assert log.drop_older(10.0) == 3
    assert (log.begin, log.end, log.bytes) == (4, 4, 0)
    assert log.last_append_unix_s == 3.0
