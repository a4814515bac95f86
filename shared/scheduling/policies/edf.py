"""`edf`: earliest deadline first, behind the fewest calls in progress.

Source: Liu and Layland, Scheduling algorithms for multiprogramming in a hard-real-time
environment (JACM 20(1), 1973), deadline driven scheduling. The deadline is the query's own, as
its user set it: no budget is split over stages. That is the order a team gets by handing each
query's deadline through, without any model of the workflow. (Running calls are not preempted, as
in any engine.)
"""

from shared.scheduling.policies.least_outstanding import LeastOutstanding
from shared.scheduling.policy import WaitingCall


class EarliestDeadline(LeastOutstanding):
    """Dispatch by count of calls, queues by the deadline of the call's query."""

    name = "edf"

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:  # noqa: ARG002
        """Return the query's deadline."""
        return call.deadline_s
