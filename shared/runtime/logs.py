"""Structured logs: one JSON object a line, constant event names, units in keys."""

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["json", "console"]


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
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
