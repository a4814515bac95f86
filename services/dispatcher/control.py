"""What the tuner says on `control`, as the dispatcher applies it; and which queries are cancelled.

Of each key the highest revision counts, whatever the order of arrival. A tuner that dies leaves
its last good values in force.
"""

from collections.abc import Iterable

from shared.contracts.messages import (
    AlphaUpdate,
    CancelQuery,
    ControlMessage,
    SpeedUpdate,
    WorkflowProfile,
)
from shared.domain.instance import InstanceSpec
from shared.scheduling.policies import make_policy
from shared.scheduling.policy import Policy
from shared.scheduling.profiles import Predictor

MAX_CANCELLED = 200_000
SPEED_BOUNDS = (0.01, 100.0)  # beyond these a learned factor is an error, not a speed


class Control:
    """Policies per pool, the predictor, and instance speeds.

    Args:
        policy: Registry name of the policy.
        alpha: α of a pool that `control` names none for.
    """

    def __init__(self, policy: str, alpha: float) -> None:
        self._policy = policy
        self._alpha = alpha
        self._policies: dict[str, Policy] = {}
        self._alphas: dict[str, float] = {}
        self._revisions: dict[str, int] = {}
        self.predictor = Predictor()
        self.speeds: dict[str, float] = {}
        self.hits: dict[str, float] = {}
        make_policy(policy, alpha)  # a wrong name or α fails at start, not at the first call

    def apply(self, message: ControlMessage) -> bool:
        """Take one control message; returns whether it was newer than what is in force."""
        key = _key(message)
        if message.revision <= self._revisions.get(key, -1):
            return False
        self._revisions[key] = message.revision
        if isinstance(message, AlphaUpdate):
            self._alphas[message.pool] = message.alpha
            if message.pool in self._policies:
                self._policies[message.pool].set_alpha(message.alpha)
        elif isinstance(message, WorkflowProfile):
            self.predictor.learn(message.shape)
        else:
            lowest, highest = SPEED_BOUNDS
            self.speeds[message.instance_id] = max(lowest, min(highest, message.factor))
            self.hits[message.instance_id] = message.hit_factor
        return True

    def policy(self, pool: str) -> Policy:
        """Return the policy object of a pool: α and a policy's own state are per pool."""
        found = self._policies.get(pool)
        if found is None:
            found = make_policy(self._policy, self.alpha(pool))
            self._policies[pool] = found
        return found

    def alpha(self, pool: str) -> float:
        """Return α in force in a pool."""
        return self._alphas.get(pool, self._alpha)


def _key(message: ControlMessage) -> str:
    if isinstance(message, AlphaUpdate):
        return f"alpha/{message.pool}"
    if isinstance(message, WorkflowProfile):
        return f"profile/{message.shape.workflow}"
    if isinstance(message, SpeedUpdate):
        return f"speed/{message.instance_id}"
    raise TypeError(type(message).__name__)


def pool_of(model: str, specs: Iterable[InstanceSpec]) -> str:
    """Return the pool that serves a model: the base model's name.

    An adapter belongs to the pool of its base model; of several, to the first by name.
    """
    bases = {spec.model for spec in specs if model == spec.model or model in spec.adapters}
    return model if model in bases or not bases else min(bases)


class Cancellations:
    """Queries that are cancelled until their tombstone runs out; at most `MAX_CANCELLED`."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._due: set[str] = set()

    def add(self, tombstone: CancelQuery, now_s: float) -> bool:
        """Take a tombstone; returns whether it is in force (mesh clock)."""
        if tombstone.until_s < now_s:
            return False
        known_s = self._until_s.pop(tombstone.query_id, 0.0)
        self._until_s[tombstone.query_id] = max(known_s, tombstone.until_s)
        self._due.add(tombstone.query_id)
        if len(self._until_s) > MAX_CANCELLED:
            del self._until_s[next(iter(self._until_s))]
        return True

    def check(self, now_s: float, *ids: str) -> None:
        """Note that a call has come to wait: if it or its query is cancelled, it is due to end."""
        self._due.update(one for one in ids if self._until_s.get(one, -1.0) >= now_s)

    def take_due(self) -> list[str]:
        """Return the queries whose waiting calls have to end now, each once."""
        due = sorted(self._due)
        self._due.clear()
        return due

    def forget_expired(self, now_s: float) -> None:
        """Drop tombstones that ran out."""
        for query_id in [q for q, until_s in self._until_s.items() if until_s < now_s]:
            del self._until_s[query_id]
