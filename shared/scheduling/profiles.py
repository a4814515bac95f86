"""Predicts lengths and times of calls, stages and what remains of a query.

Every number comes from `WorkflowShape`s: the built-in priors, or what the tuner learned. Nothing
reads a call's true output length. Times are cached per pool of instances, so that a prediction
costs a look-up.

The rule for the prompt length a producer claims (`input_tokens`): it is believed where it lies
within a factor of `TRUST_FACTOR` of the reference, which is the prompt's size in bytes divided by
the learned bytes per token where the prompt is at hand, else the learned mean of the stage;
otherwise the reference is used. For a stage nothing is known of, and no prompt at hand, the claim
is used. The result is at least 1 and at most the longest context.

A prediction from the text's size can be far above the truth, so it rules no instance out: there the
fewest tokens that such a text can have decide (`least_input_tokens`).
"""

from collections.abc import Mapping, Sequence

import msgspec

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.domain.profile import StageEstimate, WorkflowShape
from shared.scheduling.latency import service_s
from shared.scheduling.policy import InstanceView
from shared.scheduling.shapes import default_shapes, remaining_after, shape_from_trace

__all__ = [
    "FleetTimes",
    "Predictor",
    "default_shapes",
    "shape_from_trace",
]

Member = InstanceView | InstanceSpec

TRUST_FACTOR = 4.0
BYTES_PER_TOKEN = 4.0

# Measured with SmolLM2's tokens: prose 3.5 to 5 bytes per token, deeply indented code 5.7, a table
# ruled with dashes 7.4, the longest English words 11; only spaces or dashes alone have more than
# 16. A lower value would refuse prompts that fit; a higher one would only send more of those that
# do not to an engine, which counts them and refuses too.
MOST_BYTES_PER_TOKEN = 16
MAX_CONTEXT_TOKENS = 10_000_000
MAX_CACHED_POOLS = 64
MAX_CACHED_TIMES = 10_000

# Prior of a stage nothing is known of, and how many more like it are expected to follow. One more
# leaves half of what is left for the rest of the query each time, so that neither the first
# nor the last stage of an unknown workflow is starved.
UNKNOWN_STAGE = StageEstimate(input_tokens=1_000, output_tokens=200)
UNKNOWN_REMAINING = 1.0

# Costs stages while no instance is known yet: only their proportions matter then.
REFERENCE_INSTANCE = InstanceSpec(
    instance_id="reference",
    gpu="A100",
    latency=LatencyModel(prefill_s_per_token=1 / 5_000, weights_s=0.035),
)


class FleetTimes:
    """Expected times on one pool of instances, remembered once computed.

    Args:
        shapes: Workflow name -> shape.
        pool: (instance, learned speed factor); empty stands for a reference instance.
    """

    def __init__(
        self,
        shapes: Mapping[str, WorkflowShape],
        pool: Sequence[tuple[InstanceSpec, float]],
    ) -> None:
        self._shapes = shapes
        self._pool = tuple(pool) or ((REFERENCE_INSTANCE, 1.0),)
        self._stage_s: dict[tuple[str, str], float] = {}
        self._remaining_s: dict[tuple[str, str, int], float] = {}
        self._call_s: dict[tuple[str, str], float] = {}
        self._work_after_s: dict[tuple[str, str, int], float] = {}

    def call_s(self, workflow: str, stage: str) -> float:
        """Return the expected service time of one call of a stage, mean over the pool, seconds."""
        key = (workflow, stage)
        cached = self._call_s.get(key)
        if cached is None:
            self._make_room()
            estimate = stage_estimate(self._shapes, workflow, stage)
            one = msgspec.structs.replace(estimate, max_output_tokens=estimate.output_tokens)
            cached = self._call_s[key] = self._mean_service_s(one)
        return cached

    def work_after_s(self, workflow: str, stage: str, iteration: int) -> float:
        """Return the expected service times of all calls after an occurrence, together, seconds."""
        key = (workflow, stage, iteration)
        cached = self._work_after_s.get(key)
        if cached is None:
            self._make_room()
            counts = expected_remaining(self._shapes, workflow, stage, iteration)
            cached = self._work_after_s[key] = sum(
                count
                * max(1.0, stage_estimate(self._shapes, workflow, later).siblings)
                * self.call_s(workflow, later)
                for later, count in counts.items()
            )
        return cached

    def stage_s(self, workflow: str, stage: str) -> float:
        """Return the expected duration of a stage: its longest sibling, mean over the pool."""
        key = (workflow, stage)
        cached = self._stage_s.get(key)
        if cached is None:
            self._make_room()
            estimate = stage_estimate(self._shapes, workflow, stage)
            cached = self._stage_s[key] = self._mean_service_s(estimate)
        return cached

    def remaining_s(self, workflow: str, stage: str, iteration: int) -> float:
        """Return the expected duration of everything after an occurrence of a stage."""
        key = (workflow, stage, iteration)
        cached = self._remaining_s.get(key)
        if cached is None:
            self._make_room()
            counts = expected_remaining(self._shapes, workflow, stage, iteration)
            cached = sum(count * self.stage_s(workflow, later) for later, count in counts.items())
            self._remaining_s[key] = cached
        return cached

    def _make_room(self) -> None:
        # Names come from producers: one that puts ids into them must not fill the memory.
        caches = (self._stage_s, self._remaining_s, self._call_s, self._work_after_s)
        if sum(len(cache) for cache in caches) >= MAX_CACHED_TIMES:
            for cache in caches:
                cache.clear()

    def _mean_service_s(self, estimate: StageEstimate) -> float:
        times = [_stage_on(spec, factor, estimate) for spec, factor in self._pool]
        return sum(times) / len(times)


class Predictor:
    """Predicts from workflow shapes.

    Args:
        shapes: Workflow name -> shape; None uses the built-in priors. Later ones come by `learn`.
    """

    def __init__(self, shapes: Mapping[str, WorkflowShape] | None = None) -> None:
        self._shapes = dict(default_shapes() if shapes is None else shapes)
        self._by_value: dict[tuple[tuple[InstanceSpec, float], ...], FleetTimes] = {}
        # Specs are kept with the ids taken of them: an id is only valid while its object lives.
        self._by_identity: dict[
            tuple[tuple[int, float], ...], tuple[tuple[InstanceSpec, ...], FleetTimes]
        ] = {}

    @property
    def shapes(self) -> Mapping[str, WorkflowShape]:
        """The shapes in force."""
        return self._shapes

    def learn(self, shape: WorkflowShape) -> None:
        """Use a new shape for its workflow from now on."""
        self._shapes = {**self._shapes, shape.workflow: shape}
        self._forget()

    def input_tokens(
        self,
        workflow: str,
        stage: str,
        estimate: int | None = None,
        *,
        prompt_bytes: int | None = None,
        limit_tokens: int = MAX_CONTEXT_TOKENS,
    ) -> int:
        """Return the predicted prompt length, tokens (see the module's text for the rule).

        Args:
            workflow: Workflow name.
            stage: Stage name.
            estimate: What the producer claims; None when it claims nothing.
            prompt_bytes: Size of the prompt's text where it is at hand, bytes.
            limit_tokens: Longest context of any instance, tokens.
        """
        known = _known_stage(self._shapes, workflow, stage)
        if prompt_bytes:
            per_token = (known.bytes_per_token if known else 0.0) or BYTES_PER_TOKEN
            reference: float | None = prompt_bytes / per_token
        else:
            reference = known.input_tokens if known else None
        if reference is None:
            chosen: float = UNKNOWN_STAGE.input_tokens if estimate is None else estimate
        elif estimate is None or not _is_near(estimate, reference):
            chosen = reference
        else:
            chosen = estimate
        return max(1, min(round(chosen), limit_tokens))

    def least_input_tokens(
        self, workflow: str, stage: str, estimate: int | None, prompt_bytes: int | None
    ) -> int:
        """Return the prompt length that rules instances out, tokens.

        That is the predicted length where it is the producer's count or there is no text, else the
        fewest tokens that so much text can have.

        Args:
            workflow: Workflow name.
            stage: Stage name.
            estimate: What the producer claims; None when it claims nothing.
            prompt_bytes: Size of the prompt's text where it is at hand, bytes.
        """
        predicted = self.input_tokens(workflow, stage, estimate, prompt_bytes=prompt_bytes)
        if prompt_bytes is None or predicted == estimate:
            return predicted
        return max(1, min(predicted, prompt_bytes // MOST_BYTES_PER_TOKEN))

    def output_tokens(self, workflow: str, stage: str, max_tokens: int | None = None) -> float:
        """Return the predicted output length of one call, tokens, at most `max_tokens`."""
        learned = stage_estimate(self._shapes, workflow, stage).output_tokens
        return learned if max_tokens is None else min(learned, float(max_tokens))

    def stage_s(
        self,
        workflow: str,
        stage: str,
        iteration: int,  # noqa: ARG002 - lengths do not depend on the iteration yet
        members: Sequence[Member],
    ) -> float:
        """Return the expected duration of a stage, seconds.

        The longest of its siblings, on an idle instance, mean over the instances.

        Args:
            workflow: Workflow name.
            stage: Stage name.
            iteration: Earlier occurrences of the stage in the query.
            members: The instances that may serve it; empty costs it on a reference instance.
        """
        return self.fleet_times(members).stage_s(workflow, stage)

    def remaining_s(
        self, workflow: str, stage: str, iteration: int, members: Sequence[Member]
    ) -> float:
        """Return the expected duration of everything after this occurrence, seconds."""
        return self.fleet_times(members).remaining_s(workflow, stage, iteration)

    def isolated_s(self, workflow: str, stage: str, members: Sequence[Member]) -> float:
        """Return the expected time of a whole query that begins with a stage, seconds.

        Five times this is the SLO of a query that names none.
        """
        times = self.fleet_times(members)
        return times.stage_s(workflow, stage) + times.remaining_s(workflow, stage, 0)

    def fleet_times(self, members: Sequence[Member]) -> FleetTimes:
        """Return the remembered times of a pool of instances."""
        pool = tuple(_with_factor(member) for member in members)
        identity = tuple((id(spec), factor) for spec, factor in pool)
        found = self._by_identity.get(identity)
        if found is not None:
            return found[1]
        if max(len(self._by_identity), len(self._by_value)) >= MAX_CACHED_POOLS:
            self._forget()
        value = tuple(sorted(pool, key=_by_instance))
        times = self._by_value.get(value)
        if times is None:
            times = self._by_value[value] = FleetTimes(self._shapes, value)
        self._by_identity[identity] = (tuple(spec for spec, _ in pool), times)
        return times

    def _forget(self) -> None:
        self._by_identity.clear()
        self._by_value.clear()


def stage_estimate(shapes: Mapping[str, WorkflowShape], workflow: str, stage: str) -> StageEstimate:
    """Return what is expected of a stage.

    An unknown stage of a known workflow is expected to be the mean of the known ones.
    """
    known = _known_stage(shapes, workflow, stage)
    if known is not None:
        return known
    shape = shapes.get(workflow)
    if shape is None or not shape.stages:
        return UNKNOWN_STAGE
    others = shape.stages.values()
    return StageEstimate(
        input_tokens=sum(other.input_tokens for other in others) / len(others),
        output_tokens=sum(other.output_tokens for other in others) / len(others),
    )


def expected_remaining(
    shapes: Mapping[str, WorkflowShape], workflow: str, stage: str, iteration: int
) -> Mapping[str, float]:
    """Return stage -> expected later occurrences after (stage, iteration).

    After a stage nothing is known of: in a known workflow the mean over the first iterations of
    its stages, else `UNKNOWN_REMAINING` more of the same.
    """
    shape = shapes.get(workflow)
    if shape is None or not shape.remaining:
        return {stage: UNKNOWN_REMAINING}
    found = remaining_after(shape, stage, iteration)
    if found is not None:
        return found
    firsts = [counts for key, counts in shape.remaining.items() if key.endswith("/0")]
    later = sorted({name for counts in firsts for name in counts})
    return {name: sum(counts.get(name, 0.0) for counts in firsts) / len(firsts) for name in later}


def _known_stage(
    shapes: Mapping[str, WorkflowShape], workflow: str, stage: str
) -> StageEstimate | None:
    shape = shapes.get(workflow)
    return shape.stages.get(stage) if shape else None


def _is_near(estimate: float, reference: float) -> bool:
    return reference <= estimate * TRUST_FACTOR and estimate <= reference * TRUST_FACTOR


def _stage_on(spec: InstanceSpec, factor: float, estimate: StageEstimate) -> float:
    cached = estimate.cached_tokens if spec.prefix_caching else 0.0
    return service_s(
        spec,
        input_tokens=estimate.input_tokens,
        cached_tokens=min(cached, max(0.0, estimate.input_tokens - 1.0)),
        output_tokens=estimate.max_output_tokens or estimate.output_tokens,
        speed_factor=factor,
    )


def _with_factor(member: Member) -> tuple[InstanceSpec, float]:
    if isinstance(member, InstanceSpec):
        return member, 1.0
    return member.spec, member.speed_factor


def _by_instance(pair: tuple[InstanceSpec, float]) -> tuple[str, float]:
    return pair[0].instance_id, pair[1]
