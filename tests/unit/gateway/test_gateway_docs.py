"""docs/gateway.md says what the code does."""

import re
from pathlib import Path

import msgspec

from services.gateway.fields import MeshFields
from services.gateway.settings import GatewaySettings
from services.gateway.tenants import parse_tenants
from shared.runtime.settings import variable_names

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/gateway.md").read_text()


def test_every_mesh_field_is_explained():
    """The table names every field that a client may send, and no other."""
    table = PAGE.partition("| field | meaning")[2].partition("\n\n")[0]
    named = {
        name
        for line in table.splitlines()[2:]
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert named == {field.name for field in msgspec.structs.fields(MeshFields)}


def test_the_keys_file_on_the_page_is_valid():
    """It is read as it stands, but for the key that is left out."""
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    tenants = parse_tenants(example.replace('["..."]', "[]"))
    assert tenants.names() == ["acme"]


def test_settings_on_the_page_exist():
    """No variable is misspelt."""
    named = set(re.findall(r"\bGATEWAY_\w+", PAGE))
    assert named <= variable_names(GatewaySettings, "GATEWAY_")


def test_every_error_code_is_in_the_table():
    """A client's author finds every code that the gateway's own refusals carry."""
    sources = "".join(path.read_text() for path in (ROOT / "services/gateway").glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', sources))
    table = PAGE.partition("| status | `code`")[2].partition("\n\n")[0]
    assert len(codes) > 20
    assert codes <= set(re.findall(r"`(\w+)`", table))
