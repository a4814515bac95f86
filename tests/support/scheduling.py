"""Small calls, instances and views for tests of the scheduling mathematics."""

from typing import Any

from shared.domain.instance import InstanceSpec, LatencyModel
from shared.domain.trace import PrefixPart, TraceCall, TraceQuery, TraceStage
from shared.scheduling.policy import InstanceView, WaitingCall


def make_spec(instance_id: str = "a", *, decode_s: float = 0.035, **fields: Any) -> InstanceSpec:
    """Return an instance: 5,000 prompt tokens per second, `decode_s` seconds per output token."""
    latency = fields.pop("latency", LatencyModel(prefill_s_per_token=1 / 5_000, weights_s=decode_s))
    return InstanceSpec(instance_id=instance_id, gpu="A100", latency=latency, **fields)


def make_view(instance_id: str = "a", **fields: Any) -> InstanceView:
    """Return a view of an instance; `decode_s` and spec fields go to its spec."""
    own = {key: fields.pop(key) for key in list(fields) if key in InstanceView.__struct_fields__}
    spec = own.pop("spec", None) or make_spec(instance_id, **fields)
    return InstanceView(spec=spec, **own)


def make_call(request_id: str = "r", **fields: Any) -> WaitingCall:
    """Return a waiting call of 1,000 prompt tokens and 100 predicted output tokens."""
    values: dict[str, Any] = {
        "query_id": "q",
        "input_tokens": 1_000,
        "output_tokens": 100.0,
        "ready_at_s": 10.0,
        "t_slo_s": 20.0,
        "deadline_s": 60.0,
    }
    return WaitingCall(request_id=request_id, **(values | fields))


def chain(*parts: tuple[str, int]) -> tuple[PrefixPart, ...]:
    """Return a prefix chain."""
    return tuple(PrefixPart(prefix_id, tokens) for prefix_id, tokens in parts)


def make_stage(stage: str, *lengths: tuple[int, int], **fields: Any) -> TraceStage:
    """Return a stage with one call per (input, output) pair."""
    calls = tuple(
        TraceCall(input_tokens=input_tokens, output_tokens=output_tokens)
        for input_tokens, output_tokens in lengths or ((100, 10),)
    )
    return TraceStage(stage=stage, calls=calls, **fields)


def make_trace_query(query_id: str = "q", *stages: TraceStage, **fields: Any) -> TraceQuery:
    """Return a query of the given stages, one small stage by default."""
    return TraceQuery(query_id=query_id, stages=stages or (make_stage("step"),), **fields)
