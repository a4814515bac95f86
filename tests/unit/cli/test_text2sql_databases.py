"""How databases are named on the command line."""

import sqlite3
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from services.cli.real_engines import EngineChoice
from services.cli.text2sql.databases import (
    check_databases,
    database_named,
    databases_named,
    is_plain_name,
)
from services.cli.text2sql.mesh import AgentPlan, Show, checked, open_agent_mesh, unseen
from shared.adapters.local_process import free_port
from shared.adapters.memory_store import MemoryStore
from shared.contracts.agents import AgentNotice
from shared.contracts.messages import QueryRequest, QueryResult
from shared.errors import ConfigError
from shared.sdk import announce_agent


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
    assert database_named(address) == ("shop", address)
    assert database_named(f"sqlite:///{path}") == ("shop", f"sqlite:///{path}")
    assert database_named("postgresql://127.0.0.1/league")[0] == "league"
    for odd in ("postgresql://reader@127.0.0.1", "postgresql://127.0.0.1/a%20b"):
        assert database_named(odd) == ("database", odd)
    assert databases_named(["league", f"mine={path}"]) == {
        "league": url,
        "mine": f"sqlite:///{path}",
    }


def test_an_address_with_an_equals_sign_is_no_name():
    """What stands before the sign has to look like a name."""
    address = "postgresql://reader@127.0.0.1/shop?sslmode=disable"
    assert databases_named([address]) == {"shop": address}


def test_two_databases_of_one_name_are_told_apart_by_the_user():
    """The second one does not silently take the place of the first."""
    first, second = "postgresql://127.0.0.1/shop", "postgresql://127.0.0.2/shop"
    with pytest.raises(ConfigError, match="two databases are called 'shop'"):
        databases_named([first, second])
    assert databases_named([first, f"old={second}"]) == {"shop": first, "old": second}


def test_a_missing_file_is_told(tmp_path: Path):
    """Before anything is started."""
    with pytest.raises(ConfigError, match="no SQLite database"):
        database_named(str(tmp_path / "none.db"))


def test_plain_names_are_neither_samples_nor_addresses():
    """They mean what the agents of a mesh know."""
    assert is_plain_name("my-shop_2")
    assert not any(map(is_plain_name, ("league", "shop.db", "sqlite:///x", "")))


def test_a_misspelt_sample_is_answered_with_the_nearest():
    """The samples are named, and how others are given."""
    with pytest.raises(ConfigError, match=r"'leage'; did you mean league\? \(there are: bazaar"):
        database_named("leage")


def test_a_port_that_is_no_number_is_told():
    """It is a wrong address like any other, not a traceback."""
    with pytest.raises(ConfigError, match="postgresql://USER@HOST:PORT/NAME"):
        database_named("postgresql://reader@h:fivefour/shop")


def test_an_unreachable_database_is_told_with_its_place():
    """Host and port, and never the password."""
    port = free_port()
    with pytest.raises(ConfigError, match=rf"'shop' at 127.0.0.1:{port} cannot be read") as told:
        check_databases({"shop": f"postgresql://reader:hunter2@127.0.0.1:{port}/shop"})
    assert "hunter2" not in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_that_is_no_database_is_told_with_its_name(tmp_path: Path):
    """SQLite opens anything and finds out at the first look."""
    path = tmp_path / "shop.db"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(ConfigError, match=r"shop\.db cannot be read: .*not a database"):
        check_databases({"shop": f"sqlite:///{path}"})


def test_an_empty_database_has_nothing_to_ask_about(tmp_path: Path):
    """A mistyped file name that a tool created is found out before a model is started."""
    path = tmp_path / "shop.db"
    sqlite3.connect(path).close()
    with pytest.raises(ConfigError, match="no table to ask about"):
        check_databases({"shop": f"sqlite:///{path}"})
    check_databases({"league": database_named("league")[1]})


async def test_databases_are_looked_at_before_engines_are_started():
    """Both are out of reach here; what is told is the database, and at once."""
    port = free_port()
    plan = AgentPlan(
        databases={"shop": f"postgresql://reader@127.0.0.1:{port}/shop"},
        engines=EngineChoice(engine="openai", urls=(f"http://127.0.0.1:{port}/v1",)),
    )
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be read"):
        async with open_agent_mesh(plan, Console(quiet=True)):
            pass


async def test_a_mesh_is_asked_only_what_its_agents_could_answer():
    """`hexflow ask --kafka --db leage` ends at once with the nearest name."""
    store = MemoryStore()
    asked: list[str] = []

    async def ask(request: QueryRequest, show: Show) -> QueryResult:
        del show
        asked.append(request.database)
        return QueryResult(query_id=request.query_id, kind="completed")

    asking = checked(ask, store)
    request = QueryRequest(query_id="q", question="?", database="leage")
    with pytest.raises(ConfigError, match="no agent answers questions"):
        await asking(request, unseen)
    notice = AgentNotice(workflows={"text2sql": True}, databases=("league",))
    await announce_agent(store, "agent", notice)
    with pytest.raises(ConfigError, match=r"did you mean league\?"):
        await asking(request, unseen)
    await asking(msgspec.structs.replace(request, database="league"), unseen)
    assert asked == ["league"]
