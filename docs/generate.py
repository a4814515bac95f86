"""Write the pages that are made from code: `python docs/generate.py`.

- `settings.md`: every environment variable, from the settings classes.
- `openapi.json`: the gateway's HTTP API, from its routes and message classes.
"""
# ruff: noqa: INP001 - a script, part of no package

import json
import tomllib
from pathlib import Path

from services.dispatcher.settings import DispatcherSettings
from services.gateway.openapi import openapi_document
from services.gateway.settings import GatewaySettings
from services.text2sql.settings import AgentSettings
from services.tuner.settings import TunerSettings
from services.worker.settings import WorkerSettings
from shared.runtime.settings import MESH_PREFIX, MeshSettings, SettingRow, describe

DOCS = Path(__file__).resolve().parent
CLASSES = (
    ("All services", MESH_PREFIX, MeshSettings),
    ("Dispatcher", "DISPATCHER_", DispatcherSettings),
    ("Worker", "WORKER_", WorkerSettings),
    ("Tuner", "TUNER_", TunerSettings),
    ("Text-to-SQL agent", "TEXT2SQL_", AgentSettings),
    ("Gateway", "GATEWAY_", GatewaySettings),
)
INTRODUCTION = """\
# Settings

Services read their settings from the environment. `HEXFLOW_*` must be the same for all services of
a mesh; the others belong to one service. A variable with one of these prefixes that names no
setting is refused at the start, with the nearest valid name; so is a value out of bounds. A mesh
that runs in one process (`hexflow demo`, `up`, `replay` without `--kafka`) reads none of them: what
can be set there are the command's options.

*Wall seconds* are real ones; *mesh seconds* are wall seconds × `HEXFLOW_TIME_SCALE`.

<!-- Made by docs/generate.py from the settings classes; change the text there. -->
"""


def settings_page() -> str:
    """Return `settings.md`."""
    return "\n".join([INTRODUCTION, *(_section(*one) for one in CLASSES)])


def _section(title: str, prefix: str, cls: type) -> str:
    doc = (cls.__doc__ or "").strip()
    lines = [
        f"## {title}",
        "",
        doc,
        "",
        "| variable | value | default | bounds | meaning |",
        "|---|---|---|---|---|",
        *(_line(row) for row in describe(cls, prefix)),
        "",
    ]
    return "\n".join(lines)


def _line(row: SettingRow) -> str:
    cells = (f"`{row.variable}`", row.kind, row.default, row.bounds, row.description)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def openapi_page() -> str:
    """Return `openapi.json`."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    return json.dumps(openapi_document(project["version"]), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (DOCS / "openapi.json").write_text(openapi_page(), encoding="utf-8")
    (DOCS / "settings.md").write_text(settings_page(), encoding="utf-8")
