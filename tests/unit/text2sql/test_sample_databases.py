"""The sample databases and the questions about them."""

from collections import Counter
from pathlib import Path

import pytest

from services.text2sql.samples.writing import (
    SAMPLES,
    read_questions,
    sample_file,
    sample_questions,
    write_sample,
)
from services.text2sql.sql.database import Database
from shared.errors import ConfigError
from tests.support.sample_tables import run_all

SIZES = {"bazaar": 20_000, "league": 3_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the samples lie."""
    return Path(tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_seed_gives_the_same_rows_of_a_realistic_size(name: str):
    """Ten tables and more, thousands of rows, the same in every run."""
    _, rows = SAMPLES[name]
    content = rows()
    assert content == rows()
    assert len(content) >= 10
    assert sum(map(len, content.values())) >= SIZES[name]


@pytest.mark.parametrize("name", sorted(SAMPLES))
async def test_every_gold_statement_answers_its_question(name: str, folder: Path):
    """It may run, gives rows with a value, and no two questions are the same."""
    questions = sample_questions(name).questions
    assert len(questions) >= 40
    for key in ("id", "question", "sql"):
        assert max(Counter(getattr(one, key) for one in questions).values()) == 1, key
    async with Database.open(name, sample_file(name, folder)) as database:
        for one in questions:
            rows = (await database.run(one.sql)).rows
            assert rows, one.id
            assert rows not in (((0,),), ((None,),)), one.id


@pytest.mark.real
@pytest.mark.parametrize("name", sorted(SAMPLES))
async def test_gold_statements_say_the_same_on_both_databases(
    name: str, folder: Path, postgres_server: str
):
    """SQLite and PostgreSQL, which order and divide differently, agree on every answer."""
    run_all(postgres_server, f"DROP DATABASE IF EXISTS {name}", f"CREATE DATABASE {name}")
    url = postgres_server.rpartition("/")[0] + f"/{name}"
    write_sample(name, url)
    async with (
        Database.open(name, sample_file(name, folder)) as first,
        Database.open(name, url) as second,
    ):
        for one in sample_questions(name).questions:
            found = [(await database.run(one.sql)).rows for database in (first, second)]
            assert [len(rows) for rows in found] == [len(found[0])] * 2, one.id
            for row, other in zip(*found, strict=True):
                assert row == pytest.approx(other), one.id


def test_a_sample_is_written_once_per_folder(folder: Path):
    """A second call finds the file."""
    first = sample_file("league", folder)
    written = (folder / "league.db").stat().st_mtime_ns
    assert sample_file("league", folder) == first
    assert (folder / "league.db").stat().st_mtime_ns == written


def test_unknown_samples_and_bad_question_files_are_told(tmp_path: Path):
    """Names what there is, or the place in the file."""
    with pytest.raises(ConfigError, match="bazaar, league"):
        sample_questions("shop")
    with pytest.raises(ConfigError, match="bazaar, league"):
        sample_file("shop", tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        read_questions(tmp_path / "none.toml")
    path = tmp_path / "bad.toml"
    path.write_text('database = "x"\n[[questions]]\nid = "1"\nquestion = "?"\n')
    with pytest.raises(ConfigError, match="sql"):
        read_questions(path)
    path = tmp_path / "good.json"
    path.write_text('{"database": "x", "questions": [{"id": "1", "question": "?", "sql": "s"}]}')
    assert read_questions(path).questions[0].sql == "s"
