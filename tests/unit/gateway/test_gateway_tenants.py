"""The keys file, and who a key belongs to."""

import pytest

from services.gateway.new_key import main
from services.gateway.tenants import Tenant, Tenants, hash_of, new_key, parse_tenants
from shared.errors import ConfigError


def test_a_key_is_recognised_by_its_hash_alone():
    """The file holds no key, and still tells whose key it is."""
    key, stored = new_key()
    assert key not in stored
    tenants = parse_tenants(f'[tenants.acme]\nkeys = ["{stored}"]\nslo_s = 30\nweight = 2\n')
    assert tenants.recognise(key) == Tenant(name="acme", slo_s=30.0, weight=2.0)
    assert tenants.names() == ["acme"]
    assert not tenants.is_open


def test_wrong_keys_are_nobodys():
    """A changed secret, another id, an empty or absurd text is no tenant, and no error."""
    key, stored = new_key()
    tenants = parse_tenants(f'[tenants.a]\nkeys = ["{stored}"]\n')
    other, _ = new_key()
    for wrong in (key[:-1], key + "x", other, key.upper(), "", "hf-", "\udcff", "x" * 100_000):
        assert tenants.recognise(wrong) is None
    assert Tenants(None).is_open


@pytest.mark.parametrize(
    "text",
    [
        "tenants = 3",
        "[tenants.a]\nkeys = ['secret']",
        "[tenants.a]\nkeys = []\nslos = 3",
        "[tenants.a]\nkeys = []\nslo_s = -1",
        "[tenants.a]\nkeys = []\nweight = 0",
        "not toml",
    ],
)
def test_a_wrong_file_is_refused(text: str):
    """A typo, a bound, or a key in the clear is an error that says where."""
    with pytest.raises(ConfigError, match="keys file"):
        parse_tenants(text)


def test_a_key_id_belongs_to_one_tenant():
    """The same entry under two tenants is refused."""
    _, stored = new_key()
    text = "".join(f'[tenants.{name}]\nkeys = ["{stored}"]\n' for name in "ab")
    with pytest.raises(ConfigError, match="twice"):
        parse_tenants(text)


def test_errors_never_quote_a_key():
    """A key that somebody pasted into the file does not end up in a log."""
    key, _ = new_key()
    with pytest.raises(ConfigError) as caught:
        parse_tenants(f'[tenants.a]\nkeys = ["{key}"]')
    assert key not in str(caught.value)


def test_the_command_prints_a_key_that_works(capsys):
    """What `new_key` prints for the file recognises the key it printed."""
    assert main(["acme corp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    key = lines[0].rsplit(" ", 1)[-1]
    found = parse_tenants("\n".join(lines[2:])).recognise(key)
    assert found is not None
    assert found.name == "acme corp"
    assert main([]) == 2


def test_hashes_are_of_the_whole_key():
    """Two keys with the same id have different hashes."""
    assert hash_of("hf-00000000-a") != hash_of("hf-00000000-b")
