"""Hostile SQL on real databases: refused or contained, and nothing changes."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError

from services.text2sql.sql.database import Database
from services.text2sql.sql.drivers import Limits, open_driver
from services.text2sql.sql.errors import SqlError, SqlFailed, SqlRefused, SqlTimedOut
from shared.errors import ConfigError
from tests.support.hostile_sql import CASES
from tests.support.sample_tables import (
    fingerprint,
    make_postgres,
    make_sqlite,
    run_all,
)

LIMITS = Limits(timeout_s=1.0, max_rows=50, max_bytes=20_000)
WRITES = (
    "DELETE FROM orders",
    "UPDATE customers SET name = 'x'",
    "INSERT INTO customers (id, name) VALUES (9, 'x')",
    "CREATE TABLE x (a INTEGER)",
    "DROP TABLE orders",
)


@pytest.fixture(scope="module")
def sqlite_url(tmp_path_factory) -> str:
    """A SQLite file."""
    return make_sqlite(tmp_path_factory.mktemp("hostile") / "shop.db")


@pytest.fixture(scope="module")
def postgres_url(postgres_server: str) -> str:
    """A database whose user may do everything, which is the worst case."""
    return make_postgres(postgres_server)


@pytest.fixture
def url(request, dialect: str) -> str:
    """The database of the dialect under test."""
    return str(request.getfixturevalue(f"{dialect}_url"))


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    """The database as the agent opens it."""
    async with Database.open("shop", url, LIMITS) as opened:
        yield opened


def test_the_suite_is_as_large_as_it_says():
    """Sixty cases and more, on both databases."""
    assert len({sql for _, sql, _ in CASES}) >= 60
    assert min(sum(one == d for one, *_ in CASES) for d in ("sqlite", "postgres")) >= 45


@pytest.mark.parametrize(
    "dialect",
    ["sqlite", pytest.param("postgres", marks=pytest.mark.real)],
)
async def test_hostile_statements_are_refused_or_contained(
    dialect: str, database: Database, url: str
):
    """Every case ends within its time and caps; the database is the same, byte for byte."""
    before = fingerprint(url)
    wrong = []
    for _, sql, fate in [case for case in CASES if case[0] == dialect]:
        try:
            rows = await database.run(sql)
        except (SqlRefused, SqlFailed) as exc:
            if fate == "refused" and isinstance(exc, SqlFailed):
                # Not SQL at all, or an unknown table: found before the database saw it.
                with pytest.raises(SqlError):
                    database.check(sql)
        except SqlTimedOut:
            assert fate == "contained", sql[:200]
        else:
            if fate == "refused":
                wrong.append(sql[:200])
            assert len(rows.rows) <= LIMITS.max_rows
    assert wrong == []
    assert fingerprint(url) == before


@pytest.mark.parametrize(
    "dialect",
    ["sqlite", pytest.param("postgres", marks=pytest.mark.real)],
)
@pytest.mark.parametrize("sql", WRITES)
def test_a_write_that_passed_the_check_would_still_fail(dialect: str, url: str, sql: str):
    """Behind the check stands a connection that cannot write."""
    del dialect
    before = fingerprint(url)
    driver = open_driver(url, LIMITS)
    try:
        with driver.engine.connect() as connection:
            driver.prepare(connection, time.monotonic() + 5, ["orders", "customers"])
            with pytest.raises(DBAPIError):
                connection.exec_driver_sql(sql)
    finally:
        driver.engine.dispose()
    assert fingerprint(url) == before


@pytest.mark.real
def test_a_write_that_happened_would_be_seen(postgres_server: str):
    """The fingerprint of an untouched database stays, and that of a rewritten row does not."""
    url = make_postgres(postgres_server)
    before = fingerprint(url)
    assert fingerprint(url) == before
    run_all(url, "UPDATE orders SET note = note WHERE id = 1")
    assert fingerprint(url) != before


async def test_sqlite_asks_again_what_the_statement_does(sqlite_url: str):
    """The authorizer denies functions and tables that the syntax check would have let pass."""
    driver = open_driver(sqlite_url, LIMITS)
    with driver.engine.connect() as connection:
        driver.prepare(connection, time.monotonic() + 5, ["orders"])
        for sql in (
            "SELECT load_extension('x')",
            "SELECT * FROM sqlite_master",
            "SELECT * FROM customers",
            "SELECT * FROM pragma_table_info('orders')",
            "ATTACH ':memory:' AS m",
            "PRAGMA query_only = OFF",
        ):
            with pytest.raises(DBAPIError):
                connection.exec_driver_sql(sql)
        assert connection.exec_driver_sql("SELECT count(*) FROM orders").scalar_one() == 3
    driver.engine.dispose()


@pytest.mark.parametrize(
    "dialect",
    ["sqlite", pytest.param("postgres", marks=pytest.mark.real)],
)
async def test_cancellation_kills_the_running_statement(dialect: str, url: str):
    """A cancelled caller waits until the database has stopped, and the next statement runs."""
    del dialect
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    async with Database.open("shop", url, Limits(timeout_s=120.0)) as database:
        task = asyncio.create_task(database.run(endless), name="endless")
        await asyncio.sleep(0.3)
        task.cancel()
        began_s = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began_s < 60.0  # and not 120: it was stopped
        assert (await database.run("SELECT count(*) AS n FROM orders")).rows == ((3,),)


@pytest.mark.parametrize(
    "dialect",
    ["sqlite", pytest.param("postgres", marks=pytest.mark.real)],
)
async def test_ordinary_questions_are_answered(dialect: str, database: Database):
    """The walls let through what analysts ask, with plain values and honest caps."""
    del dialect
    rows = await database.run(
        "WITH per AS (SELECT customer_id, SUM(total) AS spent FROM orders GROUP BY customer_id) "
        "SELECT c.name, per.spent, c.city FROM per JOIN customers c ON c.id = per.customer_id "
        "ORDER BY per.spent DESC -- the best first"
    )
    assert rows.columns == ("name", "spent", "city")
    assert rows.rows == (("Ada", 30.5, "Bern"), ("Bob", 5.25, "ZÜRICH"))
    assert rows.is_ordered
    assert not rows.is_truncated
    assert "--" not in rows.sql
    capped = await database.run("SELECT a.id FROM orders a, orders b, orders c, orders d")
    assert (len(capped.rows), capped.is_truncated) == (50, True)
    assert not capped.is_ordered
    counted = await database.run(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10) "
        "SELECT count(*) FROM n"
    )
    assert counted.rows == ((10,),)
    wide = await database.run("SELECT 'a%d', 100 % 7, ':x' FROM orders WHERE note LIKE '%<|%'")
    assert wide.rows == (("a%d", 2, ":x"),)


@pytest.mark.parametrize(
    "dialect",
    ["sqlite", pytest.param("postgres", marks=pytest.mark.real)],
)
async def test_the_schema_is_read_with_keys_and_typical_values(dialect: str, database: Database):
    """Tables, types, keys, samples and, where there are any, comments."""
    customers, orders = database.schema.tables
    assert (customers.name, customers.num_rows, orders.num_rows) == ("customers", 3, 3)
    assert [column.name for column in customers.columns] == ["id", "name", "city", "secret"]
    city = customers.column("CITY")
    assert city is not None
    assert city.samples == ("Bern", "ZÜRICH")
    assert city.is_text
    (key,) = orders.foreign_keys
    assert (key.columns, key.table, key.target) == (("customer_id",), "customers", ("id",))
    if dialect == "postgres":
        total = orders.column("total")
        assert total is not None
        assert (customers.comment, total.comment) == ("people who buy", "in francs")
    assert await database.texts_like("customers", "city", ["zür"], limit=3) in ((), ("ZÜRICH",))
    assert await database.texts_like("customers", "city", ["ern", "x'; --"], limit=3) == ("Bern",)


async def test_a_view_that_never_ends_only_goes_without_samples(tmp_path: Path):
    """The rest of the schema is read; the view can be asked, and is stopped in time."""
    url = make_sqlite(tmp_path / "slow.db")
    with sqlite3.connect(tmp_path / "slow.db") as connection:
        connection.execute(
            "CREATE VIEW endless AS WITH RECURSIVE n(i) AS "
            "(SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) AS most FROM n"
        )
    connection.close()
    async with Database.open("slow", url, LIMITS) as database:
        view = database.schema.table("endless")
        assert view is not None
        assert (view.num_rows, view.columns[0].samples) == (-1, ())
        assert database.schema.table("orders") is not None
        with pytest.raises(SqlTimedOut):
            await database.run("SELECT most FROM endless")


@pytest.mark.real
async def test_a_user_with_few_rights_suffices(postgres_url: str, postgres_server: str):
    """A role that may only read one table sees that table and answers from it."""
    run_all(
        postgres_url,
        "DROP ROLE IF EXISTS hexflow_reader",
        "CREATE ROLE hexflow_reader LOGIN PASSWORD 'reader'",
        "GRANT SELECT ON orders TO hexflow_reader",
    )
    address = postgres_url.replace("//tests@", "//hexflow_reader:reader@")
    if address == postgres_url:
        pytest.skip("the named server has another user")
    async with Database.open("shop", address, LIMITS) as database:
        assert (await database.run("SELECT count(*) FROM orders")).rows == ((3,),)
        with pytest.raises(SqlError, match=r"permission|not authorized"):
            await database.run("SELECT name FROM customers")
    run_all(postgres_url, "DROP OWNED BY hexflow_reader", "DROP ROLE hexflow_reader")
    assert postgres_server


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("nonsense", "sqlite:///FILE"),
        ("mysql://u@h/d", "not supported"),
        ("sqlite:////no/such/file.db", "no SQLite database"),
        ("postgresql://u:secret@127.0.0.1:1/d", "cannot be read"),
    ],
)
async def test_a_wrong_address_is_told_without_its_password(address: str, told: str):
    """Each is one sentence for people."""
    with pytest.raises(ConfigError, match=told) as caught:
        async with Database.open("shop", address):
            pass
    assert "secret" not in str(caught.value)


async def test_a_file_that_is_no_database_is_told(tmp_path: Path):
    """SQLite's own words, in one sentence."""
    path = tmp_path / "x.db"
    path.write_text("this is no database " * 100)
    with pytest.raises(ConfigError, match="not a database"):
        async with Database.open("shop", f"sqlite:///{path}"):
            pass
