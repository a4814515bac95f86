"""Logs of foreign libraries stay readable, and cheap, through an outage."""

import logging

from shared.runtime.logs import MAX_REMEMBERED, REPEAT_S, Sparing


class Time:
    """A clock that the test sets."""

    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def record(text: str, *args: object, name: str = "aiokafka") -> logging.LogRecord:
    """Return a record as a library writes it."""
    return logging.LogRecord(name, logging.ERROR, __file__, 1, text, args, None)


def test_a_repeated_message_is_written_once_in_a_while_with_a_count():
    """Of a thousand attempts the first is told, and after a while how many followed."""
    clock = Time()
    sparing = Sparing(clock)
    assert sparing.filter(record("Unable connect to node %s", 1))
    assert not any(sparing.filter(record("Unable connect to node %s", 1)) for _ in range(1_000))
    clock.now_s += REPEAT_S
    late = record("Unable connect to node %s", 1)
    assert sparing.filter(late)
    assert late.getMessage() == "Unable connect to node 1 (1000 more like it left out)"


def test_different_messages_do_not_hide_each_other():
    """Another text, or the same text of another library, is another message."""
    sparing = Sparing(Time())
    assert sparing.filter(record("a"))
    assert sparing.filter(record("b"))
    assert sparing.filter(record("a", name="redis"))


def test_what_is_remembered_is_bounded():
    """Texts that never repeat do not fill the memory."""
    sparing = Sparing(Time())
    assert all(sparing.filter(record(f"text {n}")) for n in range(3 * MAX_REMEMBERED))
    assert len(sparing._seen) <= MAX_REMEMBERED
