"""What `ask` and `eval` say of names that mean nothing."""

import pytest
from typer.testing import CliRunner

from services.cli.text2sql.ask import app
from services.cli.text2sql.evaluation import load_questions
from shared.errors import ConfigError


def test_a_name_like_a_sample_is_told_the_sample():
    """A question file that does not exist may be a sample's name with a slip."""
    with pytest.raises(ConfigError, match=r"leage: no such file.*did you mean league\?"):
        load_questions(["leage"])


def test_a_name_like_nothing_is_told_the_samples():
    """Whoever names nothing known learns what there is."""
    with pytest.raises(ConfigError, match=r"no sample \(bazaar, league\)$"):
        load_questions(["/nowhere/questions.toml"])


def test_a_missing_workflow_is_told_before_anything_starts():
    """The file is looked at before an engine is."""
    result = CliRunner().invoke(
        app, ["How many?", "--db", "league", "--workflow", "/nowhere/flow.toml"]
    )
    assert isinstance(result.exception, ConfigError)
    assert "/nowhere/flow.toml: No such file" in str(result.exception)
