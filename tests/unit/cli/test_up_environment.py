"""What `hexflow up` takes from the environment, and what it says of the rest."""

from pathlib import Path

import pytest

from services.cli.embedded import gateway_of_environment
from services.cli.gateway_options import gateway_text, unused_text
from services.gateway.params import GatewayParams
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_gateway_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with none of the gateway's variables."""
    monkeypatch.delenv("GATEWAY_KEYS_FILE", raising=False)


def test_the_gateway_is_as_its_variables_say(monkeypatch: pytest.MonkeyPatch):
    """Keys and bounds are taken over; without any variable all is as by default."""
    assert gateway_of_environment() == GatewayParams()
    monkeypatch.setenv("GATEWAY_KEYS_FILE", "/etc/keys.toml")
    monkeypatch.setenv("GATEWAY_MAX_OPEN", "3")
    found = gateway_of_environment()
    assert (found.keys_file, found.max_open) == (Path("/etc/keys.toml"), 3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GATEWAY_KEYS_FIL", "did you mean GATEWAY_KEYS_FILE"),
        ("GATEWAY_PORT", "on --port"),
        ("GATEWAY_HOST", "this machine only"),
    ],
)
def test_what_cannot_be_honoured_is_refused(name: str, said: str, monkeypatch: pytest.MonkeyPatch):
    """A misspelt variable, or one that says where to listen, is never silently ignored."""
    monkeypatch.setenv(name, "8081")
    with pytest.raises(ConfigError, match=said):
        gateway_of_environment()


def test_variables_of_service_processes_are_named():
    """Whoever sets one for a mesh in one process is told that it has no effect."""
    assert unused_text({"HOME": "/", "HEXFLOW_CACHE_DIR": "/x"}) == ""
    assert "TUNER_MARGIN, WORKER_CAPACITY" in unused_text({"WORKER_CAPACITY", "TUNER_MARGIN"})


def test_who_is_let_in_is_told():
    """Without a keys file any key will do; with one its keys are needed."""
    assert gateway_text(80).endswith("any API key")
    assert gateway_text(80, "k.toml").endswith("API keys of k.toml")
