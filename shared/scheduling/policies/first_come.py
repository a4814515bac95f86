"""What most baselines have in common: first come first served, everyone let in, no α."""

from collections.abc import Sequence

from shared.scheduling.policy import Choice, InstanceView, WaitingCall


class FirstCome:
    """Queue order and admission of an engine that knows nothing of deadlines.

    vLLM's default scheduler (`--scheduling-policy fcfs`) serves calls as they came.
    """

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


def choice_of(view: InstanceView, score: float) -> Choice:
    """Return the choice of an instance by a policy whose queue term is the plain backlog."""
    return Choice(instance_id=view.spec.instance_id, score=score, t_queue_s=view.backlog_s)
