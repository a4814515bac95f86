"""Workflows as data."""

import re
from pathlib import Path

import pytest

from services.text2sql.flow import definition as module
from services.text2sql.flow.definition import built_in, load_definition, parse_definition
from shared.domain.text2sql import STAGES
from shared.errors import ConfigError

STAGE = '[[stages]]\nname = "{}"\nprompts = ["p"]\n'


def test_the_example_in_the_documentation_is_valid():
    """The docstring that explains definitions can be used as it stands."""
    text = re.sub(r"^    ", "", module.__doc__ or "", flags=re.MULTILINE)
    found = parse_definition(text[text.index('name = "review"') :])
    assert found.parents(1) == (0,)
    assert found.answer_stage == "verdict"


def test_the_agents_workflow_uses_the_stages_that_were_measured():
    """The names on the mesh are those of the published traces, so that profiles hold."""
    text2sql = built_in()["text2sql"]
    assert {stage.mesh_stage for stage in text2sql.stages} == set(STAGES)
    bases = [text2sql.iteration_base(n) for n in range(len(text2sql.stages))]
    assert bases == [0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_the_second_workflow_is_a_graph_with_a_join():
    """Two branches start at once; the last stage waits for both."""
    review = built_in()["code-review"]
    assert [review.parents(n) for n in range(3)] == [(), (), (0, 1)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = ", "Invalid value"),
        ('name = "w"\nstages = []', "stages"),
        ('name = "w"\n' + STAGE.format("a") * 2, "defined twice"),
        ('name = "w"\n' + STAGE.format("a") + 'after = ["b"]', "no stage above"),
        ('name = "w"\n[[stages]]\nname = "a"', "needs prompts"),
        ('name = "w"\nanswer = "z"\n' + STAGE.format("a"), "no stage"),
        ('name = "w"\n' + STAGE.format("a") + "siblings = 0", "siblings"),
        ('name = "w"\n' + STAGE.format("a") + "sibling = 2", "sibling"),
        ('name = "a b"\n' + STAGE.format("a"), "name"),
    ],
)
def test_a_wrong_definition_is_told(text: str, told: str):
    """One sentence with the place."""
    with pytest.raises(ConfigError, match=told):
        parse_definition(text, "w.toml")


def test_a_missing_file_is_told(tmp_path: Path):
    """By its name."""
    with pytest.raises(ConfigError, match="No such file"):
        load_definition(tmp_path / "none.toml")
