"""One database as the agent sees it: a schema, and statements that run safely.

Blocking work runs in threads of its own. Whoever is cancelled, or runs out of time, first stops
the statement in the database.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self, TypeVar

import msgspec
import structlog
from sqlalchemy import Connection, CursorResult, inspect
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from services.text2sql.sql.cells import plain_row, size_of
from services.text2sql.sql.drivers import Driver, Limits, open_driver, place_of
from services.text2sql.sql.errors import SqlFailed, SqlRefused, SqlTimedOut
from services.text2sql.sql.introspection import read_schema
from services.text2sql.sql.safety import SafeStatement, SqlGate
from services.text2sql.sql.schema import Schema
from shared.errors import ConfigError
from shared.runtime.tracing import around_here

THREADS = 8
STOP_WITHIN_S = 5.0
FETCH_ROWS = 100
INSPECT_TIMEOUT_S = 60.0
T = TypeVar("T")
log = structlog.get_logger(__name__)


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """What a statement gave.

    Attributes:
        sql: The statement that ran.
        columns: Names of the columns.
        rows: Values as they travel.
        is_truncated: Whether there was more.
        is_ordered: Whether the statement says in which order.
        took_s: Time in the database, wall seconds.
    """

    sql: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    is_truncated: bool
    is_ordered: bool
    took_s: float


class _Job:
    """One statement under way, which another thread may stop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.is_stopped = False

    def begin(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self.is_stopped:
                raise SqlTimedOut("stopped before it began")

    def end(self) -> None:
        with self._lock:
            self._connection = None

    def stop(self) -> None:
        with self._lock:
            self.is_stopped = True
            if self._connection is not None:
                self._driver.interrupt(self._connection)


class Database:
    """Runs checked statements; made by `open`.

    Args:
        driver: How it is reached.
        schema: What it contains.
        limits: What one statement may use.
        pool: Threads for blocking work.
    """

    def __init__(
        self, driver: Driver, schema: Schema, limits: Limits, pool: ThreadPoolExecutor
    ) -> None:
        self._driver = driver
        self._limits = limits
        self._pool = pool
        self._tables = frozenset(table.name for table in schema.tables)
        self._gate = SqlGate(schema.dialect, self._tables, schema.schemas)
        self.schema = schema

    @classmethod
    @asynccontextmanager
    async def open(cls, name: str, url: str, limits: Limits | None = None) -> AsyncIterator[Self]:
        """Connect, read the schema, and close at the end.

        Args:
            name: What the database is called here.
            url: Its address.
            limits: What one statement may use.

        Raises:
            ConfigError: It cannot be reached, or is of a kind that is not supported.
        """
        limits = limits or Limits()
        driver = open_driver(url, limits)
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix=f"database-{name}")
        try:
            loop = asyncio.get_running_loop()
            schema = await loop.run_in_executor(pool, _inspect, name, place_of(url), driver)
            yield cls(driver, schema, limits, pool)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            driver.engine.dispose()

    @property
    def dialect(self) -> str:
        """Return sqlglot's name of the SQL dialect."""
        return self.schema.dialect

    def check(self, sql: str) -> SafeStatement:
        """Return the statement that would run; see `SqlGate.check`."""
        return self._gate.check(sql)

    async def run(
        self, sql: str, *, max_rows: int | None = None, timeout_s: float | None = None
    ) -> Rows:
        """Run one statement that somebody untrusted wrote.

        Args:
            sql: The statement.
            max_rows: Most rows, below the database's own limit.
            timeout_s: Longest run, wall seconds, below the database's own limit.

        Raises:
            SqlRefused: It may not run.
            SqlFailed: It is no SQL, or the database cannot run it.
            SqlTimedOut: It was stopped.
        """
        statement = self._gate.check(sql)
        limits = Limits(
            timeout_s=min(self._limits.timeout_s, timeout_s or self._limits.timeout_s),
            max_rows=min(self._limits.max_rows, max_rows or self._limits.max_rows),
            max_bytes=self._limits.max_bytes,
        )
        job = _Job(self._driver)
        known = {"db.system.name": self._driver.engine.dialect.name, "db.operation.name": "SELECT"}
        with around_here("SELECT", "client", attributes=known) as span:
            rows = await self._bounded(
                job, limits.timeout_s, lambda: self._execute(job, statement, limits)
            )
            span.end(attributes={"db.response.returned_rows": len(rows.rows)})
            return rows

    async def texts_like(
        self, table: str, column: str, words: Sequence[str], *, limit: int
    ) -> tuple[str, ...]:
        """Return distinct values of a text column that contain one of some words, in any case.

        Names come from the schema and are quoted; the words are data.

        Raises:
            SqlError: It could not be searched.
        """
        quote = self._driver.engine.dialect.identifier_preparer.quote_identifier
        name = quote(column)
        likes = " OR ".join(f"LOWER({name}) LIKE '%{_escaped(word)}%'" for word in words)
        sql = (
            f"SELECT DISTINCT {name} FROM {quote(table)} "  # noqa: S608 - quoted, and checked
            f"WHERE {likes or '1 = 0'} LIMIT {limit}"
        )
        rows = await self.run(sql, max_rows=limit)
        return tuple(str(row[0]) for row in rows.rows if row[0] is not None)

    async def _bounded(self, job: _Job, timeout_s: float, work: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            done, _ = await asyncio.wait([future], timeout=timeout_s + 1.0)
        except asyncio.CancelledError:
            await self._stop(job, future)
            raise
        if not done:
            await self._stop(job, future)
            raise SqlTimedOut(f"it ran for more than {timeout_s:g} s and was stopped")
        return future.result()

    async def _stop(self, job: _Job, future: "asyncio.Future[Any]") -> None:
        await asyncio.to_thread(job.stop)
        done, _ = await asyncio.wait([future], timeout=STOP_WITHIN_S)
        if not done:
            log.warning("statement_not_stopped", database=self.schema.name)
        elif not future.cancelled():
            future.exception()  # retrieved: it is the stop itself

    def _execute(self, job: _Job, statement: SafeStatement, limits: Limits) -> Rows:
        began_s = time.monotonic()
        deadline_s = began_s + limits.timeout_s
        try:
            with self._driver.engine.connect() as connection:
                job.begin(connection)
                try:
                    self._driver.prepare(connection, deadline_s, self._tables)
                    return _fetch(connection, statement, limits, began_s)
                finally:
                    job.end()
        except SQLAlchemyError as exc:
            raise _translated(exc, deadline_s, job, limits) from exc


def _escaped(word: str) -> str:
    """Return a word for a LIKE pattern: its wildcards match anything, which is harmless."""
    return word.lower().replace("'", "''")


def _fetch(
    connection: Connection, statement: SafeStatement, limits: Limits, began_s: float
) -> Rows:
    options = {"stream_results": True, "max_row_buffer": FETCH_ROWS, "no_parameters": True}
    result: CursorResult[Any] = connection.execution_options(**options).exec_driver_sql(
        statement.sql
    )
    try:
        rows, is_truncated = _take(result, limits, began_s + limits.timeout_s)
        names = result.keys()
    finally:
        result.close()
    return Rows(
        sql=statement.sql,
        columns=tuple(map(str, names)),
        rows=tuple(rows),
        is_truncated=is_truncated,
        is_ordered=statement.is_ordered,
        took_s=time.monotonic() - began_s,
    )


def _take(
    result: CursorResult[Any], limits: Limits, deadline_s: float
) -> tuple[list[tuple[Any, ...]], bool]:
    rows: list[tuple[Any, ...]] = []
    num_bytes = 0
    for row in result:
        plain = plain_row(row)
        num_bytes += size_of(plain)
        if len(rows) >= limits.max_rows or num_bytes > limits.max_bytes:
            return rows, True
        rows.append(plain)
        if time.monotonic() > deadline_s:
            raise SqlTimedOut(f"it ran for more than {limits.timeout_s:g} s and was stopped")
    return rows, False


def _translated(
    exc: SQLAlchemyError, deadline_s: float, job: _Job, limits: Limits
) -> SqlFailed | SqlTimedOut | SqlRefused:
    text = str(exc.orig if isinstance(exc, DBAPIError) and exc.orig is not None else exc)
    text = " ".join(text.split())[:500]
    is_stop = "interrupt" in text or "statement timeout" in text or "canceling statement" in text
    if job.is_stopped or (is_stop and isinstance(exc, OperationalError | DBAPIError)):
        return SqlTimedOut(f"it ran for more than {limits.timeout_s:g} s and was stopped")
    if time.monotonic() > deadline_s:
        return SqlTimedOut(f"it ran for more than {limits.timeout_s:g} s and was stopped")
    if "not authorized" in text or "prohibited" in text:
        return SqlRefused(text)
    return SqlFailed(text)


def check_reachable(name: str, url: str) -> None:
    """Connect to a database, and find a table or view in it; blocks for some seconds at most.

    Raises:
        ConfigError: It cannot be reached or read, has nothing in it, or is of a kind that is not
            supported.
    """
    driver = open_driver(url, Limits())
    try:
        with _reading(name, place_of(url)), driver.engine.connect() as connection:
            inspector = inspect(connection)
            is_empty = not inspector.get_table_names() and not inspector.get_view_names()
    finally:
        driver.engine.dispose()
    if is_empty:
        raise ConfigError(f"the database {name!r} at {place_of(url)} has no table to ask about")


def _inspect(name: str, place: str, driver: Driver) -> Schema:
    with _reading(name, place):
        return read_schema(name, driver, time.monotonic() + INSPECT_TIMEOUT_S)


@contextmanager
def _reading(name: str, place: str) -> Iterator[None]:
    """Say which database it is that cannot be read."""
    try:
        yield
    except SQLAlchemyError as exc:
        # The address may hold a password; the driver's own words do not.
        cause = str(exc.orig if isinstance(exc, DBAPIError) and exc.orig is not None else exc)
        cause = " ".join(cause.split())[:500]
        raise ConfigError(f"the database {name!r} at {place} cannot be read: {cause}") from exc
