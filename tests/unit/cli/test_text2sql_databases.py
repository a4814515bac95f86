"""How databases are named on the command line."""

from pathlib import Path

import pytest

from services.cli.text2sql.mesh import database_named, databases_named, is_plain_name
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let samples be generated into a folder that goes away."""
    monkeypatch.setenv("HEXFLOW_CACHE_DIR", str(tmp_path / "cache"))


def test_samples_files_and_addresses_are_databases(tmp_path: Path):
    """A sample is generated, a file keeps its name, an address is used as it is."""
    name, url = database_named("league")
    assert name == "league"
    assert Path(url.removeprefix("sqlite:///")).is_file()
    path = tmp_path / "shop.db"
    path.write_bytes(b"")
    assert database_named(str(path)) == ("shop", f"sqlite:///{path}")
    address = "postgresql://reader@127.0.0.1/shop"
    assert database_named(address) == ("database", address)
    assert databases_named(["league", f"mine={path}"]) == {
        "league": url,
        "mine": f"sqlite:///{path}",
    }


def test_an_address_with_an_equals_sign_is_no_name():
    """What stands before the sign has to look like a name."""
    address = "postgresql://reader@127.0.0.1/shop?sslmode=disable"
    assert databases_named([address]) == {"database": address}


def test_a_missing_file_is_told(tmp_path: Path):
    """Before anything is started."""
    with pytest.raises(ConfigError, match="no SQLite database"):
        database_named(str(tmp_path / "none.db"))


def test_plain_names_are_neither_samples_nor_addresses():
    """They mean what the agents of a mesh know."""
    assert is_plain_name("my-shop_2")
    assert not any(map(is_plain_name, ("league", "shop.db", "sqlite:///x", "")))
