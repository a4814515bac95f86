"""The published contract is a valid AsyncAPI 3.0 document."""

import json
from pathlib import Path

import pytest
from jsonschema.validators import validator_for

from tests.support.asyncapi_schema import asyncapi_schema
from tests.support.servers import MissingServerError, do_without

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/asyncapi.json"


def test_document_is_valid_asyncapi():
    """The official schema of AsyncAPI 3.0 accepts it, and would refuse a broken one."""
    try:
        schema = asyncapi_schema()
    except MissingServerError as missing:
        do_without(missing)
    validator = validator_for(schema)(schema)
    document = json.loads(DOCUMENT.read_text())
    assert [error.json_path for error in validator.iter_errors(document)] == []
    del document["info"]["title"]
    assert not validator.is_valid(document)


def test_cache_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A schema in the cache folder needs no network."""
    monkeypatch.setenv("HEXFLOW_CACHE_DIR", str(tmp_path))
    (tmp_path / "asyncapi-specs-6.11.1.json").write_text('{"kept": true}')
    assert asyncapi_schema() == {"kept": True}
