"""Settings: bounds, misspelt variables, secrets."""

import pytest

from services.dispatcher.settings import DispatcherSettings
from services.tuner.settings import TunerSettings
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError
from shared.runtime.settings import MeshSettings, load, variable_names


def test_defaults_are_loopback_and_need_no_environment(monkeypatch):
    """Out of the box nothing leaves this machine."""
    monkeypatch.setattr("os.environ", {})
    mesh = load(MeshSettings)
    assert mesh.kafka.bootstrap_servers.startswith("127.0.0.1")
    assert "127.0.0.1" in mesh.redis.url
    assert mesh.probes.port is None


def test_nested_variables_are_read(monkeypatch):
    """Groups are separated by two underscores."""
    monkeypatch.setenv("HEXFLOW_KAFKA__BOOTSTRAP_SERVERS", "kafka:9092")
    monkeypatch.setenv("HEXFLOW_TOPICS__PREFIX", "prod.")
    mesh = load(MeshSettings)
    assert mesh.kafka.bootstrap_servers == "kafka:9092"
    assert mesh.topics.topics().instance("a100-0") == "prod.instance.a100-0"


def test_a_misspelt_variable_is_refused_with_the_nearest_name(monkeypatch):
    """A typo must not be silently ignored."""
    monkeypatch.setenv("HEXFLOW_KAFKA__BOOTSTRAP_SERVER", "kafka:9092")
    with pytest.raises(ConfigError, match="did you mean HEXFLOW_KAFKA__BOOTSTRAP_SERVERS"):
        load(MeshSettings)


def test_an_unknown_variable_says_where_all_are_listed(monkeypatch):
    """In words for people: no class of ours is named, near name or none."""
    monkeypatch.setenv("HEXFLOW_TIME_SCAL", "2")
    with pytest.raises(ConfigError) as told:
        load(MeshSettings)
    assert str(told.value) == (
        "HEXFLOW_TIME_SCAL is no setting of hexflow; did you mean HEXFLOW_TIME_SCALE? "
        "docs/settings.md lists all"
    )
    monkeypatch.setenv("DISPATCHER_XYZZY", "2")
    with pytest.raises(ConfigError, match=r"XYZZY is no setting of hexflow; docs/settings\.md"):
        load(DispatcherSettings)


def test_a_missing_variable_says_what_it_is_for(monkeypatch):
    """A worker without a name is told what the name means, not only that a field is required."""
    monkeypatch.delenv("WORKER_INSTANCE_ID", raising=False)
    with pytest.raises(ConfigError) as told:
        load(WorkerSettings)
    assert str(told.value) == (
        "WORKER_INSTANCE_ID is not set; it is required: The instance this worker serves; must be "
        "in the fleet"
    )


def test_a_value_out_of_bounds_names_its_variable(monkeypatch):
    """The message names the variable a person has to change."""
    monkeypatch.setenv("HEXFLOW_TIME_SCALE", "0")
    with pytest.raises(ConfigError, match="HEXFLOW_TIME_SCALE"):
        load(MeshSettings)


def test_passwords_never_show_in_a_representation(monkeypatch):
    """Printing settings reveals no secret."""
    monkeypatch.setenv("HEXFLOW_KAFKA__SASL_PASSWORD", "hunter2")
    monkeypatch.setenv("HEXFLOW_REDIS__PASSWORD", "hunter3")
    assert "hunter" not in repr(load(MeshSettings))


def test_a_map_that_is_no_json_is_a_wrong_setting(monkeypatch):
    """A person is told which setting and how it is written, not shown a traceback."""
    monkeypatch.setenv("DISPATCHER_TENANT_SLO_S", "{bad")
    with pytest.raises(ConfigError, match=r"tenant_slo_s.*JSON"):
        load(DispatcherSettings)


@pytest.mark.parametrize(
    ("variable", "cls"),
    [("DISPATCHER_POLICY", DispatcherSettings), ("TUNER_POLICY", TunerSettings)],
)
def test_an_unknown_policy_is_refused_with_the_known_ones(monkeypatch, variable, cls):
    """Every service that runs a policy knows its name before it starts."""
    monkeypatch.setenv(variable, "nope")
    with pytest.raises(ConfigError, match=r"unknown policy 'nope'; known: .*hexgen-flow"):
        load(cls)
    monkeypatch.setenv(variable, "hexgen_flow")
    with pytest.raises(ConfigError, match=r"did you mean hexgen-flow\?"):
        load(cls)


def test_every_variable_name_is_known():
    """The list of variables covers nested groups."""
    names = variable_names(MeshSettings, "HEXFLOW_")
    assert {"HEXFLOW_TIME_SCALE", "HEXFLOW_REDIS__KEY_PREFIX", "HEXFLOW_PROBES__PORT"} <= names
