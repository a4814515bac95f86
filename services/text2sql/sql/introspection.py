"""Reads a database's schema: tables, columns, keys, comments, and the values that are typical."""

import time
from typing import Any

from sqlalchemy import Connection, Inspector, inspect, types
from sqlalchemy.exc import SQLAlchemyError

from services.text2sql.sql.cells import plain
from services.text2sql.sql.drivers import Driver
from services.text2sql.sql.schema import Column, ForeignKey, Schema, Table

MAX_SAMPLES = 12
SAMPLED_ROWS = 20_000
MAX_SAMPLE_CHARS = 60
TABLE_S = 5.0


def read_schema(name: str, driver: Driver, deadline_s: float) -> Schema:
    """Return what a database contains; blocks.

    Args:
        name: What it is called here.
        driver: How it is reached.
        deadline_s: When to stop, monotonic seconds.

    Raises:
        SQLAlchemyError: It does not answer, or not in time.
    """
    with driver.engine.connect() as connection:
        inspector = inspect(connection)
        names = sorted({*inspector.get_table_names(), *inspector.get_view_names()})
        found = [(one, inspector.get_columns(one)) for one in names]
        keys = {one: _keys(inspector, one) for one in names}
        comments = {one: _comment(inspector, one) for one in names}
        schemas = tuple(filter(None, [inspector.default_schema_name]))
    reader = _Reader(driver, deadline_s, names)
    tables = tuple(reader.table(one, columns, keys[one], comments[one]) for one, columns in found)
    return Schema(name=name, dialect=driver.dialect, tables=tables, schemas=schemas)


def _keys(inspector: Inspector, table: str) -> tuple[frozenset[str], tuple[ForeignKey, ...]]:
    primary = frozenset(inspector.get_pk_constraint(table).get("constrained_columns") or ())
    foreign = tuple(
        ForeignKey(
            columns=tuple(one["constrained_columns"]),
            table=one["referred_table"],
            target=tuple(one["referred_columns"]),
        )
        for one in inspector.get_foreign_keys(table)
    )
    return primary, foreign


def _comment(inspector: Inspector, table: str) -> str:
    try:
        return str(inspector.get_table_comment(table).get("text") or "")
    except NotImplementedError:
        return ""  # SQLite has none


class _Reader:
    """Reads what is in tables, each within a short time: a slow one only goes without samples.

    Args:
        driver: How the database is reached.
        deadline_s: When to stop looking, monotonic seconds.
        names: Every table.
    """

    def __init__(self, driver: Driver, deadline_s: float, names: list[str]) -> None:
        self._driver = driver
        self._deadline_s = deadline_s
        self._names = names
        self._quote = driver.engine.dialect.identifier_preparer.quote_identifier

    def table(
        self,
        name: str,
        columns: list[Any],
        keys: tuple[frozenset[str], tuple[ForeignKey, ...]],
        comment: str,
    ) -> Table:
        """Return a table with its columns, their frequent values, and its size."""
        primary, foreign = keys
        quoted = self._quote(name)
        with self._driver.engine.connect() as connection:
            until_s = min(self._deadline_s, time.monotonic() + TABLE_S)
            self._driver.prepare(connection, until_s, self._names)
            found = tuple(
                self._column(connection, quoted, one, primary, until_s) for one in columns
            )
            return Table(
                name=name,
                columns=found,
                foreign_keys=foreign,
                comment=comment,
                num_rows=_count(connection, quoted, until_s),
            )

    def _column(
        self,
        connection: Connection,
        table: str,
        described: Any,
        primary: frozenset[str],
        until_s: float,
    ) -> Column:
        samples = _samples(connection, table, self._quote(described["name"]), until_s)
        return Column(
            name=described["name"],
            type=str(described["type"]),
            comment=str(described.get("comment") or ""),
            samples=samples,
            is_key=described["name"] in primary,
            is_text=isinstance(described["type"], types.String | types.Enum),
            is_closed=0 < len(samples) < MAX_SAMPLES,
        )


def _samples(connection: Connection, table: str, column: str, until_s: float) -> tuple[str, ...]:
    """Return frequent values among a table's first rows; names are quoted already."""
    sql = (
        f"SELECT {column}, COUNT(*) AS n FROM "  # noqa: S608
        f"(SELECT {column} FROM {table} WHERE {column} IS NOT NULL LIMIT {SAMPLED_ROWS}) AS s "
        f"GROUP BY {column} ORDER BY n DESC, {column} LIMIT {MAX_SAMPLES}"
    )
    if time.monotonic() > until_s:
        return ()
    try:
        with connection.begin_nested():
            rows = connection.exec_driver_sql(sql).all()
    except SQLAlchemyError:
        return ()  # a type that cannot be grouped, or a view that is slow or fails
    return tuple(str(plain(row[0]))[:MAX_SAMPLE_CHARS] for row in rows)


def _count(connection: Connection, table: str, until_s: float) -> int:
    sql = f"SELECT COUNT(*) FROM (SELECT 1 FROM {table} LIMIT 1000000) AS s"  # noqa: S608
    if time.monotonic() > until_s:
        return -1
    try:
        with connection.begin_nested():
            return int(connection.exec_driver_sql(sql).scalar_one())
    except SQLAlchemyError:
        return -1
