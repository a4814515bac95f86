"""Fresh states of instances and calls, and what is refused before it gets one."""

import math

from shared.domain.instance import TIMES, InstanceSpec
from shared.errors import ConfigError, InvalidCall
from shared.simulation.kernel_state import NOWHERE, CallState, EngineState


def new_engine_state(spec: InstanceSpec, speed_factor: float = 1.0) -> EngineState:
    """Return the state of an idle instance.

    Args:
        spec: Its description.
        speed_factor: Real time divided by the latency model's, > 0.

    Raises:
        ConfigError: The description makes no running instance.
    """
    check_spec(spec)
    engine = EngineState()
    model = spec.latency
    for name in TIMES:
        setattr(engine, name, getattr(model, name) * speed_factor)
    engine.chunk_waste_tokens = float(model.chunk_waste_tokens)
    engine.clock_s = engine.start_s = engine.busy_s = 0.0
    engine.linear_s = engine.quadratic_s = 0.0
    engine.end_s = math.inf
    engine.max_num_seqs = spec.max_num_seqs
    engine.max_batched_tokens = spec.max_batched_tokens
    engine.block_tokens = spec.block_tokens
    engine.total_blocks = engine.free_blocks = spec.kv_tokens // spec.block_tokens
    engine.evictable_blocks = 0
    engine.residue_base = 0
    engine.lru_head = engine.lru_tail = -1
    engine.decode_head = engine.decode_tail = -1
    engine.prefill_head = engine.prefill_tail = -1
    engine.wait_head = engine.wait_tail = -1
    engine.num_decode = engine.num_prefill = engine.num_waiting = 0
    engine.kv_tokens = engine.step = engine.waiting_tokens = engine.waiting_blocks = 0
    engine.num_admissions = engine.num_preemptions = engine.iterations = engine.num_events = 0
    return engine


def check_spec(spec: InstanceSpec) -> None:
    """Refuse a description that makes no running instance.

    Raises:
        ConfigError: Names the instance and the field.
    """
    faults = {
        "latency": _has_no_speed(spec),
        "max_num_seqs": spec.max_num_seqs < 1,
        "max_batched_tokens": spec.max_batched_tokens < spec.max_num_seqs,
        "block_tokens": spec.block_tokens < 1,
        "kv_tokens": spec.kv_tokens < spec.block_tokens,
    }
    for name, is_faulty in faults.items():
        if is_faulty:
            msg = f"instance {spec.instance_id}: {name} makes no running instance"
            raise ConfigError(msg)


def _has_no_speed(spec: InstanceSpec) -> bool:
    model = spec.latency
    times_s = [getattr(model, name) for name in TIMES]
    if any(not math.isfinite(value) or value < 0.0 for value in times_s):
        return True
    if model.chunk_waste_tokens < 0:
        return True
    return model.overhead_s + model.weights_s <= 0.0


def new_call_state(
    *, input_tokens: int, output_tokens: int, priority: float, order: int, chain: int
) -> CallState:
    """Return the state of a call that nobody has run yet."""
    call = CallState()
    call.input_tokens = input_tokens
    call.output_tokens = output_tokens
    call.priority = priority
    call.order = order
    call.chain = chain
    call.place = NOWHERE
    call.target_tokens = call.computed_tokens = call.chunk_tokens = 0
    call.generated_tokens = call.cached_tokens = call.passes = 0
    call.admitted = call.finish_step = 0
    call.prev = call.next = -1
    call.started_s = call.first_token_s = call.end_s = math.nan
    return call


def check_call(spec: InstanceSpec, input_tokens: int, output_tokens: int) -> None:
    """Refuse a call that the instance could never run.

    Raises:
        InvalidCall: Token counts below one, or longer than context or KV memory.
    """
    if input_tokens < 1 or output_tokens < 1:
        msg = f"a call needs at least one token in and out, not {input_tokens}, {output_tokens}"
        raise InvalidCall(msg)
    memory_tokens = spec.kv_tokens - spec.kv_tokens % spec.block_tokens
    if (
        input_tokens + output_tokens > spec.max_context_tokens
        or input_tokens + output_tokens - 1 > memory_tokens
    ):
        msg = f"{input_tokens} + {output_tokens} tokens never fit on {spec.instance_id}"
        raise InvalidCall(msg)
