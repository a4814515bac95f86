"""The structure is what the documents say."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shared.contracts.asyncapi import document
from shared.contracts.messages import ALL_MESSAGES
from shared.contracts.topics import Topics

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*(ROOT / "shared").rglob("*.py"), *(ROOT / "services").rglob("*.py")]


@pytest.mark.parametrize("package", ["shared", "services"])
def test_packages_are_the_ones_of_this_tree(package: str):
    """`shared` is no namespace package that merges with another folder of that name."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / package / "__init__.py"


def test_layers_are_kept():
    """import-linter finds no import that crosses a layer."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_keep_to_their_room():
    """A module that outgrew 400 lines has to be split."""
    long = {
        str(path.relative_to(ROOT)): count
        for path in SOURCES
        if (count := len(path.read_text().splitlines())) > 400
    }
    allowed = {"shared/contracts/messages.py"}  # the contract is read as one document
    assert set(long) <= allowed, long


def test_every_module_has_a_docstring():
    """A newcomer can open any file and read what it is for."""
    bare = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.read_text().strip() and not path.read_text().lstrip().startswith('"""')
    ]
    assert bare == []


def test_reading_guide_names_files_that_exist():
    """The four files named in `shared/__init__.py` exist."""
    named = re.findall(r"\d\. `(shared/[\w/.]+)`", (ROOT / "shared/__init__.py").read_text())
    assert len(named) == 4
    assert all((ROOT / name).exists() for name in named)


def test_environment_is_read_in_one_place():
    """Only the settings, the cache folder's owner and process starters look at the environment."""
    allowed = {
        "shared/runtime/settings.py",
        "shared/adapters/local_kafka.py",
        "shared/adapters/vllm_engine.py",  # writes what vLLM reads from there
    }
    readers = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    }
    assert {name for name in readers - allowed if not name.startswith("services/cli/")} == set()


def test_asyncapi_document_is_current():
    """`docs/asyncapi.json` is what `hexflow asyncapi` prints."""
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    written = json.loads((ROOT / "docs/asyncapi.json").read_text())
    current = json.loads(json.dumps(document(version.group(1))))
    assert written == current, "run: hexflow asyncapi > docs/asyncapi.json"


def test_asyncapi_document_describes_every_message_and_resolves():
    """Each class of the contract has a schema with every field; no reference dangles."""
    spec = document("0")
    schemas = spec["components"]["schemas"]
    for cls in ALL_MESSAGES:
        fields = {field.encode_name for field in msgspec.structs.fields(cls)}
        assert fields | {"type"} == set(schemas[cls.__name__]["properties"]), cls.__name__
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(spec)):
        node = spec
        for part in reference.split("/"):
            node = node[part]
    addresses = {channel["address"] for channel in spec["channels"].values()}
    created = {topic.name for topic in Topics().specs()}
    unread = {Topics().name(name) for name in ("queries", "query-results")}
    assert created - unread <= addresses


def test_no_message_class_allows_numbers_that_are_not_finite():
    """Every float field of the contract is bounded, so NaN and infinity are refused."""
    schemas = document("0")["components"]["schemas"]
    loose = []

    def walk(name: str, node: object) -> None:
        if isinstance(node, dict):
            if node.get("type") == "number" and "maximum" not in node:
                loose.append(name)
            for key, value in node.items():
                walk(f"{name}.{key}", value)
        elif isinstance(node, list):
            for value in node:
                walk(name, value)

    for name, schema in schemas.items():
        walk(name, schema)
    assert loose == []
