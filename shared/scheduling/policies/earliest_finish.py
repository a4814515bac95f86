"""`earliest-finish`: the instance on which the call is estimated to end first, batching included.

An engine that batches serves many calls at once, so the sum of their service times overstates the
wait and their number says nothing of speed. What calls in one batch really take from each other:

- *prompts are computed one after the other*: while one is in prefill, the others hardly advance.
  If a share p of a call's own time is prefill and n others are in progress, then in balance each
  call is stretched by 1 + n · p. (Little's law: the engine spends a share ρ of its time on others'
  prompts; n others that each take t / (1 - ρ) need n · p · (1 - ρ) of it, so ρ = n·p / (1 + n·p).)
- *decoding steps grow a little* with batch size and context (`LatencyModel`).
- *beyond the batch, calls wait* for others to end: excess / slots · mean stretched time of a call.

Source: none; one of hexflow's own policies beyond HexGen-Flow (arXiv 2505.05286). Queues are
ordered by urgency, as in `hexgen-flow`. p is learned from the calls bound so far.
"""

from collections.abc import Mapping, Sequence

from shared.scheduling.dispatch import highest
from shared.scheduling.latency import prefill_s, step_extra_s
from shared.scheduling.policies.first_come import FirstCome
from shared.scheduling.policy import Choice, Cost, InstanceView, WaitingCall
from shared.scheduling.urgency import latest_start_s

MEMORY = 0.99


def stretch(num_others: float, prefill_share: float) -> float:
    """Return how much longer a call takes among others in progress, >= 1 (leaf).

    Args:
        num_others: Other calls in its batch.
        prefill_share: Share of a call's own service time that is prefill, in [0, 1].
    """
    return 1.0 + num_others * prefill_share


def decode_slowdown(
    batch: float,
    context_tokens: float,
    weights_s: float,
    overhead_s: float,
    seq_s: float,
    kv_s_per_token: float,
    extra_s: float,
) -> float:
    """Return the time of a decode step in a batch, relative to one call alone (leaf).

    Args:
        batch: Sequences decoding together, >= 1.
        context_tokens: KV tokens of each, tokens.
        weights_s: Time to stream the weights once, seconds.
        overhead_s: Fixed time of an iteration, seconds.
        seq_s: Extra time per sequence, seconds.
        kv_s_per_token: Extra time per KV token, seconds.
        extra_s: Extra time of a step of so many (`latency.batch_extra_s`), seconds.
    """
    each_s = seq_s + context_tokens * kv_s_per_token
    alone_s = overhead_s + weights_s + each_s
    if alone_s <= 0.0:
        return 1.0
    together_s = overhead_s + extra_s + weights_s + batch * each_s
    return together_s / alone_s


def time_to_start_s(
    num_outstanding: float, slots: float, backlog_s: float, prefill_share: float
) -> float:
    """Return the estimated time until a place in the batch is free, seconds (leaf).

    Args:
        num_outstanding: Calls in progress, waiting and running.
        slots: Most calls the engine batches, >= 1.
        backlog_s: Sum of their service times, each alone, seconds.
        prefill_share: See `stretch`.
    """
    excess = num_outstanding + 1.0 - slots
    if excess <= 0.0:
        return 0.0
    mean_s = backlog_s / num_outstanding * (1.0 + (slots - 1.0) * prefill_share)
    return excess * mean_s / slots


class EarliestFinish(FirstCome):
    """Dispatch by estimated end under batching, queues by urgency."""

    name = "earliest-finish"

    def __init__(self) -> None:
        self._prefill_s = 0.0
        self._service_s = 0.0

    def choose(
        self,
        call: WaitingCall,
        views: Sequence[InstanceView],
        costs: Mapping[str, Cost],
        now_s: float,  # noqa: ARG002 - all estimates count from now
    ) -> Choice | None:
        """Return the instance on which the call ends first."""
        prefills_s = {
            view.spec.instance_id: _own_prefill_s(call, view, costs[view.spec.instance_id])
            for view in views
        }
        share = self._prefill_share(prefills_s, costs)
        starts_s = {view.spec.instance_id: _start_s(call, view, share) for view in views}

        def score(view: InstanceView) -> float:
            name = view.spec.instance_id
            run_s = _run_s(call, view, prefills_s[name], costs[name].t_comp_s, share)
            return -(starts_s[name] + run_s)

        best, best_score = highest(call, views, score)
        name = best.spec.instance_id
        self._prefill_s = MEMORY * self._prefill_s + prefills_s[name]
        self._service_s = MEMORY * self._service_s + costs[name].t_comp_s
        return Choice(instance_id=name, score=best_score, t_queue_s=starts_s[name])

    def queue_score(self, call: WaitingCall, t_comp_s: float) -> float:
        """Return the latest start: smallest first is most urgent first."""
        return latest_start_s(call.ready_at_s, call.t_slo_s, t_comp_s)

    def _prefill_share(self, prefills_s: Mapping[str, float], costs: Mapping[str, Cost]) -> float:
        """Return the share learned so far, or that of the first call itself."""
        if self._service_s > 0.0:
            return self._prefill_s / self._service_s
        service_s = sum(costs[name].t_comp_s for name in prefills_s)
        return sum(prefills_s.values()) / service_s if service_s > 0.0 else 0.0


def _slots(call: WaitingCall, view: InstanceView) -> float:
    """Return how many calls like this one the instance batches: places, or KV memory."""
    context_tokens = max(call.input_tokens + call.output_tokens, 1.0)
    return max(1.0, min(float(view.capacity), view.spec.kv_tokens / context_tokens))


def _start_s(call: WaitingCall, view: InstanceView, share: float) -> float:
    return time_to_start_s(view.num_outstanding, _slots(call, view), view.backlog_s, share)


def _own_prefill_s(call: WaitingCall, view: InstanceView, cost: Cost) -> float:
    model = view.spec.latency
    own_s = view.speed_factor * prefill_s(
        call.input_tokens - cost.cached_tokens,
        view.spec.max_batched_tokens,
        model.weights_s,
        model.overhead_s + model.batched_s,
        model.prefill_s_per_token,
        model.chunk_waste_tokens,
        cost.cached_tokens,
        model.attention_s_per_pair,
    )
    return min(own_s, cost.t_comp_s)


def _run_s(
    call: WaitingCall, view: InstanceView, own_prefill_s: float, t_comp_s: float, share: float
) -> float:
    model = view.spec.latency
    num_others = min(float(view.num_outstanding), _slots(call, view) - 1.0)
    slowdown = decode_slowdown(
        num_others + 1.0,
        call.input_tokens + call.output_tokens / 2.0,
        model.weights_s,
        model.overhead_s,
        model.seq_s,
        model.kv_s_per_token,
        step_extra_s(model, num_others + 1.0),
    )
    decode_s = t_comp_s - own_prefill_s
    return stretch(num_others, share) * (own_prefill_s + decode_s * slowdown)
