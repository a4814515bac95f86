"""Structured logs: one JSON object a line, constant event names, units in keys."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Literal

import structlog

LogFormat = Literal["json", "console"]
REPEAT_S = 10.0
MAX_REMEMBERED = 1_000


class Sparing(logging.Filter):
    """Lets the same message of a foreign library through only once in a while.

    While no broker answers, aiokafka logs each of hundreds of attempts a second and process; the
    first of a kind is kept, and then one every `REPEAT_S` with the number left out.

    Args:
        now_s: Monotonic time, seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; messages are told apart before their arguments."""
        key, now_s = (record.name, str(record.msg)), self._now_s()
        at_s, num_hidden = self._seen.get(key, (now_s - REPEAT_S, 0))
        if now_s - at_s < REPEAT_S:
            self._seen[key] = (at_s, num_hidden + 1)
            return False
        if len(self._seen) >= MAX_REMEMBERED:
            self._seen.clear()
        self._seen[key] = (now_s, 0)
        if num_hidden:
            record.msg = f"{record.msg} ({num_hidden} more like it left out)"
        return True


def configure(level: str = "INFO", log_format: LogFormat = "json") -> None:
    """Set up structlog once per process; logs go to stderr so that stdout stays data.

    Args:
        level: Lowest level that is written.
        log_format: `json` for machines, `console` for people.
    """
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    steps: tuple[structlog.typing.Processor, ...] = (
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    )
    structlog.configure(
        processors=[*steps, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    foreign = structlog.stdlib.ProcessorFormatter(
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *steps],
    )
    for handler in logging.getLogger().handlers:
        handler.setFormatter(foreign)  # what libraries log looks like our own lines
        if not any(isinstance(one, Sparing) for one in handler.filters):
            handler.addFilter(Sparing())
