"""Statements that nobody may run through the agent, and what must become of each.

`refused`: it never reaches the database. `contained`: it may reach it, and ends within limits,
whether with an error, a time-out or few rows.
"""
# ruff: noqa: RUF001, S608 - that is what they are for

BOTH = ("sqlite", "postgres")
SQLITE = ("sqlite",)
POSTGRES = ("postgres",)

_REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    # More than one statement, and ways to hide a second one.
    (BOTH, "SELECT 1; DROP TABLE orders"),
    (BOTH, "SELECT 1; SELECT 2"),
    (BOTH, "SELECT 1;; DELETE FROM orders;;"),
    (BOTH, "SELECT 1 /* ; */ ; /* */ DROP TABLE orders"),
    (BOTH, "SELECT 1 -- fine\n; DROP TABLE orders"),
    (BOTH, "SELECT ''''; DROP TABLE orders; --'"),
    (BOTH, "SELECT '\\'; DROP TABLE orders; --'"),
    (BOTH, 'SELECT ";"; DROP TABLE orders'),
    (POSTGRES, "SELECT $$a$$; DROP TABLE orders"),
    (POSTGRES, "SELECT $tag$;$tag$; DROP TABLE orders"),
    (POSTGRES, "SELECT E'\\''; DROP TABLE orders; --'"),
    (BOTH, "SELECT 1\x00; DROP TABLE orders"),
    # Writing.
    (BOTH, "DROP TABLE orders"),
    (BOTH, "DELETE FROM orders"),
    (BOTH, "UPDATE orders SET total = 0"),
    (BOTH, "INSERT INTO orders SELECT * FROM orders"),
    (BOTH, "CREATE TABLE x AS SELECT * FROM orders"),
    (BOTH, "ALTER TABLE orders ADD COLUMN x TEXT"),
    (BOTH, "CREATE TEMP TABLE x (a INT)"),
    (BOTH, "TRUNCATE TABLE orders"),
    (SQLITE, "REPLACE INTO orders SELECT * FROM orders"),
    (POSTGRES, "SELECT * INTO x FROM orders"),
    (POSTGRES, "WITH gone AS (DELETE FROM orders RETURNING *) SELECT * FROM gone"),
    (POSTGRES, "WITH n AS (INSERT INTO orders VALUES (9) RETURNING id) SELECT * FROM n"),
    (POSTGRES, "SELECT * FROM orders FOR UPDATE"),
    (POSTGRES, "MERGE INTO orders USING customers ON true WHEN MATCHED THEN DELETE"),
    # Files, the network, other databases.
    (SQLITE, "ATTACH DATABASE '/tmp/other.db' AS other"),
    (SQLITE, "ATTACH ':memory:' AS m"),
    (SQLITE, "VACUUM INTO '/tmp/copy.db'"),
    (SQLITE, "SELECT load_extension('/tmp/evil.so')"),
    (SQLITE, "SELECT readfile('/etc/passwd')"),
    (SQLITE, "SELECT writefile('/tmp/x', 'y')"),
    (SQLITE, "SELECT edit('x')"),
    (POSTGRES, "COPY orders TO '/tmp/x'"),
    (POSTGRES, "COPY orders TO PROGRAM 'sh -c id'"),
    (POSTGRES, "COPY (SELECT 1) TO STDOUT"),
    (POSTGRES, "SELECT pg_read_file('/etc/passwd')"),
    (POSTGRES, "SELECT PG_READ_BINARY_FILE('/etc/passwd')"),
    (POSTGRES, "SELECT \"pg_read_file\"('/etc/passwd')"),
    (POSTGRES, "SELECT pg_catalog.pg_read_file('/etc/passwd')"),
    (POSTGRES, "SELECT pg_ls_dir('/')"),
    (POSTGRES, "SELECT * FROM pg_ls_dir('/') AS f"),
    (POSTGRES, "SELECT lo_import('/etc/passwd')"),
    (POSTGRES, "SELECT lo_export(1, '/tmp/x')"),
    (POSTGRES, "SELECT dblink('host=evil', 'SELECT 1')"),
    (POSTGRES, "SELECT query_to_xml('DELETE FROM orders RETURNING 1', true, true, '')"),
    (POSTGRES, "SELECT U&\"\\0070g_read_file\"('/etc/passwd')"),
    (BOTH, "SELECT * FROM other.orders"),
    # Settings, sessions, code.
    (SQLITE, "PRAGMA writable_schema = ON"),
    (SQLITE, "SELECT * FROM pragma_table_info('orders')"),
    (SQLITE, "SELECT * FROM pragma_database_list"),
    (POSTGRES, "SET TRANSACTION READ WRITE"),
    (POSTGRES, "SET statement_timeout = 0"),
    (POSTGRES, "RESET ALL"),
    (POSTGRES, "SELECT set_config('transaction_read_only', 'off', false)"),
    (POSTGRES, "SELECT pg_terminate_backend(pid) FROM orders"),
    (POSTGRES, "SELECT pg_sleep(60)"),
    (POSTGRES, "SELECT pg_advisory_lock(1)"),
    (POSTGRES, "SELECT nextval('orders_id_seq')"),
    (POSTGRES, "SELECT setval('x', 1)"),
    (POSTGRES, "DO $$ BEGIN DELETE FROM orders; END $$"),
    (POSTGRES, "CALL proc()"),
    (POSTGRES, "PREPARE p AS DELETE FROM orders"),
    (POSTGRES, "EXECUTE p"),
    (POSTGRES, "LISTEN x"),
    (POSTGRES, "LOCK TABLE orders"),
    (POSTGRES, "CREATE FUNCTION f() RETURNS int AS 'SELECT 1' LANGUAGE sql"),
    (BOTH, "EXPLAIN SELECT 1"),
    (POSTGRES, "EXPLAIN ANALYZE DELETE FROM orders"),
    (BOTH, "BEGIN"),
    (BOTH, "COMMIT"),
    (BOTH, "ROLLBACK"),
    # Catalogues, and names that only seem to be tables of the statement itself.
    (SQLITE, "SELECT * FROM sqlite_master"),
    (SQLITE, "SELECT * FROM main.sqlite_schema"),
    (POSTGRES, "SELECT * FROM pg_shadow"),
    (POSTGRES, "SELECT * FROM pg_catalog.pg_authid"),
    (POSTGRES, "SELECT * FROM information_schema.tables"),
    (POSTGRES, "WITH x AS (SELECT * FROM pg_shadow), pg_shadow AS (SELECT 1) SELECT * FROM x"),
    (POSTGRES, "SELECT 'pg_shadow'::regclass"),
    (POSTGRES, "SELECT current_setting('data_directory')"),
    (POSTGRES, "SELECT version(), inet_server_addr()"),
    # Bombs that need no time to grow.
    (BOTH, "SELECT " + "(" * 5_000 + "1" + ")" * 5_000),
    (BOTH, "SELECT " + " + ".join(["1"] * 9_000)),
    (SQLITE, "SELECT zeroblob(1000000000)"),
    (SQLITE, "SELECT printf('%1000000000d', 1)"),
    (POSTGRES, "SELECT repeat('x', 1000000000)"),
    (POSTGRES, "SELECT lpad('x', 1000000000)"),
    (POSTGRES, "SELECT * FROM generate_series(1, 1000000000000)"),
    # Unicode that looks like something else.
    (BOTH, "ＤＥＬＥＴＥ FROM orders"),
    (BOTH, "SELECT 1；DROP TABLE orders"),
    (BOTH, "DROP\u00a0TABLE orders"),
    (BOTH, "SELECT * FROM orders WHERE name = 'x\u02bc; DROP TABLE orders; --"),
)
_BOMB = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
_CROSS = ", ".join(f"orders o{n}" for n in range(30))
_CONTAINED: tuple[tuple[tuple[str, ...], str], ...] = (
    (BOTH, _BOMB + "SELECT count(*) FROM n"),
    (BOTH, _BOMB + "SELECT i FROM n"),
    (BOTH, _BOMB + "SELECT i FROM n ORDER BY i DESC LIMIT 1"),
    (BOTH, "WITH RECURSIVE n(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM n) SELECT s FROM n"),
    (BOTH, f"SELECT count(*) FROM {_CROSS}"),
    (BOTH, f"SELECT o0.id FROM {_CROSS}"),
    (BOTH, f"SELECT count(DISTINCT o1.note || o2.note || o3.note) FROM {_CROSS}"),
    (SQLITE, "SELECT hex(replace(hex(name), '4', hex(name || name || name))) FROM customers"),
    (BOTH, "SELECT note FROM orders WHERE note LIKE '%" + "%_" * 400 + "%'"),
    (BOTH, "SELECT name FROM customers WHERE id = 3"),
    (BOTH, "SELECT note FROM orders WHERE id = 3"),
    (BOTH, "SELECT 'DROP TABLE orders; --' AS harmless"),
    (BOTH, "SELECT '; DELETE FROM orders' || name FROM customers /* ; DROP TABLE orders */"),
    (BOTH, 'SELECT 1 AS "; DROP TABLE orders; --"'),
)
CASES = [
    (dialect, sql, fate)
    for fate, group in (("refused", _REFUSED), ("contained", _CONTAINED))
    for dialects, sql in group
    for dialect in dialects
]
"""(dialect, statement, fate)"""
