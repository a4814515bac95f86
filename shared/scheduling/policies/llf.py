"""`llf`: least laxity first, behind the fewest calls in progress.

Source: Dertouzos and Mok, Multiprocessor on-line scheduling of hard-real-time tasks (IEEE TSE
15(12), 1989): laxity = deadline - now - computation time left, smallest first. All waiting calls
lose laxity alike, so `deadline - computation time` orders them for good.

The deadline is the query's own and the computation time this call's: the work of later stages is
not known without a model of the workflow. (HexGen-Flow's urgency is laxity too, of the call
within its stage's budget: see `shared.scheduling.urgency`.)
"""

from shared.scheduling.policies.least_outstanding import LeastOutstanding
from shared.scheduling.policy import WaitingCall


def laxity_s(deadline_s: float, now_s: float, t_comp_s: float) -> float:
    """Return how long a call can still wait and meet a deadline, smallest first (leaf).

    Args:
        deadline_s: The query's deadline, seconds.
        now_s: Present instant, same clock.
        t_comp_s: Expected service time on this instance, seconds.
    """
    return deadline_s - now_s - t_comp_s


class LeastLaxity(LeastOutstanding):
    """Dispatch by count of calls, queues by laxity."""

    name = "llf"

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:
        """Return the instant at which the call has no laxity left."""
        return laxity_s(call.deadline_s, 0.0, t_comp_s)
