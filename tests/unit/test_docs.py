"""The documents say what the code does."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.runtime.settings import variable_names
from shared.simulation.fleets import PRESETS, dump_fleet, parse_fleet
from shared.simulation.importing import assemble, read_csv, read_otel
from shared.simulation.importing.csv_import import COLUMNS, NEEDED
from shared.simulation.trace_file import dump_trace, parse_trace

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The script that writes pages from code."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_page_is_current(generate: ModuleType):
    """`docs/settings.md` is what the settings classes say today."""
    written = (DOCS / "settings.md").read_text()
    assert written == generate.settings_page(), "run: python docs/generate.py"


def test_every_setting_is_described(generate: ModuleType):
    """Each variable has a row, and each row says what the variable does."""
    for _, prefix, cls in generate.CLASSES:
        rows = generate.describe(cls, prefix)
        groups = {name for name in variable_names(cls, prefix) if f"{name}__" in str(rows)}
        assert {row.variable for row in rows} == variable_names(cls, prefix) - groups
        assert [row.variable for row in rows if len(row.description) < 8] == []


def test_durations_say_whose_seconds_they_are(generate: ModuleType):
    """A variable in seconds names wall or mesh seconds, as time may be scaled."""
    unclear = [
        row.variable
        for _, prefix, cls in generate.CLASSES
        for row in generate.describe(cls, prefix)
        if row.variable.endswith("_S") and not re.search("(wall|mesh) seconds", row.description)
    ]
    assert unclear == ["HEXFLOW_TOPICS__RETENTION_S"]  # the brokers' own seconds


def test_fleet_examples_are_valid():
    """Every example of the fleet page can be used as it stands."""
    examples = blocks("fleets.md", "toml")
    assert len(examples) >= 2
    for example in examples:
        fleet = parse_fleet(example)
        assert parse_fleet(dump_fleet(fleet)) == fleet


def test_the_fleet_page_names_every_key_and_preset():
    """A key that can be set is explained, and no other."""
    text = (DOCS / "fleets.md").read_text()
    explained = set(re.findall(r"^\| `(?:latency\.)?(\w+)`", text, re.MULTILINE))
    keys = {*InstanceSpec.__struct_fields__, *LatencyModel.__struct_fields__, "id", "count"}
    assert explained - set(PRESETS) == keys - {"instance_id", "latency"}
    assert set(PRESETS) <= explained


def test_the_fleet_page_states_the_defaults():
    """The defaults in the tables are the code's."""
    text = (DOCS / "fleets.md").read_text()
    rows = dict(re.findall(r"^\| `(?:latency\.)?(\w+)` \|[^|]*\| `([^`]*)` \|", text, re.MULTILINE))
    spec = InstanceSpec(
        instance_id="a",
        gpu="X",
        latency=LatencyModel(weights_s=1.0, prefill_s_per_token=1.0),
    )
    for key, shown in rows.items():
        if key == "count":
            continue
        value = getattr(spec, key, getattr(spec.latency, key, None))
        assert tomllib.loads(f"x = {shown}")["x"] == (
            list(value) if isinstance(value, tuple) else value
        ), key


def test_trace_examples_are_valid():
    """The examples of both forms on the trace page are read, and mean what the page says."""
    versioned, authors = blocks("traces.md", "jsonl")[0], blocks("traces.md", "json")[0]
    (query,) = parse_trace(versioned)
    assert parse_trace(dump_trace([query])) == (query,)
    assert [stage.parents for stage in query.stages] == [None, None, (0,), (1, 2)]
    (old,) = parse_trace(authors)
    assert [(stage.stage, len(stage.calls)) for stage in old.stages] == [
        ("information_retriever", 1),
        ("generate_candidate", 2),
        ("revise", 1),
    ]


def test_the_import_page_names_every_column():
    """The table of columns is the code's, with the needed ones marked."""
    text = (DOCS / "import.md").read_text()
    rows = re.findall(r"^\| (\*?\*?)`(\w+)`\1 \| ([^|]*) \|", text, re.MULTILINE)
    assert {name for _, name, _ in rows} >= set(COLUMNS)
    assert {name for mark, name, _ in rows if mark} == set(NEEDED)
    for _, name, others in rows:
        if name in COLUMNS:
            assert re.findall(r"`(\w+)`", others) == list(COLUMNS[name]), name


def test_the_import_pages_examples_can_be_imported():
    """The CSV, the OTLP/JSON and the flattened spans on the page are all one query."""
    (table,) = blocks("import.md", "csv")
    assert assemble(read_csv(table)).summary.problems == ()
    for language in ("json", "jsonl"):
        for example in blocks("import.md", language):
            summary = assemble(read_otel(example)).summary
            assert (summary.num_queries, summary.problems) == (1, ())


def test_the_log_converter_on_the_import_page_works(tmp_path: Path, monkeypatch):
    """The script that turns vLLM's log into a table gives one that imports without problems."""
    (script,) = blocks("import.md", "python")
    (log,) = blocks("import.md", "text")
    (tmp_path / "vllm.log").write_text(log)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["vllm_log.py", "vllm.log", "2026"])
    exec(compile(script, "vllm_log.py", "exec"), {"__name__": "__main__"})  # noqa: S102
    summary = assemble(read_csv((tmp_path / "calls.csv").read_text())).summary
    assert (summary.num_queries, summary.num_calls, summary.problems) == (2, 3, ())
