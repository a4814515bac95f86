"""What a user of Redis has to be allowed to do is asked for at the start, all of it."""

import re
from importlib import resources

import pytest
from redis import exceptions as rx

from shared.adapters.redis_client import RedisClient, RedisParams
from shared.errors import AccessRefused

FOLDER = resources.files("shared.adapters") / "lua"
CALL = re.compile(r"redis\.p?call\(\s*'(\w+)'")
ASKED = re.compile(r"\{'(\w+)'")


def test_every_command_of_every_script_is_asked_for():
    """A script with a new command cannot be added without its right being checked."""
    scripts = {one.name: one.read_text() for one in FOLDER.iterdir() if one.name.endswith(".lua")}
    asked = set(ASKED.findall(scripts.pop("check_rights.lua")))
    used = {command for text in scripts.values() for command in CALL.findall(text)}
    assert len(used) > 10
    assert used <= asked


@pytest.mark.parametrize(
    "answer",
    [
        "NOPERM User mesh has no permissions to run the 'zadd' command",
        "The user executing the script can't run this command or subcommand script: 21f6",
        "ERR ACL failure in script: User mesh has no permissions to run the 'zadd' command",
    ],
)
def test_a_denied_command_of_a_script_is_no_outage(answer: str):
    """Whatever a server's version says of it, it is a right that is missing, and is said to be."""
    client = RedisClient(RedisParams())
    error = client._translate(rx.ResponseError(answer))
    assert isinstance(error, AccessRefused)
    assert "ACL" in str(error)
