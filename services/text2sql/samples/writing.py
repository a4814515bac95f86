"""Writes sample databases, and reads question files."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import MetaData, create_engine
from sqlalchemy.engine import make_url

from services.text2sql.samples import bazaar, league
from shared.errors import ConfigError

Rows = dict[str, list[dict[str, Any]]]
SAMPLES: dict[str, tuple[MetaData, Callable[[], Rows]]] = {
    "bazaar": (bazaar.META, bazaar.rows),
    "league": (league.META, league.rows),
}


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question of a file.

    Attributes:
        id: Unique within the file.
        question: What is asked.
        sql: The SQL that answers it.
        hint: Further knowledge given with the question.
        database: Name of the database; empty: the file's.
        faults: How the scripted model's first candidates are wrong: one word per candidate and
            version, versions of a candidate joined by `+`; see `scripted`.
    """

    id: str
    question: str
    sql: str
    hint: str = ""
    database: str = ""
    faults: tuple[str, ...] = ()


class QuestionFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of questions.

    Attributes:
        database: Name of the sample database, or address, that they are about.
        questions: In order.
    """

    database: str
    questions: tuple[Question, ...]


def write_sample(name: str, url: str) -> None:
    """Write a sample database, replacing tables of the same names.

    Args:
        name: `bazaar` or `league`.
        url: Where; its user must be allowed to create tables.

    Raises:
        ConfigError: There is no sample of that name.
    """
    if name not in SAMPLES:
        raise ConfigError(f"no sample database {name!r}; there are: {', '.join(sorted(SAMPLES))}")
    meta, rows = SAMPLES[name]
    content = rows()
    address = make_url(url)
    if address.drivername in ("postgresql", "postgres"):
        address = address.set(drivername="postgresql+psycopg")
    engine = create_engine(address)
    try:
        with engine.begin() as connection:
            meta.drop_all(connection)
            meta.create_all(connection)
            for table in meta.sorted_tables:
                connection.execute(table.insert(), content[table.name])
    finally:
        engine.dispose()


def sample_file(name: str, folder: Path) -> str:
    """Return the address of a sample as a SQLite file, written once per folder.

    Args:
        name: `bazaar` or `league`.
        folder: Where it lies; created when missing.

    Raises:
        ConfigError: There is no sample of that name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.db"
    if not path.exists():
        fresh = path.with_suffix(".part")
        fresh.unlink(missing_ok=True)
        write_sample(name, f"sqlite:///{fresh}")
        fresh.rename(path)
    return f"sqlite:///{path}"


def read_questions(path: Path) -> QuestionFile:
    """Return the questions of a TOML or JSON file.

    Raises:
        ConfigError: It cannot be read; names the place.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text)
        return msgspec.convert(raw, QuestionFile)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    except (ValueError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def sample_questions(name: str) -> QuestionFile:
    """Return the questions about a sample.

    Raises:
        ConfigError: There is no sample of that name.
    """
    if name not in SAMPLES:
        raise ConfigError(f"no sample database {name!r}; there are: {', '.join(sorted(SAMPLES))}")
    return read_questions(Path(__file__).with_name(f"{name}.toml"))
