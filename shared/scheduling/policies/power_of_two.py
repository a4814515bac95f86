"""`power-of-two`: of two instances drawn at random, the one with the shorter queue.

Source: Ray Serve's default router, `PowerOfTwoChoicesRequestRouter` (ray-project/ray,
python/ray/serve/_private/request_router/pow_2_router.py and request_router.py): two distinct
replicas are drawn (i uniform of n, j uniform of the other n - 1, so every ordered pair is equally
likely); of those that are not full, the one with fewer ongoing requests is chosen; a tie goes to
the one drawn first. Analysis: Mitzenmacher, The power of two choices in randomized load balancing
(IEEE TPDS 12(10), 2001).

Differences: the draw is a hash of the call's id, so that a run can be repeated (and a call drawn
again, after a retry, draws the same pair). Ray draws first and tries again when both are full;
here full instances are not drawn at all.
"""

from collections.abc import Mapping, Sequence

from shared.scheduling.dispatch import text_key
from shared.scheduling.policies.first_come import FirstCome, choice_of
from shared.scheduling.policies.least_outstanding import outstanding_score
from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall


def two_candidates(key: int, num_instances: int) -> tuple[int, int]:
    """Return two distinct positions drawn for a call, first and second (leaf).

    Args:
        key: Any number in [0, 2**31) that stands for the call, as `dispatch.text_key` gives it.
        num_instances: How many can be drawn, >= 1; of one, both positions are 0.
    """
    if num_instances < 2:
        return 0, 0
    first = key % num_instances
    second = (key // num_instances) % (num_instances - 1)
    if second >= first:
        second += 1
    return first, second


class PowerOfTwo(FirstCome):
    """Looks at two instances only, as a router does that has to ask each for its queue."""

    name = "power-of-two"

    def choose(
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],  # noqa: ARG002 - counts calls only
        now_s: float,  # noqa: ARG002
    ) -> Choice | None:
        """Return the less busy one of two instances."""
        ordered = sorted(views, key=lambda view: view.spec.instance_id)
        positions = two_candidates(text_key(call.request_id), len(ordered))
        first, second = (ordered[position] for position in positions)
        first_score = outstanding_score(first.num_waiting, first.num_running)
        second_score = outstanding_score(second.num_waiting, second.num_running)
        if second_score > first_score:
            return choice_of(second, second_score)
        return choice_of(first, first_score)
