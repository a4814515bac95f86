"""Which metrics the rules and the dashboard look at."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES: dict[str, Any] = yaml.safe_load((ROOT / "k8s/hexflow/files/rules.yaml").read_text())
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in ALL_RULES if "record" in rule}
ENDINGS = re.compile(r"_(bucket|count|sum|total)$")


def used(expression: str) -> set[str]:
    """Return the names of the metrics in a PromQL expression."""
    return set(re.findall(r"\bhexflow[:_][\w:]+", re.sub(r'"[^"]*"', "", expression)))


def dashboards() -> ModuleType:
    """Return the script that writes the dashboard."""
    spec = importlib.util.spec_from_file_location("dashboards", ROOT / "k8s/dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def looked_at() -> set[str]:
    """Return every exported metric that a rule or a panel uses, without endings like `_total`."""
    panels = [panel for row in dashboards().ROWS.values() for panel in row]
    expressions = [rule["expr"] for rule in ALL_RULES]
    expressions += [expression for panel in panels for expression in panel.queries]
    names = {name for expression in expressions for name in used(expression)} - RECORDED
    return {ENDINGS.sub("", name) for name in names}
