"""`qlm`: request groups by SLO, instances by estimated waiting time.

Source: Patke et al., Queue Management for SLO-oriented LLM Serving (SoCC 2024, arXiv 2407.00047)
and its release (QLM-project/QLM, qlm/queue/virtual_queue_engine.py, qlm/scheduler/scheduler.py,
qlm/scheduler/rwt_estimator.py). Requests of one model and similar SLO form a *request group*,
served first come first served; each instance has a *virtual queue* of groups; the waiting time is
estimated as

    W = requests ahead · mean output tokens / token throughput of the instance

and where an SLO would be missed, groups are reordered by deadline (the release's default; an
integer program is its alternative).

Differences: a call's SLO is its stage's budget. A group is a slice of 10 s of deadlines (the
release rounds down the time left, to 100 s by default; the authors of HexGen-Flow, who compare
with QLM on this workload, to 10 s); slices are fixed in absolute time, so the order is a constant
score and ties wait as they came. Groups are always in deadline order, not only once a miss is
foreseen. Calls are bound when they become ready, each to the virtual queue where it is estimated to
end first, and are not moved later: no eviction, no model swapping, no integer program. All calls
in progress there count as ahead. The release's constants for output length and throughput are
replaced by the mean prediction so far and the instance's own model.
"""

import math
from collections.abc import Mapping, Sequence

from shared.scheduling.dispatch import highest
from shared.scheduling.latency import step_extra_s
from shared.scheduling.policies.first_come import FirstCome
from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall

GROUP_S = 10.0


def group_deadline_s(deadline_s: float, group_s: float) -> float:
    """Return the start of the slice of deadlines a call belongs to, seconds (leaf)."""
    return math.floor(deadline_s / group_s) * group_s


def token_throughput(
    batch: float,
    context_tokens: float,
    weights_s: float,
    overhead_s: float,
    seq_s: float,
    kv_s_per_token: float,
) -> float:
    """Return output tokens per second of a full batch (leaf).

    Args:
        batch: Sequences decoding together, >= 1.
        context_tokens: KV tokens of each, tokens.
        weights_s: Time to stream the weights once, seconds.
        overhead_s: Fixed time of an iteration, seconds.
        seq_s: Extra time per sequence, seconds.
        kv_s_per_token: Extra time per KV token, seconds.
    """
    step_s = overhead_s + weights_s + batch * (seq_s + context_tokens * kv_s_per_token)
    return batch / max(step_s, 1e-9)


def waiting_time_s(num_ahead: int, mean_output_tokens: float, tokens_per_s: float) -> float:
    """Return the estimated waiting time behind other calls, seconds (leaf)."""
    return num_ahead * mean_output_tokens / tokens_per_s


class RequestGroups(FirstCome):
    """Binds a call where it is estimated to end first; groups wait by deadline."""

    name = "qlm"

    def __init__(self) -> None:
        self._num_seen = 0
        self._output_tokens = 0.0

    def choose(
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],
        now_s: float,  # noqa: ARG002 - all instances wait from now
    ) -> Choice | None:
        """Return the instance with the earliest estimated completion."""
        self._num_seen += 1
        self._output_tokens += call.output_tokens
        mean_tokens = self._output_tokens / self._num_seen
        waits_s = {
            view.spec.instance_id: waiting_time_s(
                view.num_outstanding, mean_tokens, _throughput_of(view, call)
            )
            for view in views
        }

        def score(view: InstanceView) -> float:
            name = view.spec.instance_id
            return -(waits_s[name] + costs[name].t_comp_s)

        best, best_score = highest(call, views, score)
        name = best.spec.instance_id
        return Choice(instance_id=name, score=best_score, t_queue_s=waits_s[name])

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:  # noqa: ARG002
        """Return the deadline of the call's group; within it, first come first served."""
        return group_deadline_s(call.ready_at_s + call.t_slo_s, GROUP_S)


def _throughput_of(view: InstanceView, call: WaitingCall) -> float:
    model = view.spec.latency
    context_tokens = call.input_tokens + call.output_tokens
    fitting = view.spec.kv_tokens / max(context_tokens, 1.0)
    batch = max(1.0, min(float(view.capacity), fitting))
    tokens_per_s = token_throughput(
        batch,
        context_tokens,
        model.weights_s,
        model.overhead_s + step_extra_s(model, batch),
        model.seq_s,
        model.kv_s_per_token,
    )
    return tokens_per_s / view.speed_factor
