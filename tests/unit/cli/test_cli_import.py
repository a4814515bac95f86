"""`hexflow import`: what it writes where, and how it fails."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.import_trace import app
from shared.errors import ConfigError
from shared.simulation.trace_file import parse_trace

DATA = Path(__file__).parents[2] / "data"


def run(*arguments: object):
    """Run the command; its errors are raised as the entry point would see them."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(("name", "num"), [("calls.csv", 6), ("otel_spans.jsonl", 8)])
def test_the_form_of_the_input_is_told_from_its_content(name, num):
    """Stdout carries the trace and nothing else; the summary goes to stderr."""
    result = run(DATA / name)
    assert len(parse_trace(result.stdout)) == num
    assert f"{num} queries" in result.stderr
    assert "unusable: 1" in result.stderr


def test_json_gives_the_summary_with_every_problem(tmp_path):
    """With --json the trace goes to a file and stdout is one object."""
    target = tmp_path / "trace.jsonl"
    result = run(DATA / "calls.csv", "-o", target, "--json")
    summary = json.loads(result.stdout)
    assert summary["num_calls"] == 30
    assert summary["problems"][0]["place"].endswith("calls.csv:10")
    assert len(parse_trace(target.read_text())) == summary["num_queries"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calls.csv", "--json"], "give the trace a file"),
        (["calls.csv", "--strict"], "calls.csv:10: input_tokens"),
        (["calls.csv", "--format", "parquet"], "known are auto, csv, otel"),
        (["missing.csv"], "cannot be read"),
        (["calls.csv", "-o", "/nowhere/at/all"], "cannot be written"),
    ],
)
def test_what_a_person_must_change_is_said(arguments, message):
    """Each is a ConfigError, so the command exits with 2 and one line."""
    with pytest.raises(ConfigError, match=message):
        run(DATA / arguments[0], *arguments[1:])


def test_options_reach_the_import(tmp_path):
    """The model put over all, and inference of prefixes switched off."""
    target = tmp_path / "trace.jsonl"
    run(DATA / "otel_spans.jsonl", "-o", target, "--model", "default", "--no-prefixes")
    queries = parse_trace(target.read_text())
    assert {query.model for query in queries} == {"default"}
    assert all(not c.prefix for query in queries for s in query.stages for c in s.calls)
