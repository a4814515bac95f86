"""Reads a database's schema: tables, columns, keys, comments, and the values that are typical."""

from typing import Any

from sqlalchemy import Connection, Inspector, inspect, types
from sqlalchemy.exc import SQLAlchemyError

from services.text2sql.sql.cells import plain
from services.text2sql.sql.drivers import Driver
from services.text2sql.sql.schema import Column, ForeignKey, Schema, Table

MAX_SAMPLES = 12
SAMPLED_ROWS = 20_000
MAX_SAMPLE_CHARS = 60


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
    with driver.engine.connect() as connection:
        driver.prepare(connection, deadline_s, names)
        tables = tuple(
            _table(connection, one, columns, keys[one], comments[one]) for one, columns in found
        )
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


def _table(
    connection: Connection,
    name: str,
    columns: list[Any],
    keys: tuple[frozenset[str], tuple[ForeignKey, ...]],
    comment: str,
) -> Table:
    primary, foreign = keys
    quote = connection.dialect.identifier_preparer.quote_identifier
    return Table(
        name=name,
        columns=tuple(_column(connection, quote(name), one, primary) for one in columns),
        foreign_keys=foreign,
        comment=comment,
        num_rows=_count(connection, quote(name)),
    )


def _column(connection: Connection, table: str, described: Any, primary: frozenset[str]) -> Column:
    quote = connection.dialect.identifier_preparer.quote_identifier
    samples = _samples(connection, table, quote(described["name"]))
    return Column(
        name=described["name"],
        type=str(described["type"]),
        comment=str(described.get("comment") or ""),
        samples=samples,
        is_key=described["name"] in primary,
        is_text=isinstance(described["type"], types.String | types.Enum),
        is_closed=0 < len(samples) < MAX_SAMPLES,
    )


def _samples(connection: Connection, table: str, column: str) -> tuple[str, ...]:
    """Return frequent values among a table's first rows; names are quoted already."""
    sql = (
        f"SELECT {column}, COUNT(*) AS n FROM "  # noqa: S608
        f"(SELECT {column} FROM {table} WHERE {column} IS NOT NULL LIMIT {SAMPLED_ROWS}) AS s "
        f"GROUP BY {column} ORDER BY n DESC, {column} LIMIT {MAX_SAMPLES}"
    )
    try:
        with connection.begin_nested():
            rows = connection.exec_driver_sql(sql).all()
    except SQLAlchemyError:
        return ()  # a type that cannot be grouped, or a view that fails
    return tuple(str(plain(row[0]))[:MAX_SAMPLE_CHARS] for row in rows)


def _count(connection: Connection, table: str) -> int:
    try:
        with connection.begin_nested():
            sql = f"SELECT COUNT(*) FROM (SELECT 1 FROM {table} LIMIT 1000000) AS s"  # noqa: S608
            return int(connection.exec_driver_sql(sql).scalar_one())
    except SQLAlchemyError:
        return -1
