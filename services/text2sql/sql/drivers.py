"""Read-only connections, one class per kind of database: a further one is a class and a line.

Each opens a SQLAlchemy engine whose connections cannot write, have limits set on the server's
side, and can be interrupted from another thread.
"""

import sqlite3
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import msgspec
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from services.text2sql.sql.allowed import FUNCTIONS
from shared.errors import ConfigError

MIB = 1024 * 1024
POSTGRES_PORT = 5_432


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one statement may use.

    Attributes:
        timeout_s: Longest run, wall seconds.
        max_rows: Most rows returned.
        max_bytes: Most bytes returned.
    """

    timeout_s: float = 10.0
    max_rows: int = 1_000
    max_bytes: int = MIB


class Driver(Protocol):
    """One kind of database."""

    dialect: str
    engine: Engine

    def prepare(self, connection: Connection, deadline_s: float, tables: Collection[str]) -> None:
        """Set up a connection for one statement that ends by `deadline_s` (monotonic seconds)."""
        ...

    def interrupt(self, connection: Connection) -> None:
        """Stop what runs on the connection; called from another thread."""
        ...


# What SQLite's compiler asks about; everything else is denied.
_READ, _SELECT, _TRANSACTION, _FUNCTION, _SAVEPOINT, _RECURSIVE = 20, 21, 22, 31, 32, 33
_PROGRESS_OPS = 10_000
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 4 * MIB,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 500,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_SETUP = (
    "PRAGMA query_only = ON",
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA temp_store = MEMORY",
    f"PRAGMA hard_heap_limit = {512 * MIB}",
)


class SqliteDriver:
    """SQLite files, opened read-only; an authorizer stands behind the syntax check.

    Args:
        url: `sqlite:///FILE`.
        limits: What one statement may use.

    Raises:
        ConfigError: There is no such file.
    """

    dialect = "sqlite"

    def __init__(self, url: URL, limits: Limits) -> None:
        path = Path(url.database or "")
        if not path.is_file():
            raise ConfigError(f"there is no SQLite database at {url.database!r}")
        self._uri = f"{path.resolve().as_uri()}?mode=ro"
        self._limits = limits
        self.engine = create_engine("sqlite://", creator=self._connect, poolclass=NullPool)

    def prepare(self, connection: Connection, deadline_s: float, tables: Collection[str]) -> None:
        """Set limits, a progress handler that ends it in time, and the authorizer."""
        raw = _sqlite_of(connection)
        raw.set_progress_handler(lambda: time.monotonic() > deadline_s, _PROGRESS_OPS)
        raw.set_authorizer(_authorizer({name.lower() for name in tables}))

    def interrupt(self, connection: Connection) -> None:
        """Stop what runs on the connection."""
        _sqlite_of(connection).interrupt()

    def _connect(self) -> sqlite3.Connection:
        raw = sqlite3.connect(
            self._uri, uri=True, check_same_thread=False, isolation_level=None, timeout=2.0
        )
        # Text that is no UTF-8 is shown as far as it goes.
        raw.text_factory = lambda data: data.decode("utf-8", "replace")
        for kind, value in _LIMITS.items():
            raw.setlimit(kind, value)
        for statement in _SETUP:
            raw.execute(statement)
        return raw


def _sqlite_of(connection: Connection) -> sqlite3.Connection:
    raw = connection.connection.driver_connection
    if not isinstance(raw, sqlite3.Connection):
        raise TypeError("no SQLite connection")
    return raw


def _authorizer(
    tables: Collection[str],
) -> Callable[[int, str | None, str | None, str | None, str | None], int]:
    functions = FUNCTIONS["sqlite"] | {"like", "glob", "->", "->>"}

    def authorize(
        action: int, first: str | None, second: str | None, _database: str | None, _by: str | None
    ) -> int:
        if action in (_SELECT, _RECURSIVE, _SAVEPOINT, _TRANSACTION):
            return sqlite3.SQLITE_OK
        if action == _READ and (first or "").lower() in tables:
            return sqlite3.SQLITE_OK
        if action == _READ and not second:
            return sqlite3.SQLITE_OK  # COUNT(*) reads no column, of a CTE perhaps
        if action == _FUNCTION and (second or "").lower() in functions:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    return authorize


class PostgresDriver:
    """PostgreSQL; every transaction is read-only, and the server itself ends what takes too long.

    Args:
        url: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`; best a user who may only read.
        limits: What one statement may use.
    """

    dialect = "postgres"

    def __init__(self, url: URL, limits: Limits) -> None:
        timeout_ms = max(1, round(limits.timeout_s * 1_000))
        settings = {
            "default_transaction_read_only": "on",
            "statement_timeout": str(timeout_ms),
            "lock_timeout": str(min(timeout_ms, 2_000)),
            "idle_in_transaction_session_timeout": str(timeout_ms + 5_000),
            "work_mem": "16MB",
            "max_parallel_workers_per_gather": "0",
            "jit": "off",
        }
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        self.engine = create_engine(
            url.set(drivername="postgresql+psycopg"),
            pool_size=4,
            pool_pre_ping=True,
            connect_args={
                "options": options,
                "connect_timeout": 5,
                "application_name": "hexflow-text2sql",
            },
        )

    def prepare(self, connection: Connection, deadline_s: float, tables: Collection[str]) -> None:
        """Give the server the time that is left."""
        del tables
        left_ms = max(1, round((deadline_s - time.monotonic()) * 1_000))
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {left_ms}")

    def interrupt(self, connection: Connection) -> None:
        """Ask the server to stop what runs on the connection."""
        raw: Any = connection.connection.driver_connection
        raw.cancel_safe(timeout=2.0)


_DRIVERS: dict[str, Callable[[URL, Limits], Driver]] = {
    "sqlite": SqliteDriver,
    "postgresql": PostgresDriver,
    "postgres": PostgresDriver,
}


def place_of(url: str) -> str:
    """Return where a database is, for people: its file, or host and port; never a password.

    Raises:
        ConfigError: The address is none.
    """
    parsed = _parsed(url)
    if parsed.host is None:
        return parsed.database or parsed.drivername
    return f"{parsed.host}:{parsed.port or POSTGRES_PORT}"


def _parsed(url: str) -> URL:
    try:
        return make_url(url)
    except (ArgumentError, ValueError) as exc:  # a port that is no number is a ValueError
        raise ConfigError(
            "a database is given as sqlite:///FILE or postgresql://USER@HOST:PORT/NAME"
        ) from exc


def open_driver(url: str, limits: Limits) -> Driver:
    """Return the driver of a database address.

    Raises:
        ConfigError: The address is none, or of a kind that is not supported.
    """
    parsed = _parsed(url)
    kind = parsed.drivername.partition("+")[0]
    if kind not in _DRIVERS:
        known = ", ".join(sorted(_DRIVERS))
        raise ConfigError(f"databases of kind {kind!r} are not supported; there are: {known}")
    return _DRIVERS[kind](parsed, limits)
