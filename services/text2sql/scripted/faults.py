"""Ways in which a statement can be wrong, made from the right one."""
# ruff: noqa: S608 - wrong SQL is what it makes

from collections.abc import Callable

import sqlglot
from sqlglot import exp

RIGHT = "right"
PROSE = "The number can be found by looking into the table and counting what fits."


def faulty(sql: str, fault: str) -> str:
    """Return an answer with a fault.

    Args:
        sql: The right statement.
        fault: `right` (none), `column`, `table`, `syntax` (cannot run), `empty` (gives no rows),
            `silent` (gives wrong rows), `prose` (is no SQL) or `hostile` (may not run).

    Raises:
        ValueError: There is no such fault.
    """
    if fault not in _FAULTS:
        raise ValueError(f"no fault {fault!r}; there are: {', '.join(sorted(_FAULTS))}")
    return " ".join(_FAULTS[fault](sql).split())


def _column(sql: str) -> str:
    tree = sqlglot.parse_one(sql, read="sqlite")
    column = tree.find(exp.Column)
    if column is None:  # COUNT(*) and nothing else
        return f"SELECT missing_column FROM ({sql}) AS q"
    column.this.set("this", f"{column.name}_x")
    return tree.sql(dialect="sqlite")


def _table(sql: str) -> str:
    tree = sqlglot.parse_one(sql, read="sqlite")
    table = tree.find(exp.Table)
    if table is not None:
        table.this.set("this", f"all_{table.name}")
    return tree.sql(dialect="sqlite")


def _silent(sql: str) -> str:
    tree = sqlglot.parse_one(sql, read="sqlite")
    if tree.args.get("where") is not None:
        tree.set("where", None)
        return tree.sql(dialect="sqlite")
    return f"SELECT * FROM ({sql}) AS q UNION ALL SELECT * FROM ({sql}) AS r"


_FAULTS: dict[str, Callable[[str], str]] = {
    RIGHT: lambda sql: sql,
    "column": _column,
    "table": _table,
    "silent": _silent,
    "syntax": lambda sql: sql.replace("FROM", "FORM", 1),
    "empty": lambda sql: f"SELECT * FROM ({sql}) AS q WHERE 1 = 0",
    "prose": lambda _: PROSE,
    "hostile": lambda sql: f"DELETE FROM {_first_table(sql)}",
}


def _first_table(sql: str) -> str:
    table = sqlglot.parse_one(sql, read="sqlite").find(exp.Table)
    return table.name if table is not None else "customers"
