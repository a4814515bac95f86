"""What a simulated run is made of."""

import math
from collections.abc import Mapping

import msgspec

from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.scheduling.policies import REGISTRY
from shared.simulation.engine_states import check_spec

MAX_DISPATCHERS = 1_024
MAX_LOOK_PAST = 64


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a workload, a fleet, a policy and how the mesh behaves.

    Attributes:
        queries: The workload, `arrival_s` and `slo_s` filled in (see `workload.prepare`).
        fleet: The instances, at least one; order does not matter.
        policy: Registry name of the policy.
        alpha: α, in [0, 1]; policies without one ignore it.
        shapes: Workflow name -> what policies expect of it; unknown workflows get a prior.
        oracle: Let policies know true output lengths and what really follows each stage.
        num_dispatchers: Dispatchers; each query belongs to one of them.
        state_delay_s: Age of an instance's state when a dispatcher sees it, seconds.
        hop_s: Time of one message between producer, dispatcher and instance, seconds.
        admission: Most calls an engine is given at a time; None means its `max_num_seqs`.
        look_past: How many calls that lack KV memory an instance looks past to find one that
            fits; 0, as the live worker does: the most urgent call blocks those behind it.
        speed_factors: instance_id -> real time divided by the latency model's (1 by default);
            it holds for the simulated instance and for what policies expect of it.
    """

    queries: tuple[TraceQuery, ...]
    fleet: tuple[InstanceSpec, ...]
    policy: str = "hexgen-flow"
    alpha: float = 0.1
    shapes: Mapping[str, WorkflowShape] = {}
    oracle: bool = False
    num_dispatchers: int = 1
    state_delay_s: float = 0.0
    hop_s: float = 0.0
    admission: int | None = None
    look_past: int = 0
    speed_factors: Mapping[str, float] = {}


def check_scenario(scenario: Scenario) -> None:
    """Refuse settings that make no run; queries are checked when they are laid out.

    Raises:
        ConfigError: Names the setting.
    """
    if scenario.policy not in REGISTRY:
        msg = f"unknown policy {scenario.policy!r}; known: {', '.join(sorted(REGISTRY))}"
        raise ConfigError(msg)
    faults = {
        "alpha is outside [0, 1]": not 0.0 <= scenario.alpha <= 1.0,
        f"num_dispatchers is outside 1..{MAX_DISPATCHERS}": (
            not 1 <= scenario.num_dispatchers <= MAX_DISPATCHERS
        ),
        "state_delay_s is no duration": not _is_duration(scenario.state_delay_s),
        "hop_s is no duration": not _is_duration(scenario.hop_s),
        f"look_past is outside 0..{MAX_LOOK_PAST}": not 0 <= scenario.look_past <= MAX_LOOK_PAST,
        "admission is below 1": scenario.admission is not None and scenario.admission < 1,
        "the fleet is empty": not scenario.fleet,
        "two instances of the fleet have the same id": (
            len({spec.instance_id for spec in scenario.fleet}) < len(scenario.fleet)
        ),
        "there are no queries": not scenario.queries,
    }
    for fault, is_present in faults.items():
        if is_present:
            raise ConfigError(fault)
    for spec in scenario.fleet:
        check_spec(spec)
    for instance_id, factor in scenario.speed_factors.items():
        if not (math.isfinite(factor) and factor > 0.0):
            msg = f"speed factor {factor} of instance {instance_id} is not above 0"
            raise ConfigError(msg)


def _is_duration(value_s: float) -> bool:
    return math.isfinite(value_s) and value_s >= 0.0
