"""`least-outstanding`: the instance with the fewest calls in progress, first come first served.

Source: the balancer most gateways offer, e.g. NGINX `least_conn` ("the server with the least
number of active connections"), Envoy `LEAST_REQUEST` with full scan, llm-d's
`active-request-scorer`. It is also what Ray Serve's router approaches by sampling
(see `power_of_two`).
"""

from collections.abc import Mapping, Sequence

from shared.scheduling.dispatch import highest
from shared.scheduling.policies.first_come import FirstCome, choice_of
from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall


def outstanding_score(num_waiting: int, num_running: int) -> float:
    """Return the score of an instance by calls in progress, highest wins (leaf).

    Args:
        num_waiting: Calls bound to it and not in its engine.
        num_running: Calls in its engine.
    """
    return -float(num_waiting + num_running)


def least_outstanding(
    call: WaitingCall, views: Sequence[InstanceView]
) -> tuple[InstanceView, float]:
    """Return the instance with the fewest calls in progress, and its score."""
    return highest(call, views, lambda view: outstanding_score(view.num_waiting, view.num_running))


class LeastOutstanding(FirstCome):
    """Counts calls, blind to their size and to the instance's speed."""

    name = "least-outstanding"

    def choose(
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],  # noqa: ARG002 - counts calls only
        now_s: float,  # noqa: ARG002
    ) -> Choice | None:
        """Return the instance with the fewest calls in progress."""
        return choice_of(*least_outstanding(call, views))
