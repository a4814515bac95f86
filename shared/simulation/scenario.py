"""What a simulated run is made of."""

import math
from collections.abc import Mapping

import msgspec

from shared.domain.instance import InstanceSpec
from shared.domain.profile import WorkflowShape
from shared.domain.trace import TraceQuery
from shared.errors import ConfigError
from shared.scheduling.policies import DEFAULT_ALPHA, REGISTRY, unknown_policy
from shared.simulation.engine_states import check_spec

MAX_DISPATCHERS = 1_024
MAX_LOOK_PAST = 64


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something that changes while a run goes on; None: stays as it is.

    Attributes:
        at_s: When: before anything else that happens at this instant, seconds.
        alpha: α from then on.
        shapes: What policies expect of workflows from then on; calls already bound keep theirs.
        believed_factors: What policies believe of speeds from then on, see `Scenario`.
        hit_factors: What they believe of prefix caches from then on, see `Scenario`.
        speed_factors: How fast instances really are from then on; the iteration in flight ends as
            it began.
        cold: Instances that find nothing in their prefix cache from then on; calls that are in
            their engine by then keep what they found.
    """

    at_s: float
    alpha: float | None = None
    shapes: Mapping[str, WorkflowShape] | None = None
    believed_factors: Mapping[str, float] | None = None
    hit_factors: Mapping[str, float] | None = None
    speed_factors: Mapping[str, float] | None = None
    cold: tuple[str, ...] | None = None


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
        one_by_one: Whether an idle engine begins with the first call that it is given, and others
            of the same instant join it in its next iteration; and whether a busy one goes on
            before it is given calls for those that have ended: what real engines do, which are
            given calls milliseconds later.
        speed_factors: instance_id -> real time divided by the latency model's (1 by default).
        believed_factors: What policies believe of them; None: the truth.
        hit_factors: instance_id -> share of the prompt tokens expected in its prefix cache that
            policies count on (1 by default).
        cold: Instances that find nothing in their prefix cache, whatever they say of themselves
            and policies believe.
        changes: What changes during the run, in order of time.
    """

    queries: tuple[TraceQuery, ...]
    fleet: tuple[InstanceSpec, ...]
    policy: str = "hexgen-flow"
    alpha: float = DEFAULT_ALPHA
    shapes: Mapping[str, WorkflowShape] = {}
    oracle: bool = False
    num_dispatchers: int = 1
    state_delay_s: float = 0.0
    hop_s: float = 0.0
    admission: int | None = None
    look_past: int = 0
    one_by_one: bool = False
    speed_factors: Mapping[str, float] = {}
    believed_factors: Mapping[str, float] | None = None
    hit_factors: Mapping[str, float] = {}
    cold: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    @property
    def believed(self) -> Mapping[str, float]:
        """What policies believe of speeds at first."""
        return self.speed_factors if self.believed_factors is None else self.believed_factors


def check_scenario(scenario: Scenario) -> None:
    """Refuse settings that make no run; queries are checked when they are laid out.

    Raises:
        ConfigError: Names the setting.
    """
    if scenario.policy not in REGISTRY:
        raise ConfigError(unknown_policy(scenario.policy))
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
    _check_factors(scenario.speed_factors, scenario.believed, scenario.hit_factors)
    before_s = 0.0
    for change in scenario.changes:
        if not (math.isfinite(change.at_s) and change.at_s >= before_s):
            msg = f"a change at {change.at_s} s is no instant after the one before"
            raise ConfigError(msg)
        before_s = change.at_s
        if change.alpha is not None and not 0.0 <= change.alpha <= 1.0:
            msg = f"the alpha of the change at {change.at_s:g} s is outside [0, 1]"
            raise ConfigError(msg)
        _check_factors(
            change.speed_factors or {}, change.believed_factors or {}, change.hit_factors or {}
        )


def _check_factors(
    speeds: Mapping[str, float], believed: Mapping[str, float], hits: Mapping[str, float]
) -> None:
    for instance_id, factor in [*speeds.items(), *believed.items()]:
        if not (math.isfinite(factor) and factor > 0.0):
            msg = f"speed factor {factor} of instance {instance_id} is not above 0"
            raise ConfigError(msg)
    for instance_id, factor in hits.items():
        if not 0.0 <= factor <= 1.0:
            msg = f"hit factor {factor} of instance {instance_id} is outside [0, 1]"
            raise ConfigError(msg)


def _is_duration(value_s: float) -> bool:
    return math.isfinite(value_s) and value_s >= 0.0
