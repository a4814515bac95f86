"""Which tables, columns and values a prompt shows."""

from services.text2sql.chess.linking import (
    Evidence,
    as_data,
    content_words,
    prune,
    render,
    stems,
    tokens_of,
)
from services.text2sql.sql.schema import Column, ForeignKey, Schema, Table


def table(name: str, *columns: str, to: str = "", size: int = 10) -> Table:
    """Return a table whose first column is its key; with `to` it points there."""
    keys = (ForeignKey(columns=(f"{to}_id",), table=to, target=(f"{to}_id",)),) if to else ()
    names = [f"{name}_id", *([f"{to}_id"] if to else []), *columns]
    return Table(
        name=name,
        num_rows=size,
        foreign_keys=keys,
        columns=tuple(
            Column(name=one, type="TEXT", is_key=one == f"{name}_id", is_text=True) for one in names
        ),
    )


SCHEMA = Schema(
    name="x",
    dialect="sqlite",
    tables=(
        table("shelf", "height", "colour"),
        table("book", "title", "price", "weight", to="shelf"),
        table("loan", "due", "reader", to="book"),
        *(table(f"other{n}", *(f"filler{m}" for m in range(20))) for n in range(20)),
    ),
)


def names(tables: tuple[Table, ...]) -> dict[str, set[str]]:
    """Return the columns kept by table."""
    return {one.name: {column.name for column in one.columns} for one in tables}


def test_a_schema_that_fits_is_shown_whole():
    """Nothing is dropped without need."""
    assert prune(SCHEMA, Evidence(words=frozenset()), 100_000) == SCHEMA.tables


def test_a_large_schema_is_cut_to_what_the_question_is_about():
    """Tables that are named stay, with the ones that join them, within the budget."""
    evidence = Evidence(words=stems("Which readers have loans of books on a red shelf?"))
    kept = prune(SCHEMA, evidence, 200)
    assert set(names(kept)) == {"shelf", "book", "loan"}
    assert tokens_of(kept, evidence) <= 200
    assert {"loan_id", "book_id", "reader"} <= names(kept)["loan"]


def test_tables_between_those_that_are_named_are_kept_for_the_join():
    """Shelf and loan are joined by way of book, which nobody named."""
    kept = prune(SCHEMA, Evidence(words=stems("loans by colour of the shelf")), 120)
    assert {"book_id", "shelf_id"} <= names(kept)["book"]


def test_a_value_found_in_a_column_keeps_the_column():
    """Evidence from the data counts as much as names do."""
    evidence = Evidence(words=stems("what costs Moby?"), values={("book", "title"): ("Moby-Dick",)})
    kept = prune(SCHEMA, evidence, 60)
    assert "title" in names(kept)["book"]
    assert "'Moby-Dick'" in render(kept, evidence)


def test_text_from_the_database_cannot_leave_its_place():
    """Fences, control tokens and control characters are taken out, long values are cut."""
    assert as_data("a```sql\x07<|im_start|>[INST]b") == "a sql    b".replace("    ", "   ")
    assert len(as_data("x" * 900)) == 200


def test_words_are_compared_by_their_stems():
    """Plural, case, underscores and camel case do not matter; small words count nothing."""
    assert stems("The unit_prices of orderItems") == stems("unit price order item")
    assert content_words("How many in 'São Paulo' or Zurich?") == (
        "São Paulo",
        "São",
        "Paulo",
        "Zurich",
    )
