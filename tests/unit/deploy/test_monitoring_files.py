"""Rules, runbooks and dashboard agree with each other and with the metrics there are."""

import re
from pathlib import Path

import pytest

from services.gateway.metrics import GatewayMetrics
from tests.support.monitoring import ALERTS, ALL_RULES, RECORDED, dashboards, used

ROOT = Path(__file__).parents[3]


def exported() -> set[str]:
    """Return the names of all metrics that a service can export: the gateway has all of them."""
    names = set()
    for family in GatewayMetrics().registry.collect():
        names.add(family.name)
        if family.type == "counter":
            names.add(family.name + "_total")
        if family.type == "histogram":
            names |= {family.name + suffix for suffix in ("_bucket", "_count", "_sum")}
    return names


def test_dashboard_is_what_the_code_writes():
    """The file in the chart is up to date."""
    made = dashboards()
    assert made.TARGET.read_text() == made.text()


def test_dashboard_shows_metrics_that_exist():
    """Every metric of every panel can be exported by a service."""
    panels = [panel for row in dashboards().ROWS.values() for panel in row]
    for panel in panels:
        for expression in panel.queries:
            assert used(expression), panel.title
            assert used(expression) <= exported() | RECORDED, panel.title


def test_rules_use_metrics_that_exist():
    """Every metric of every rule can be exported or is recorded."""
    for rule in ALL_RULES:
        assert used(rule["expr"]) <= exported() | RECORDED, rule


def test_every_metric_is_shown_or_watched():
    """Nobody exports what nobody looks at, but for a few that are for people who ask."""
    text = (ROOT / "k8s/hexflow/files/rules.yaml").read_text() + dashboards().text()
    bases = {family.name for family in GatewayMetrics().registry.collect()}
    asked_for = {
        "hexflow_advised_setting",
        "hexflow_arrivals_refused",
        "hexflow_events_ignored",
        "hexflow_gateway_clients_gone",
        "hexflow_gateway_event_clients",
        "hexflow_gateway_key_reloads",
        "hexflow_gateway_open_calls",
    }
    assert {name for name in bases if name not in text} == asked_for


@pytest.mark.parametrize("alert", [one["alert"] for one in ALERTS])
def test_every_alert_has_a_runbook(alert: str):
    """The runbook that an alert names exists, and says more than the alert does."""
    (rule,) = [one for one in ALERTS if one["alert"] == alert]
    page, anchor = rule["annotations"]["runbook"].split("#")
    sections = re.split(r"^## ", (ROOT / page).read_text(), flags=re.MULTILINE)[1:]
    titles = {section.split("\n", 1)[0]: section.split("\n", 1)[1] for section in sections}
    assert anchor == alert.lower()
    assert len(titles[alert].split()) > 30


def test_no_runbook_without_its_alert():
    """The page holds nothing that is gone."""
    titles = re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert titles == [one["alert"] for one in ALERTS]
