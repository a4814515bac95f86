"""The OpenAPI document says what the gateway serves."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from services.gateway.openapi import openapi_document
from services.gateway.openapi_operations import OPERATIONS

ROOT = Path(__file__).parents[3]


def test_the_checked_in_document_is_current():
    """`docs/openapi.json` is what the code says."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    written = (ROOT / "docs/openapi.json").read_text(encoding="utf-8")
    assert written == generate.openapi_page(), "run: PYTHONPATH=. python docs/generate.py"


def test_every_reference_resolves_and_every_id_is_unique():
    """No reference dangles."""
    document = openapi_document("0")
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
        node = document
        for part in reference.split("/"):
            node = node[part]
    ids = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("field", ["slo_s", "query_id", "late_s"])
def test_the_meshs_headers_are_described(field: str):
    """Each mesh field is a header of the calls, with what it means."""
    document = openapi_document("0")
    parameters = document["paths"]["/v1/chat/completions"]["post"]["parameters"]
    found = {one["name"]: one["description"] for one in parameters if one["in"] == "header"}
    assert len(found[f"x-hexflow-{field.replace('_', '-')}"]) > 10


def test_every_route_is_described():
    """Paths and methods of the document are those of the application, pages apart."""
    from services.gateway import routing  # noqa: PLC0415 - read as text below

    text = Path(str(routing.__file__)).read_text()
    served = {
        (path.replace(":path", "").replace(":int", ""), method.lower())
        for path, method in re.findall(r'Route\("([^"]+)", [\w.]+, methods=\["(\w+)"\]\)', text)
    }
    pages = {("/", "get"), ("/health", "get"), ("/dashboard", "get"), ("/openapi.json", "get")}
    assert served - pages == {(one.path, one.method) for one in OPERATIONS}
