"""What the tuner knows of the mesh."""

from services.tuner.tables import Tables
from shared.contracts.codec import encode
from shared.contracts.messages import InstanceState, SpeedUpdate
from shared.ports.broker import Record, TopicPartition
from shared.runtime.metrics import Metrics
from tests.support.scheduling import make_spec

SPEED = 'hexflow_speed_factor{instance="",service="tuner",target="a"}'


def state_record() -> Record:
    """Return the record of an instance that serves."""
    state = InstanceState(instance_id="a", phase="serving", epoch=0, spec=make_spec("a"))
    return Record(
        tp=TopicPartition("instance-states", 0),
        offset=0,
        append_unix_s=0.0,
        key=b"a",
        value=encode(state),
    )


def shown(metrics: Metrics) -> list[str]:
    """Return the lines about speeds."""
    return [line for line in metrics.render().decode().splitlines() if line.startswith(SPEED)]


def test_an_instance_is_shown_as_fast_as_its_profile_until_it_proves_otherwise():
    """A panel of speeds shows every instance from its first state on, and a state forgets none."""
    metrics = Metrics("tuner")
    tables = Tables(metrics)
    assert shown(metrics) == []
    tables.on_state(state_record())
    assert shown(metrics) == [f"{SPEED} 1.0"]
    tables.take(SpeedUpdate(instance_id="a", factor=3.0, revision=1))
    tables.on_state(state_record())
    assert shown(metrics) == [f"{SPEED} 3.0"]
