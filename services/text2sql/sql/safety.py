"""Which SQL may run: one SELECT, made of allowed parts only, over known tables only.

The statement that runs is written anew from the syntax tree that was checked, without comments:
nothing runs that the check did not see. This is the first of several walls; behind it stand a
read-only connection, the database's own rights, a time limit, and caps on rows and bytes.
"""

import logging
from collections.abc import Collection

import msgspec
import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError

from services.text2sql.sql.allowed import FUNCTIONS, NODES, TYPES
from services.text2sql.sql.errors import SqlFailed, SqlRefused

MAX_SQL_CHARS = 20_000
MAX_NODES = 5_000
MAX_DEPTH = 200
_TOP = (exp.Select, exp.SetOperation, exp.Subquery)
_NAMED = (exp.Anonymous, exp.AnonymousAggFunc, exp.CombinedAggFunc)
_HIDDEN_NAMES = ("pg_", "sqlite_", "information_schema")


class SafeStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A statement that may run.

    Attributes:
        sql: Its text, written anew.
        tables: The tables it reads, in lower case.
        is_ordered: Whether its outermost query says in which order rows come.
    """

    sql: str
    tables: frozenset[str]
    is_ordered: bool


class SqlGate:
    """Checks statements of one database.

    Args:
        dialect: sqlglot's name of the SQL dialect.
        tables: Names of the tables and views that may be read.
        schemas: Names of the schemas that may be written before a table's name.
    """

    def __init__(
        self, dialect: str, tables: Collection[str], schemas: Collection[str] = ()
    ) -> None:
        # It warns about what it cannot parse, which is what this is here to find out.
        logging.getLogger("sqlglot").setLevel(logging.ERROR)
        self._dialect = dialect
        self._tables = frozenset(name.lower() for name in tables)
        self._schemas = frozenset(name.lower() for name in schemas)
        self._functions = FUNCTIONS[dialect]

    def check(self, sql: str) -> SafeStatement:
        """Return the statement to run.

        Raises:
            SqlRefused: It is none that may run; says why.
            SqlFailed: It is no SQL.
        """
        tree = self._parse(sql)
        tables: set[str] = set()
        for count, node in enumerate(tree.walk()):
            if count > MAX_NODES:
                raise SqlRefused("the statement is too complicated")
            self._check_node(node)
            if isinstance(node, exp.Table):
                name = self._check_table(node)
                if name:
                    tables.add(name)
        return SafeStatement(
            sql=self._write(tree),
            tables=frozenset(tables),
            is_ordered=tree.args.get("order") is not None,
        )

    def _parse(self, sql: str) -> exp.Expr:
        if len(sql) > MAX_SQL_CHARS:
            raise SqlRefused(f"the statement has more than {MAX_SQL_CHARS} characters")
        if "\x00" in sql:
            raise SqlRefused("the statement contains a null character")
        if _depth(sql) > MAX_DEPTH:
            raise SqlRefused("the statement is nested too deeply")
        try:
            statements = [one for one in sqlglot.parse(sql, read=self._dialect) if one is not None]
        except (SqlglotError, RecursionError) as exc:
            raise SqlFailed(f"syntax error: {_first_line(exc)}") from exc
        if len(statements) != 1:
            raise SqlRefused(f"exactly one statement is needed, these are {len(statements)}")
        tree = statements[0]
        if not isinstance(tree, _TOP):
            raise SqlRefused(f"only SELECT may run, this is {type(tree).__name__.upper()}")
        return tree

    def _check_node(self, node: exp.Expr) -> None:
        kind = type(node)
        if isinstance(node, _NAMED):
            name = node.name.lower()
            if name not in self._functions:
                raise SqlRefused(f"the function {name} may not be used")
        elif kind not in NODES:
            raise SqlRefused(f"{_word(kind)} may not be used")
        if kind is exp.DataType and node.this not in TYPES:
            raise SqlRefused(f"the type {node.sql(dialect=self._dialect)} may not be used")
        for extra in ("into", "locks", "hint", "sample", "kind", "laterals", "connect", "match"):
            if node.args.get(extra) and kind in (exp.Select, exp.Table, exp.Subquery):
                raise SqlRefused(f"{extra.upper()} may not be used")

    def _check_table(self, table: exp.Table) -> str:
        """Return the name of a real table in lower case; empty for a CTE."""
        if not isinstance(table.this, exp.Identifier):
            raise SqlRefused("functions may not be used as tables")
        name = table.name.lower()
        if table.args.get("catalog"):
            raise SqlRefused("other databases may not be read")
        if table.db:
            if table.db.lower() not in self._schemas:
                raise SqlRefused(f"the schema {table.db} may not be read")
        elif _is_cte(table):
            return ""
        if name.startswith(_HIDDEN_NAMES):
            raise SqlRefused(f"the table {table.name} may not be read")
        if name not in self._tables:
            raise SqlFailed(f"no such table: {table.name}")
        return name

    def _write(self, tree: exp.Expr) -> str:
        try:
            return tree.sql(
                dialect=self._dialect, comments=False, unsupported_level=ErrorLevel.RAISE
            )
        except (SqlglotError, RecursionError) as exc:
            raise SqlRefused(f"not {self._dialect} SQL: {_first_line(exc)}") from exc


def _is_cte(table: exp.Table) -> bool:
    """Return whether the name means a CTE there, as the databases resolve it.

    Of a WITH that is not recursive, a CTE sees only those before it; where this is not sure, the
    name counts as a real table's.
    """
    name = table.name.lower()
    inside: exp.Expr = table
    node: exp.Expr | None = table.parent
    while node is not None:
        if any(cte.alias.lower() == name for cte in _visible(node, inside)):
            return True
        inside, node = node, node.parent
    return False


def _visible(node: exp.Expr, inside: exp.Expr) -> list[exp.Expr]:
    """Return the CTEs that a node gives to the part of it that holds the name."""
    if isinstance(node, exp.With):
        ctes = list(node.expressions)
        if node.args.get("recursive"):
            return ctes
        return ctes[: next(n for n, cte in enumerate(ctes) if cte is inside)]
    clause = node.args.get("with_") or node.args.get("with")
    if isinstance(clause, exp.With) and clause is not inside:
        return list(clause.expressions)
    return []


def _depth(sql: str) -> int:
    """Return how deeply parentheses are nested, those in quotes included."""
    deepest = level = 0
    for char in sql:
        if char == "(":
            level += 1
            deepest = max(deepest, level)
        elif char == ")":
            level -= 1
    return deepest


def _word(kind: type[exp.Expr]) -> str:
    return kind.__name__.upper()


def _first_line(exc: BaseException) -> str:
    text = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
    return text.replace("\x1b[4m", "").replace("\x1b[0m", "")[:300]
