"""Writes the Grafana dashboard of the chart: `python k8s/dashboards.py`.

A panel is a line of `ROWS`; a test compares the file with what this writes, and every metric in it
with what the services export.
"""
# ruff: noqa: INP001 - a script, part of no package

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parent / "hexflow" / "files" / "dashboards" / "hexflow.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS = 24


class Panel(NamedTuple):
    """One picture.

    Attributes:
        title: Above it.
        unit: Grafana's name of the unit.
        queries: PromQL expression -> legend.
        about: What it tells; shown on demand.
        kind: Grafana's panel type.
        width: Columns of 24.
        limits: Values at which the colour turns to orange and to red; red below them if reversed.
    """

    title: str
    unit: str
    queries: dict[str, str]
    about: str = ""
    kind: str = "timeseries"
    width: int = 8
    limits: tuple[float, float] | None = None


ROWS: dict[str, list[Panel]] = {
    "At a glance": [
        Panel(
            "Within their SLO",
            "percentunit",
            {"min(hexflow_window_attainment)": "worst tenant and workflow"},
            "Share of the tuner's window of queries that ended within their SLO.",
            "stat",
            6,
            (0.95, 0.9),
        ),
        Panel(
            "Queries' P95",
            "s",
            {'max(hexflow_window_latency_seconds{quantile="0.95"})': "slowest"},
            "End to end, of the tuner's window.",
            "stat",
            6,
        ),
        Panel(
            "Work per instance",
            "s",
            {'avg(hexflow_backlog_seconds{service="worker"})': "mean"},
            "Expected work that waits or runs.",
            "stat",
            6,
            (60, 120),
        ),
        Panel(
            "Calls that fail",
            "percentunit",
            {
                'sum(rate(hexflow_call_outcomes_total{kind="failed"}[5m]))'
                " / (sum(rate(hexflow_call_outcomes_total[5m])) > 0) or vector(0)": "share"
            },
            "After their retries, of all calls, last five minutes.",
            "stat",
            6,
            (0.01, 0.05),
        ),
    ],
    "Queries": [
        Panel(
            "End-to-end time",
            "s",
            {"hexflow_window_latency_seconds": "{{tenant}}/{{workflow}} {{quantile}}"},
            "Quantiles of the tuner's window, by tenant and workflow.",
            width=12,
        ),
        Panel(
            "Within their SLO",
            "percentunit",
            {"hexflow_window_attainment": "{{tenant}}/{{workflow}}"},
            width=12,
        ),
    ],
    "Questions and clients": [
        Panel(
            "Questions under way",
            "short",
            {"sum(hexflow_queries_open)": "open"},
            "At the agents.",
            width=6,
        ),
        Panel(
            "Questions ended",
            "ops",
            {
                "sum by (workflow, kind) (rate(hexflow_queries_ended_total[5m]))": (
                    "{{workflow}} {{kind}}"
                )
            },
            width=6,
        ),
        Panel(
            "HTTP requests",
            "ops",
            {"sum by (status) (rate(hexflow_http_requests_total[1m]))": "{{status}}"},
            width=6,
        ),
        Panel(
            "HTTP, P95 to the end of the answer",
            "s",
            {
                "histogram_quantile(0.95, sum by (le, kind) "
                "(rate(hexflow_http_request_seconds_bucket[5m])))": "{{kind}}"
            },
            width=6,
        ),
    ],
    "Calls": [
        Panel(
            "Outcomes",
            "ops",
            {"sum by (kind) (rate(hexflow_call_outcomes_total[1m]))": "{{kind}}"},
        ),
        Panel(
            "From ready to engine, P95",
            "s",
            {
                "histogram_quantile(0.95, sum by (le, kind) "
                "(rate(hexflow_call_queue_seconds_bucket[5m])))": "{{kind}}"
            },
        ),
        Panel(
            "Bound to instances",
            "ops",
            {"sum by (target) (rate(hexflow_calls_dispatched_total[1m]))": "{{target}}"},
        ),
    ],
    "Instances": [
        Panel("Waiting", "short", {'hexflow_calls_waiting{service="worker"}': "{{instance}}"}),
        Panel("Running", "short", {'hexflow_calls_running{service="worker"}': "{{instance}}"}),
        Panel("Backlog", "s", {'hexflow_backlog_seconds{service="worker"}': "{{instance}}"}),
        Panel(
            "Time needed ÷ profile",
            "short",
            {"max by (target) (hexflow_speed_factor)": "{{target}}"},
            "Learned from completions; 1 is as fast as the profile says.",
        ),
        Panel(
            "Started",
            "ops",
            {"sum by (instance) (rate(hexflow_calls_started_total[1m]))": "{{instance}}"},
        ),
        Panel(
            "Handed back, demoted",
            "ops",
            {
                "sum by (cause) (rate(hexflow_calls_handed_back_total[5m]))": "{{cause}}",
                "sum(rate(hexflow_calls_demoted_total[5m]))": "demoted",
            },
            "Demoted: too late to be met, behind those that still can be.",
        ),
    ],
    "Tuning": [
        Panel("α in force", "short", {"max by (pool) (hexflow_alpha)": "{{pool}}"}),
        Panel(
            "Error of the replay",
            "percentunit",
            {"hexflow_calibration_error": "{{pool}}"},
            "|simulated / observed P95 - 1|; above 20% the tuner leaves α alone.",
        ),
        Panel(
            "Decisions",
            "short",
            {"sum by (result) (increase(hexflow_tuning_decisions_total[1h]))": "{{result}}"},
        ),
    ],
    "Health": [
        Panel(
            "Ready",
            "short",
            {"sum by (service) (hexflow_ready)": "{{service}}"},
            "Processes that can do their work.",
        ),
        Panel(
            "Slowest loop ÷ its bound",
            "percentunit",
            {"max by (service) (hexflow_loop_silence_ratio)": "{{service}}"},
            "Above 100% a loop is stuck and its liveness probe fails.",
        ),
        Panel(
            "Known already, dropped",
            "ops",
            {"sum by (service) (rate(hexflow_duplicates_dropped_total[5m]))": "{{service}}"},
            "Deliveries that were repeated: after restarts and hand-backs.",
        ),
        Panel(
            "Messages read",
            "ops",
            {
                "sum by (service, topic) (rate(hexflow_messages_read_total[1m]))": (
                    "{{service}} {{topic}}"
                )
            },
        ),
        Panel(
            "Dead letters",
            "short",
            {
                "sum by (service, reason) (increase(hexflow_dead_letters_total[1h]))": (
                    "{{service}} {{reason}}"
                )
            },
        ),
        Panel(
            "Instances declared dead",
            "short",
            {"sum(increase(hexflow_instances_fenced_total[1h]))": "in the last hour"},
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return Grafana's JSON model (schema 39)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "id": len(panels) + 1,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x, height = 0, 4 if row[0].kind == "stat" else 8
        for one in row:
            if x + one.width > COLUMNS:
                x, y = 0, y + height
            place = {"x": x, "y": y, "w": one.width, "h": height}
            panels.append(_panel(one, len(panels) + 1, place))
            x += one.width
        y += height
    return {
        "uid": "hexflow",
        "title": "hexflow",
        "tags": ["hexflow", "llm"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Prometheus",
                }
            ]
        },
        "panels": panels,
    }


def _panel(one: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": one.unit, "min": 0}
    if one.limits:
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(*one.limits)}
    elif one.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 8, "showPoints": "never"}
    return {
        "id": number,
        "type": one.kind,
        "title": one.title,
        "description": one.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for n, (expr, legend) in enumerate(one.queries.items())
        ],
    }


def _steps(warn: float, bad: float) -> list[dict[str, Any]]:
    if warn > bad:  # low values are the bad ones
        return [
            {"color": "red", "value": None},
            {"color": "orange", "value": bad},
            {"color": "green", "value": warn},
        ]
    return [
        {"color": "green", "value": None},
        {"color": "orange", "value": warn},
        {"color": "red", "value": bad},
    ]


def text() -> str:
    """Return the file's text."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
    sys.stdout.write(f"wrote {TARGET.name}\n")
