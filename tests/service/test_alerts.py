"""promtool evaluates the rules on series that cause each alert, and on calm ones."""

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support.promtool import promtool_program
from tests.support.servers import MissingServerError, do_without

pytestmark = pytest.mark.slow
RULES = Path(__file__).parents[2] / "k8s/hexflow/files/rules.yaml"
WORKER = 'service="worker",instance="a100-0"'
DISPATCHER = 'service="dispatcher",instance="d"'


class Cause(NamedTuple):
    """What must raise an alert, and what must not.

    Attributes:
        series: Series -> promtool's notation of its values, a value per minute, that raise it.
        after: Time by which the alert must fire.
        calm: The same series while nothing is wrong.
    """

    series: dict[str, str]
    after: str
    calm: dict[str, str]


def outcomes(kind: str) -> str:
    """Return the series of a kind of outcome."""
    return f'hexflow_call_outcomes_total{{{WORKER},kind="{kind}",reason="x"}}'


CAUSES = {
    "HexflowDown": Cause(
        {'up{job="hexflow",instance="a"}': "0x10"}, "3m", {'up{job="hexflow",instance="a"}': "1x10"}
    ),
    "HexflowNotReady": Cause(
        {f"hexflow_ready{{{WORKER}}}": "0x20"}, "7m", {f"hexflow_ready{{{WORKER}}}": "1x20"}
    ),
    "HexflowLoopStuck": Cause(
        {f'hexflow_loop_silence_ratio{{{WORKER},loop="claim"}}': "1.5x10"},
        "2m",
        {f'hexflow_loop_silence_ratio{{{WORKER},loop="claim"}}': "0.9x10"},
    ),
    "HexflowNothingDispatched": Cause(
        {
            f"hexflow_calls_waiting{{{DISPATCHER}}}": "7x20",
            f'hexflow_calls_dispatched_total{{{DISPATCHER},target="a100-0"}}': "50x20",
        },
        "6m",
        {
            f"hexflow_calls_waiting{{{DISPATCHER}}}": "7x20",
            f'hexflow_calls_dispatched_total{{{DISPATCHER},target="a100-0"}}': "50+10x20",
        },
    ),
    "HexflowAttainmentLow": Cause(
        {'hexflow_window_attainment{tenant="t",workflow="w"}': "0.8x30"},
        "12m",
        {'hexflow_window_attainment{tenant="t",workflow="w"}': "0.95x30"},
    ),
    "HexflowBacklogHigh": Cause(
        {f"hexflow_backlog_seconds{{{WORKER}}}": "200x30"},
        "13m",
        {f"hexflow_backlog_seconds{{{WORKER}}}": "100x30"},
    ),
    "HexflowCallsFail": Cause(
        {outcomes("completed"): "0+9x20", outcomes("failed"): "0+1x20"},
        "12m",
        {outcomes("completed"): "0+99x20", outcomes("failed"): "0+1x20"},
    ),
    "HexflowCallsTurnedAway": Cause(
        {outcomes("completed"): "0+9x20", outcomes("rejected"): "0+1x20"},
        "12m",
        {outcomes("completed"): "0+99x20", outcomes("evicted"): "0+1x20"},
    ),
    "HexflowDeadLetters": Cause(
        {f'hexflow_dead_letters_total{{{DISPATCHER},reason="invalid"}}': "0 0 1 1 1 1"},
        "4m",
        {f'hexflow_dead_letters_total{{{DISPATCHER},reason="invalid"}}': "3x10"},
    ),
    "HexflowRecordsUnreadable": Cause(
        {f'hexflow_records_unreadable_total{{{DISPATCHER},topic="control",reason="x"}}': "0 0 1 1"},
        "3m",
        {f'hexflow_records_unreadable_total{{{DISPATCHER},topic="control",reason="x"}}': "1x10"},
    ),
    "HexflowInstanceDied": Cause(
        {f"hexflow_instances_fenced_total{{{DISPATCHER}}}": "0 0 1 1 1"},
        "4m",
        {f"hexflow_instances_fenced_total{{{DISPATCHER}}}": "2x10"},
    ),
    "HexflowInstanceSlow": Cause(
        {'hexflow_speed_factor{service="tuner",target="a100-0"}': "3x30"},
        "12m",
        {'hexflow_speed_factor{service="tuner",target="a100-0"}': "1.2x30"},
    ),
    "HexflowReplayUntrusted": Cause(
        {'hexflow_calibration_error{pool="default"}': "0.4x60"},
        "35m",
        {'hexflow_calibration_error{pool="default"}': "0.05x60"},
    ),
}


@pytest.fixture(scope="module")
def promtool() -> Path:
    """Return promtool, or do without."""
    try:
        return promtool_program()
    except MissingServerError as missing:
        do_without(missing)


def alerts() -> dict[str, dict[str, Any]]:
    """Return the alert rules by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def fires(promtool: Path, folder: Path, name: str, series: dict[str, str], at: str) -> bool:
    """Return whether an alert fires at a time, by promtool's own evaluation.

    promtool compares an expectation with what fires: expecting silence fails when it fires.
    """
    case = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": one, "values": of} for one, of in series.items()],
                "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": []}],
            }
        ],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(case))
    done = subprocess.run(
        [promtool, "test", "rules", path], capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 or f"alertname: {name}" in said, said
    return done.returncode != 0


def test_rules_are_valid(promtool: Path):
    """Prometheus takes the rules."""
    done = subprocess.run(
        [promtool, "check", "rules", RULES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_cause_here():
    """No alert is left out below."""
    assert set(CAUSES) == set(alerts())


@pytest.mark.parametrize("name", CAUSES)
def test_an_alert_fires_for_its_cause_and_for_nothing_else(
    promtool: Path, tmp_path: Path, name: str
):
    """It fires in time once the cause is there, and is silent while nothing is wrong."""
    cause = CAUSES[name]
    assert fires(promtool, tmp_path, name, cause.series, cause.after)
    assert not fires(promtool, tmp_path, name, cause.calm, cause.after)
