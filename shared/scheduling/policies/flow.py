"""`hexgen-flow`: the paper's policy, and its two ablations.

Source: HexGen-Flow (arXiv 2505.05286): workload-balanced dispatching (WB) plus a priority queue
by urgency (PQ) in each instance. `wb+fcfs` drops the queue, `rr+pq` drops the dispatching.
"""

from collections.abc import Mapping, Sequence

from shared.scheduling.dispatch import (
    T_QUEUE_FLOOR_S,
    beta_s2,
    floored_queue_s,
    flow_score,
    highest,
)
from shared.scheduling.policies.round_robin import RoundRobinFcfs
from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall
from shared.scheduling.urgency import latest_start_s


class HexgenFlow:
    """Score-based dispatch, urgency-ordered queues.

    Args:
        alpha: Weight of the compute term, in [0, 1].
    """

    name = "hexgen-flow"

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def choose(
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],
        now_s: float,  # noqa: ARG002 - the score does not depend on the time of day
    ) -> Choice:
        """Return the instance with the highest score."""
        mean_s = sum(costs[v.spec.instance_id].t_comp_s for v in views) / len(views)
        beta = beta_s2(mean_s)

        def score(view: InstanceView) -> float:
            t_queue_s = floored_queue_s(view.backlog_s, T_QUEUE_FLOOR_S)
            return flow_score(self._alpha, beta, t_queue_s, costs[view.spec.instance_id].t_comp_s)

        best, best_score = highest(call, views, score)
        return Choice(
            instance_id=best.spec.instance_id,
            score=best_score,
            t_queue_s=floored_queue_s(best.backlog_s, T_QUEUE_FLOOR_S),
            alpha=self._alpha,
            beta_s2=beta,
        )

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:
        """Return the latest start: smallest first is most urgent first."""
        return latest_start_s(call.ready_at_s, call.t_slo_s, t_comp_s)

    def admit(
        self,
        call: WaitingCall,  # noqa: ARG002
        views: Sequence[InstanceView],  # noqa: ARG002
        now_s: float,  # noqa: ARG002
    ) -> str | None:
        """Let everything in, as the paper does."""
        return None

    def set_alpha(self, alpha: float) -> None:
        """Use a new α from now on."""
        self._alpha = alpha


class FlowFcfs(HexgenFlow):
    """`wb+fcfs`: the paper's dispatch, first come first served queues."""

    name = "wb+fcfs"

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:  # noqa: ARG002
        """Return the instant the call became ready."""
        return call.ready_at_s


class RoundRobinUrgency(RoundRobinFcfs):
    """`rr+pq`: round-robin dispatch, the paper's urgency queues."""

    name = "rr+pq"

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:
        """Return the latest start."""
        return latest_start_s(call.ready_at_s, call.t_slo_s, t_comp_s)
