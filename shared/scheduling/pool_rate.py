"""How much work a pool should do per second when it has enough of it, before it was seen at work.

An engine that batches n calls, each of which spends a share p of its own time on its prompt, takes
each of them 1 + (n - 1) · p times as long, and decoding steps grow a little with the batch (see
`policies.earliest_finish`). So it does n / ((1 + (n - 1) p) · slowdown) seconds of calls' own time
per second. On `hetero-1` and the Text-to-SQL workflow this gives 68.6; 68 is what it does.
"""

from collections.abc import Mapping, Sequence

from shared.domain.profile import WorkflowShape
from shared.scheduling.latency import service_s, step_extra_s
from shared.scheduling.policies.earliest_finish import decode_slowdown, stretch
from shared.scheduling.policy import InstanceView
from shared.scheduling.profiles import expected_remaining, stage_estimate


def pool_rate(
    shapes: Mapping[str, WorkflowShape],
    workflow: str,
    stage: str,
    views: Sequence[InstanceView],
) -> float:
    """Return the work a pool should do per second, in seconds of mean service time (>= 0).

    Args:
        shapes: Workflow name -> shape.
        workflow: What is asked for.
        stage: Its first stage.
        views: The pool.
    """
    counts = dict(expected_remaining(shapes, workflow, stage, 0))
    counts[stage] = counts.get(stage, 0.0) + 1.0
    found = [_of_instance(shapes, workflow, counts, view) for view in views]
    mean_s = sum(own_s for own_s, _ in found) / max(1, len(found))
    return sum(gain * mean_s / own_s for own_s, gain in found if own_s > 0.0)


def _of_instance(
    shapes: Mapping[str, WorkflowShape],
    workflow: str,
    counts: Mapping[str, float],
    view: InstanceView,
) -> tuple[float, float]:
    """Return a query's own service time on an instance, seconds, and how much it does at once."""
    spec, own_s, prompt_s, tokens, num_calls = view.spec, 0.0, 0.0, 0.0, 0.0
    for stage, count in counts.items():
        one = stage_estimate(shapes, workflow, stage)
        number = count * max(1.0, one.siblings)
        cached = max(0.0, min(one.cached_tokens, one.input_tokens - 1.0))
        own_s += number * _alone_s(view, one.input_tokens, cached, one.output_tokens)
        prompt_s += number * _alone_s(view, one.input_tokens, cached, 1.0)
        tokens += number * (one.input_tokens + one.output_tokens / 2.0)
        num_calls += number
    context, share = max(1.0, tokens / num_calls), prompt_s / own_s
    slots = max(1.0, min(float(view.capacity), spec.max_num_seqs, spec.kv_tokens / context))
    model = spec.latency
    slowdown = decode_slowdown(
        slots,
        context,
        model.weights_s,
        model.overhead_s,
        model.seq_s,
        model.kv_s_per_token,
        step_extra_s(model, slots),
    )
    return own_s, slots / (stretch(slots - 1.0, share) * (share + (1.0 - share) * slowdown))


def _alone_s(
    view: InstanceView, input_tokens: float, cached_tokens: float, output_tokens: float
) -> float:
    return service_s(
        view.spec,
        input_tokens=input_tokens,
        cached_tokens=cached_tokens if view.spec.prefix_caching else 0.0,
        output_tokens=output_tokens,
        speed_factor=view.speed_factor,
    )
