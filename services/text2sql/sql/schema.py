"""What is known of a database: tables, columns, keys, sample values."""

import msgspec


class ForeignKey(msgspec.Struct, frozen=True, kw_only=True):
    """Columns that point to another table's.

    Attributes:
        columns: Here.
        table: Name of the other table.
        target: Its columns.
    """

    columns: tuple[str, ...]
    table: str
    target: tuple[str, ...]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column.

    Attributes:
        name: Its name as the database spells it.
        type: Its type as the database spells it.
        comment: What its owner says of it; empty: nothing.
        samples: Some of its values as text, most frequent first.
        is_key: Whether it belongs to the primary key.
        is_text: Whether it holds text, so that questions may name its values.
        is_closed: Whether `samples` are all of its values.
    """

    name: str
    type: str
    comment: str = ""
    samples: tuple[str, ...] = ()
    is_key: bool = False
    is_text: bool = False
    is_closed: bool = False


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One table or view.

    Attributes:
        name: Its name as the database spells it.
        columns: In the database's order.
        foreign_keys: Where it points to.
        comment: What its owner says of it.
        num_rows: How many rows it has, as far as known; -1: not known.
    """

    name: str
    columns: tuple[Column, ...]
    foreign_keys: tuple[ForeignKey, ...] = ()
    comment: str = ""
    num_rows: int = -1

    def column(self, name: str) -> Column | None:
        """Return a column by its name in any case."""
        found = (one for one in self.columns if one.name.lower() == name.lower())
        return next(found, None)


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """A whole database.

    Attributes:
        name: What it is called here.
        dialect: sqlglot's name of its SQL dialect.
        tables: By name.
        schemas: Schemas whose names may be written before a table's.
    """

    name: str
    dialect: str
    tables: tuple[Table, ...]
    schemas: tuple[str, ...] = ()

    def table(self, name: str) -> Table | None:
        """Return a table by its name in any case."""
        return next((one for one in self.tables if one.name.lower() == name.lower()), None)
