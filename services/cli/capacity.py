"""A rough upper bound of the queries per second a fleet can sustain, to choose a load by.

Fluid estimate: every instance batches fully, shared prompt prefixes are always cached, prefill is
paid per token and decoding shares each pass over the weights among as many sequences as the KV
cache holds. Real fleets stay below it; deadlines are usually met up to 60-70% of it.
"""

from collections.abc import Sequence

from shared.domain.instance import InstanceSpec
from shared.domain.trace import TraceCall, TraceQuery
from shared.scheduling.latency import step_extra_s


def capacity_qps(queries: Sequence[TraceQuery], fleet: Sequence[InstanceSpec]) -> float:
    """Return the estimated capacity of a fleet for this mix of queries, queries per second.

    Args:
        queries: The mix, at least one.
        fleet: The instances, at least one.
    """
    calls = [call for query in queries for stage in query.stages for call in stage.calls]
    per_query = len(calls) / len(queries)
    return sum(1.0 / (per_query * _mean_work_s(calls, spec)) for spec in fleet)


def _mean_work_s(calls: Sequence[TraceCall], spec: InstanceSpec) -> float:
    speed = spec.latency
    mean_context = sum(c.input_tokens + c.output_tokens / 2 for c in calls) / len(calls)
    batch = max(1.0, min(spec.max_num_seqs, spec.kv_tokens / mean_context))
    shared = 1.0 if spec.prefix_caching else 0.0
    waste = 1.0 + speed.chunk_waste_tokens / spec.max_batched_tokens
    total_s = 0.0
    for call in calls:
        cached = shared * sum(part.tokens for part in call.prefix)
        computed = call.input_tokens - cached
        pairs = computed * (cached + computed / 2)
        total_s += computed * speed.prefill_s_per_token * waste + pairs * speed.attention_s_per_pair
        shared_s = speed.weights_s + speed.overhead_s + step_extra_s(speed, batch)
        step_s = shared_s / batch + speed.seq_s
        context = call.input_tokens + call.output_tokens / 2
        total_s += call.output_tokens * (step_s + context * speed.kv_s_per_token)
    return total_s / len(calls)
