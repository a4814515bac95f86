"""`ratio`: the score as the authors of HexGen-Flow released it, with its faults.

Source: the simulator released with HexGen-Flow (arXiv 2505.05286; Relaxed-System-Lab/Hexgen-Flow,
simulator/core/policies/routing/workload_balance.py, read in a public copy of it,
yinhan-rq/RL-Router). Both terms are ratios to a *reference instance*, the first of the pool:

    priority(m) = α · t_comp(reference) / t_comp(m)
                  - (1 - α) · work(m) · weight(m) / work(reference)

The highest wins, the first of equals; while the reference has no work yet, it gets the call.
weight is 0.5 for A6000 and L40S and 1 for everything else, as hard-coded there.

work(m) is *cumulative*: the sum of t_comp of all calls ever bound to m, never decremented. It
balances what was handed out since the start, not what is in progress: a burst that went wrong is
not seen, and an instance that joins late gets every call until it has caught up. That is the
variant's definition and kept. Queues are ordered by urgency, as in `hexgen-flow`.

Differences: the release costs a call by a table per step; here t_comp is the mesh's own estimate.
The reference is the first candidate by id (in the built-in fleets an A100, as in theirs).
"""

from collections.abc import Mapping, Sequence

from shared.scheduling.policies.first_come import FirstCome
from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall
from shared.scheduling.urgency import latest_start_s

HALF_WEIGHT_GPUS = frozenset({"A6000", "L40S"})


def work_weight(gpu: str) -> float:
    """Return the weight of an instance's cumulative work."""
    return 0.5 if gpu in HALF_WEIGHT_GPUS else 1.0


def ratio_score(
    alpha: float,
    t_comp_s: float,
    reference_t_comp_s: float,
    weighted_work_s: float,
    reference_work_s: float,
) -> float:
    """Return the released priority of an instance, highest wins (leaf).

    Args:
        alpha: Weight of the compute term, in [0, 1].
        t_comp_s: Expected service time of the call there, seconds.
        reference_t_comp_s: The same on the reference instance, seconds.
        weighted_work_s: Cumulative work of the instance times its weight, seconds.
        reference_work_s: Cumulative work of the reference instance, seconds, > 0.
    """
    cost_ratio = reference_t_comp_s / max(t_comp_s, 1e-9)
    return alpha * cost_ratio - (1.0 - alpha) * (weighted_work_s / reference_work_s)


class CumulativeRatio(FirstCome):
    """The released variant: ratios to a reference instance, cumulative work.

    Args:
        alpha: Weight of the compute term, in [0, 1].
    """

    name = "ratio"

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._work_s: dict[str, float] = {}

    def choose(
        self,
        call: WaitingCall,  # noqa: ARG002 - its costs say it all
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],
        now_s: float,  # noqa: ARG002
    ) -> Choice | None:
        """Return the instance of the highest priority and add the call to its work for good."""
        ordered = sorted(views, key=lambda view: view.spec.instance_id)
        best, priority = ordered[0], 0.0
        if self._work_of(best) > 0.0:
            scores = self._scores(ordered, costs)
            position = max(range(len(scores)), key=scores.__getitem__)
            best, priority = ordered[position], scores[position]
        name = best.spec.instance_id
        t_queue_s = self._work_of(best)
        self._work_s[name] = t_queue_s + costs[name].t_comp_s
        return Choice(instance_id=name, score=priority, t_queue_s=t_queue_s, alpha=self._alpha)

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:
        """Return the latest start: smallest first is most urgent first."""
        return latest_start_s(call.ready_at_s, call.t_slo_s, t_comp_s)

    def set_alpha(self, alpha: float) -> None:
        """Use a new α from now on."""
        self._alpha = alpha

    def _scores(self, ordered: Sequence[InstanceView], costs: Mapping[str, Cost]) -> list[float]:
        reference = ordered[0]
        return [
            ratio_score(
                self._alpha,
                costs[view.spec.instance_id].t_comp_s,
                costs[reference.spec.instance_id].t_comp_s,
                self._work_of(view) * work_weight(view.spec.gpu),
                self._work_of(reference),
            )
            for view in ordered
        ]

    def _work_of(self, view: InstanceView) -> float:
        return self._work_s.get(view.spec.instance_id, 0.0)
