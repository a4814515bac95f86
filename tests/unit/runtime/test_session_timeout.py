"""How long Kafka waits for a dead dispatcher is the operator's choice."""

import pytest

from shared.errors import ConfigError
from shared.runtime.connections import kafka_params
from shared.runtime.settings import MeshSettings, load


def test_session_timeout_reaches_the_consumers(monkeypatch: pytest.MonkeyPatch):
    """The variable sets the session of group members; several heartbeats fit into it."""
    monkeypatch.setenv("HEXFLOW_KAFKA__SESSION_TIMEOUT_S", "1.5")
    consumer = kafka_params(load(MeshSettings), "any").consumer()
    assert consumer["session_timeout_ms"] == 1_500
    assert consumer["heartbeat_interval_ms"] * 3 < 1_500


def test_session_below_a_second_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A session that a hiccup would end is refused at start."""
    monkeypatch.setenv("HEXFLOW_KAFKA__SESSION_TIMEOUT_S", "0.5")
    with pytest.raises(ConfigError, match="SESSION_TIMEOUT_S"):
        load(MeshSettings)
