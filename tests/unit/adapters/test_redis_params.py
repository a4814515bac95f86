"""Redis parameters never show credentials and refuse addresses that cannot work."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.adapters.redis_client import RedisClient, RedisParams
from shared.errors import ConfigError

SECRET = "s3cret/pass@word"  # noqa: S105
WITH_SECRET = "rediss://mesh:s3cret%2Fpass%40word@cache.example:6380/2"  # noqa: S105


def test_credentials_leave_the_url() -> None:
    """Credentials given in the URL are taken out of it and unquoted."""
    params = RedisParams(url=WITH_SECRET)
    assert params.url == "rediss://cache.example:6380/2"
    assert params.username is not None
    assert params.username.get_secret_value() == "mesh"
    assert params.password is not None
    assert params.password.get_secret_value() == SECRET


def test_password_alone() -> None:
    """A URL may hold a password without a user."""
    params = RedisParams(url="redis://:pw@127.0.0.1:6379")
    assert params.username is None
    assert params.password is not None
    assert params.password.get_secret_value() == "pw"


def test_given_credentials_win() -> None:
    """A password given apart wins over the one in the URL."""
    params = RedisParams.model_validate({"url": "redis://u:one@h:1", "password": "two"})
    assert params.password is not None
    assert params.password.get_secret_value() == "two"


@pytest.mark.parametrize("show", [repr, str, RedisParams.model_dump_json, lambda p: p.address])
def test_nothing_shows_credentials(show: Callable[[RedisParams], str]) -> None:
    """Neither text, JSON nor the address holds the user or the password."""
    shown = show(RedisParams(url=WITH_SECRET))
    assert "cache.example" in shown
    for secret in ("mesh", "s3cret", SECRET):
        assert secret not in shown


def test_errors_hide_credentials() -> None:
    """A refused parameter's message does not quote the URL."""
    with pytest.raises(ValidationError) as caught:
        RedisParams.model_validate({"url": WITH_SECRET, "max_connections": 0})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h:6379", "must begin with"),
        ("127.0.0.1:6379", "must begin with"),
        ("redis://", "names no host"),
        ("unix://", "names no host"),
        ("redis://h:6379/main", "must be a number"),
        ("redis://h:99999/0", "port"),
        ("redis://h:port/0", "port"),
    ],
)
def test_impossible_addresses(url: str, why: str) -> None:
    """An address that cannot work is a configuration error that says why."""
    with pytest.raises(ConfigError, match=why):
        RedisParams(url=url)


@pytest.mark.parametrize("prefix", ["a{b", "a}b", "x" * 300])
def test_prefix_cannot_break_hash_tags(prefix: str) -> None:
    """A prefix with braces would spread a set over a cluster, so it is refused."""
    with pytest.raises(ValidationError):
        RedisParams(prefix=prefix)


def test_missing_tls_file() -> None:
    """A certificate file that is not there is named at once."""
    params = RedisParams(url="rediss://h:1", ssl_ca=Path("/nowhere/ca.pem"))
    with pytest.raises(ConfigError, match=r"/nowhere/ca\.pem"):
        RedisClient(params)
