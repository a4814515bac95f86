"""`vllm`: round-robin over instances, first come first served in each.

Source: the baseline of HexGen-Flow (arXiv 2505.05286): vLLM behind a round-robin balancer.
"""

from collections.abc import Mapping, Sequence

from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall


class RoundRobinFcfs:
    """Takes the instances in turn; calls wait in the order they became ready."""

    name = "vllm"

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self,
        call: WaitingCall,  # noqa: ARG002 - round-robin is blind by definition
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],  # noqa: ARG002
        now_s: float,  # noqa: ARG002
    ) -> Choice:
        """Return the next instance in turn."""
        view = views[self._turn % len(views)]
        self._turn += 1
        return Choice(
            instance_id=view.spec.instance_id,
            score=0.0,
            t_queue_s=view.backlog_s,
        )

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:  # noqa: ARG002
        """Return the instant the call became ready."""
        return call.ready_at_s

    def admit(
        self,
        call: WaitingCall,  # noqa: ARG002
        views: Sequence[InstanceView],  # noqa: ARG002
        now_s: float,  # noqa: ARG002
    ) -> str | None:
        """Let everything in."""
        return None

    def set_alpha(self, alpha: float) -> None:
        """Ignore α: the policy has none."""
