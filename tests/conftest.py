"""Fixtures and reporting shared by all tests.

`kafka_server` and `redis_server` are started when the first test asks, once per run; tests share
them, so each uses names of its own and none stops them. `own_kafka`, `own_redis` and what
`kafka_factory` starts are fresh and may be killed. Without a server such a test is not run and
the end of the output says so; where `HEXFLOW_REQUIRE_SERVERS=1` it fails.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.postgres import postgres_for_tests
from tests.support.servers import (
    NOT_RUN,
    KafkaServer,
    MissingServerError,
    RedisServer,
    do_without,
    kafka_for_tests,
    prepare_kafka,
    redis_for_tests,
    start_kafka,
    start_redis,
)

# A busy machine is no fault of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

KAFKA_FIXTURES = {"kafka_server", "own_kafka", "kafka_factory"}
REDIS_FIXTURES = {"redis_server", "own_redis"}
POSTGRES_FIXTURES = {"postgres_server"}
KafkaFactory = Callable[..., KafkaServer]
LONG_TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a real server, and give slow tests a longer limit."""
    for item in items:
        if (KAFKA_FIXTURES | REDIS_FIXTURES | POSTGRES_FIXTURES) & set(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker("real")
        is_long = item.get_closest_marker("slow") or item.get_closest_marker("chaos")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch Kafka's jars before the first test's time limit runs."""
    is_wanted = any(
        item.get_closest_marker("real") or KAFKA_FIXTURES & set(getattr(item, "fixturenames", ()))
        for item in session.items
    )
    if session.config.option.collectonly or not is_wanted:
        return
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")

    def say(text: str) -> None:
        if terminal is not None:
            terminal.write_line(f"{text} ...", flush=True)

    with contextlib.suppress(MissingServerError):  # The test that needs it tells.
        prepare_kafka(say)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly which tests did not run for want of a server, and how to get it."""
    tests_of_cause: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        _, _, why = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, "")
        _, is_ours, cause = why.partition(NOT_RUN)
        if is_ours:
            tests_of_cause.setdefault(cause, []).append(report.nodeid)
    for cause, tests in tests_of_cause.items():
        title = f"TESTS NOT RUN: {len(tests)}"
        terminalreporter.section(title, sep="!", red=True, bold=True)
        terminalreporter.write_line(cause, yellow=True)
        for test in tests:
            terminalreporter.write_line(f"  not run: {test}")


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Undo what a command does to this process's logging: its stderr is closed by then."""
    level, handlers = logging.getLogger("aiokafka").level, list(logging.getLogger().handlers)
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
    logging.getLogger("aiokafka").setLevel(level)
    for added in [one for one in logging.getLogger().handlers if one not in handlers]:
        logging.getLogger().removeHandler(added)


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """Return the real Apache Kafka that all tests of this run share."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(kafka_for_tests())
        except MissingServerError as missing:
            do_without(missing)
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Return the real Redis that all tests of this run share."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(redis_for_tests())
        except MissingServerError as missing:
            do_without(missing)
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Return the address of a real PostgreSQL, with a user who may do everything there."""
    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(postgres_for_tests())
        except MissingServerError as missing:
            do_without(missing)
        yield url


@pytest.fixture
def kafka_factory(tmp_path: Path) -> Iterator[KafkaFactory]:
    """Return what starts fresh brokers with properties and listeners of the test's choice.

    It takes the keyword arguments of `tests.support.servers.start_kafka`.
    """
    servers: list[KafkaServer] = []

    def start(**options: Any) -> KafkaServer:
        try:
            servers.append(start_kafka(tmp_path / f"kafka-{len(servers)}", **options))
        except MissingServerError as missing:
            do_without(missing)
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def own_kafka(kafka_factory: KafkaFactory) -> KafkaServer:
    """Return a fresh Apache Kafka that this test alone uses and may kill."""
    return kafka_factory()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a fresh Redis that this test alone uses and may kill."""
    try:
        server = start_redis(tmp_path / "redis")
    except MissingServerError as missing:
        do_without(missing)
    yield server
    server.stop()
