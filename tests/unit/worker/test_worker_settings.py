"""The worker's settings, and the instance they name."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from services.worker.params import WorkerParams
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError
from shared.runtime.settings import load


def test_built_in_instance_is_found() -> None:
    """An id of a built-in fleet gives that instance; its batch size is the capacity."""
    settings = WorkerSettings(instance_id="l40s-0", fleet="hetero-1")
    spec = settings.spec()
    assert (spec.instance_id, spec.gpu) == ("l40s-0", "L40S")
    assert settings.params(spec, mesh_drain_s=30.0).capacity == spec.max_num_seqs


def test_fleet_file_wins(tmp_path: Path) -> None:
    """An instance can be described in a file of one's own."""
    path = tmp_path / "fleet.toml"
    path.write_text('[[instance]]\ngpu = "A100"\nid = "mine"\nmax_num_seqs = 7\n')
    settings = WorkerSettings(instance_id="mine", fleet_file=path)
    assert settings.params(settings.spec(), mesh_drain_s=30.0).capacity == 7


def test_unknown_instance_is_refused_with_the_nearest_id() -> None:
    """A misspelt instance id says what the fleet has."""
    settings = WorkerSettings(instance_id="a10-0", fleet="hetero-1")
    with pytest.raises(ConfigError, match=r"did you mean a100-0\?"):
        settings.spec()


def test_missing_fleet_file_is_refused(tmp_path: Path) -> None:
    """A fleet file that cannot be read is named."""
    settings = WorkerSettings(instance_id="a", fleet_file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="WORKER_FLEET_FILE"):
        settings.spec()


def test_instance_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an instance id there is nothing to serve, and the variable is named."""
    monkeypatch.delenv("WORKER_INSTANCE_ID", raising=False)
    with pytest.raises(ConfigError, match="WORKER_INSTANCE_ID"):
        load(WorkerSettings, {})


def test_misspelt_variable_is_refused() -> None:
    """A variable that names no setting is refused with the nearest one."""
    with pytest.raises(ConfigError, match="WORKER_CAPACITY"):
        load(WorkerSettings, {"WORKER_CAPCITY": "3"})


@pytest.mark.parametrize("instance_id", ["", "a/b", "-a", "x" * 65, "a\n"])
def test_instance_id_must_suit_topics_and_keys(instance_id: str) -> None:
    """An id that Kafka or Redis could not carry is refused."""
    with pytest.raises(ValidationError):
        WorkerSettings(instance_id=instance_id)


def test_reports_must_fit_between_heartbeats() -> None:
    """A shortest time between reports above the longest one is a contradiction."""
    with pytest.raises(ValidationError, match="coalesce_s"):
        WorkerSettings(instance_id="a", coalesce_s=2.0, heartbeat_s=1.0)


def test_drain_leaves_time_to_say_goodbye() -> None:
    """Unless set, running calls get the mesh's drain time less what the rest may take."""
    settings = WorkerSettings(instance_id="a100-0", abort_s=4.0)
    assert settings.params(settings.spec(), mesh_drain_s=30.0).drain_s == 22.0
    assert settings.params(settings.spec(), mesh_drain_s=3.0).drain_s == 0.0
    own = WorkerSettings(instance_id="a100-0", drain_s=7.0)
    assert own.params(own.spec(), mesh_drain_s=30.0).drain_s == 7.0


def test_settings_and_parameters_have_the_same_defaults() -> None:
    """What a process runs with by default is what the core documents."""
    settings = WorkerSettings(instance_id="a100-0")
    params = settings.params(settings.spec(), mesh_drain_s=33.0)
    assert params == WorkerParams(instance_id="a100-0", capacity=64)


def test_bounds_must_be_positive() -> None:
    """A worker that can hold or run nothing cannot be made."""
    with pytest.raises(ValueError, match="capacity"):
        WorkerParams(instance_id="a", capacity=0)
