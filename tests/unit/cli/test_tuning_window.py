"""`hexflow tune`: where its window comes from and what it says."""

import json

import msgspec
import pytest
from typer.testing import CliRunner

from services.cli.tune import app, tune, tuned_json
from services.cli.tuning_window import events_text, is_window_file, read_events, window_of_events
from shared.domain.instance import InstanceSpec
from shared.errors import ConfigError
from shared.scheduling.tuning import TuningRules
from tests.support.scheduling import make_spec
from tests.support.tuning import query_events


@pytest.fixture
def fleet() -> tuple[InstanceSpec, ...]:
    """Two instances."""
    return (make_spec("a100-0"), make_spec("a100-1"))


def events(count: int = 40):
    """Return the events of ended queries, α 0.7 in force."""
    return [
        msgspec.structs.replace(event, alpha=0.7)
        for index in range(count)
        for event in query_events(f"q{index}", arrival_s=1_000.0 + 5.0 * index, latency_s=20.0)
    ]


def test_a_window_file_is_read_back_as_it_was_written(tmp_path):
    """One JSON object a line, told from a trace by its first line."""
    path = tmp_path / "window.jsonl"
    path.write_bytes(events_text(events()))
    assert is_window_file(path)
    assert read_events(path) == events()


def test_a_broken_line_is_named(tmp_path):
    """The third line is no event."""
    path = tmp_path / "window.jsonl"
    path.write_bytes(events_text(events(1))[:-1] + b'\n{"type":"latency_event"}\n')
    with pytest.raises(ConfigError, match="line 4"):
        read_events(path)


def test_a_window_holds_what_was_measured_and_the_alpha_in_force(fleet):
    """P95 of the judged queries, arrivals from zero on, the instances' shares."""
    window = window_of_events(events(), fleet, "test")
    assert window.alpha == 0.7
    assert window.queries[0].arrival_s == 0.0
    assert window.observed is not None
    assert window.observed.p95_s == 20.0
    assert window.observed.shares == {"a100-0": 1.0}


def test_no_ended_query_is_refused(fleet):
    """There is nothing to decide on."""
    with pytest.raises(ConfigError, match="no query has ended"):
        window_of_events([], fleet, "test")


def test_the_decision_comes_with_its_evidence(fleet):
    """Every α tried, the simulator's error, and what other settings would bring."""
    window = window_of_events(events(), fleet, "test")
    tuned = tune(window, fleet, current=0.7, rules=TuningRules(min_queries=10))
    content = tuned_json(tuned)
    json.dumps(content, allow_nan=False)
    assert content["current_alpha"] == 0.7
    assert {0.0, 0.7, 1.0} <= {run["alpha"] for run in content["runs"]}
    assert content["calibration_error"] is not None
    assert {other["setting"] for other in content["others"]} == {"admission", "max_batched_tokens"}


def test_the_command_prints_one_json_object_and_draws_a_plot(tmp_path):
    """On a window file, with the built-in fleet."""
    path = tmp_path / "window.jsonl"
    path.write_bytes(events_text(events()))
    done = CliRunner().invoke(app, [str(path), "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["queries"] == 40
    assert (tmp_path / "tune.png").stat().st_size > 10_000
