"""How the command line starts the services: with variables that are settings of theirs."""

from pathlib import Path

import pytest

from services.cli.embedded import EmbeddedParams
from services.cli.options import mesh_settings
from services.cli.processes import ProcessesParams, mesh_variables, service_commands
from services.cli.workload import load_fleet
from services.dispatcher.params import DispatcherParams
from services.dispatcher.settings import DispatcherSettings
from services.gateway.settings import GatewaySettings
from services.text2sql.settings import AgentSettings
from services.tuner.params import TunerParams
from services.tuner.settings import TunerSettings
from services.worker.settings import WorkerSettings
from shared.runtime.settings import MeshSettings, load, variable_names
from shared.scheduling.policies import DEFAULT_ALPHA
from shared.simulation.scenario import Scenario

SETTINGS = {
    "services.worker": (WorkerSettings, "WORKER_"),
    "services.tuner": (TunerSettings, "TUNER_"),
    "services.dispatcher": (DispatcherSettings, "DISPATCHER_"),
    "services.text2sql": (AgentSettings, "TEXT2SQL_"),
    "services.gateway": (GatewaySettings, "GATEWAY_"),
}


@pytest.fixture
def params() -> ProcessesParams:
    """Return a mesh with a policy of its own, agents and gateways in front."""
    return ProcessesParams(
        fleet=load_fleet("hetero-1"),
        policy="vllm",
        alpha=0.02,
        agents=2,
        databases={"league": "sqlite:///league.db"},
        gateway_ports=(8_081, 8_082),
    )


def test_there_is_a_process_for_everything_that_was_asked_for(
    params: ProcessesParams, tmp_path: Path
):
    """Names are unique and tell the service first."""
    commands = service_commands(params, tmp_path)
    assert [command.name for command in commands] == [
        "worker-a100-0",
        "worker-a100-1",
        "worker-l40s-0",
        "worker-a6000-0",
        "tuner-0",
        "dispatcher-0",
        "dispatcher-1",
        "text2sql-0",
        "text2sql-1",
        "gateway-0",
        "gateway-1",
    ]
    few = ProcessesParams(fleet=params.fleet[:1], dispatchers=1, tunes=False)
    names = [command.name for command in service_commands(few, tmp_path)]
    assert names == ["worker-a100-0", "dispatcher-0"]


def test_every_variable_is_a_setting_and_says_what_was_asked(
    params: ProcessesParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The services' own settings accept them; policy, instances, databases and ports arrive."""
    loaded = []
    for command in service_commands(params, tmp_path):
        cls, prefix = SETTINGS[command.module]
        assert set(command.variables) <= variable_names(cls, prefix)
        with monkeypatch.context() as patch:
            for name, value in command.variables.items():
                patch.setenv(name, value)
            loaded.append(load(cls))
    workers = [one for one in loaded if isinstance(one, WorkerSettings)]
    assert [one.spec() for one in workers] == list(params.fleet)
    assert {one.policy for one in loaded if isinstance(one, DispatcherSettings)} == {"vllm"}
    assert {one.alpha for one in loaded if isinstance(one, DispatcherSettings)} == {0.02}
    assert [one.port for one in loaded if isinstance(one, GatewaySettings)] == [8_081, 8_082]
    agents = [one.params(30.0) for one in loaded if isinstance(one, AgentSettings)]
    assert [one.agent_id for one in agents] == ["text2sql-0", "text2sql-1"]
    assert all(one.databases == params.databases for one in agents)


def test_children_get_the_meshs_settings(monkeypatch: pytest.MonkeyPatch):
    """Addresses, time scale and prefix given as options reach the children's environment."""
    settings = mesh_settings(kafka="h:1", redis="redis://h:2/3", time_scale=7.0)
    for name, value in mesh_variables(settings).items():
        monkeypatch.setenv(name, value)
    assert load(MeshSettings) == settings


def test_alpha_has_one_default():
    """Dispatchers, tuners, the embedded mesh and the simulator start with the same α."""
    fleet = load_fleet("hetero-1")
    found = {
        DispatcherParams(dispatcher_id="d").alpha,
        DispatcherSettings.model_fields["alpha"].default,
        TunerParams().initial_alpha,
        TunerSettings.model_fields["initial_alpha"].default,
        EmbeddedParams(fleet=fleet).alpha,
        Scenario(queries=(), fleet=fleet).alpha,
    }
    assert found == {DEFAULT_ALPHA}
