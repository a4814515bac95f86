"""The policies that run inside the compiled simulator, as two numbers each.

A policy is a rule for choosing an instance and a rule for ordering its line. Formulas are the leaf
functions of `shared.scheduling`; what is compiled is their very source. A policy without an
entry in `COMPILED_RULES` is asked through `shared.scheduling.policy.Policy` for every call.
"""

from shared.scheduling.dispatch import beta_s2, floored_queue_s, flow_score
from shared.scheduling.latency import decode_s, prefill_s
from shared.scheduling.policies.llf import laxity_s
from shared.scheduling.policies.qlm import GROUP_S, group_deadline_s
from shared.scheduling.urgency import latest_start_s
from shared.simulation.baseline_rules import (
    choose_by_prefix_and_queue,
    choose_by_ratio,
    choose_earliest_finish,
    choose_fewest,
    choose_of_two,
    choose_shortest_wait,
    nth_eligible,
)
from shared.simulation.choosing import wins_tie
from shared.simulation.fleet_state import UNASSIGNED, BeliefState, PlanState, RunState
from shared.simulation.kernel_state import CallState, EngineState
from shared.simulation.segments import sync_segment
from shared.simulation.tables import Tables

ASK_POLICY = 0
FLOW = 1
ROUND_ROBIN = 2
FEWEST = 3
OF_TWO = 4
PREFIX_AND_QUEUE = 5
EARLIEST_FINISH = 6
SHORTEST_WAIT = 7
RATIO = 8

BY_ANSWER = 0
BY_LATEST_START = 1
BY_READINESS = 2
BY_DEADLINE = 3
BY_LAXITY = 4
BY_GROUP = 5

COMPILED_RULES = {
    "hexgen-flow": (FLOW, BY_LATEST_START),
    "wb+fcfs": (FLOW, BY_READINESS),
    "rr+pq": (ROUND_ROBIN, BY_LATEST_START),
    "vllm": (ROUND_ROBIN, BY_READINESS),
    "least-outstanding": (FEWEST, BY_READINESS),
    "power-of-two": (OF_TWO, BY_READINESS),
    "prefix-queue": (PREFIX_AND_QUEUE, BY_READINESS),
    "edf": (FEWEST, BY_DEADLINE),
    "llf": (FEWEST, BY_LAXITY),
    "qlm": (SHORTEST_WAIT, BY_GROUP),
    "ratio": (RATIO, BY_LATEST_START),
    "earliest-finish": (EARLIEST_FINISH, BY_LATEST_START),
}


def price_call(tables: Tables, run: RunState, index: int) -> int:
    """Fill `costs_s` and `cached_tokens` for a call; returns how many instances can run it."""
    call = tables.calls[index]
    plan = tables.plans[index]
    tokens = call.input_tokens + call.output_tokens
    eligible = 0
    for instance in range(run.num_instances):
        line = tables.lines[instance]
        offered = tables.offers[plan.model * run.num_instances + instance]
        if offered == 0 or tokens > line.limit_tokens:
            tables.costs_s[instance] = -1.0
            continue
        eligible += 1
        engine = tables.engines[instance]
        cached = 0
        if plan.chain >= 0 and line.caches != 0:
            _settle_evictions(tables, run, engine, instance)
            chain = instance * run.num_nodes + plan.chain
            found = expected_cached_tokens(tables, engine, chain, call.input_tokens)
            cached = int(found * tables.beliefs[instance].hit_factor)
        tables.cached_tokens[instance] = cached
        belief = tables.beliefs[instance]
        tables.costs_s[instance] = t_comp_s(engine, belief, call, plan, cached)
    return eligible


def t_comp_s(
    engine: EngineState,
    belief: BeliefState,
    call: CallState,
    plan: PlanState,
    cached_tokens: int,
) -> float:
    """Return the expected cost of a call on an instance, as `latency.service_s` does."""
    return prefill_s(
        call.input_tokens - cached_tokens,
        engine.max_batched_tokens,
        belief.weights_s,
        belief.overhead_s + belief.batched_s,
        belief.prefill_s_per_token,
        engine.chunk_waste_tokens,
        float(cached_tokens),
        belief.attention_s_per_pair,
    ) + decode_s(
        plan.predicted_tokens,
        call.input_tokens,
        1.0,
        belief.weights_s,
        belief.overhead_s,
        belief.seq_s,
        belief.kv_s_per_token,
    )


def expected_cached_tokens(
    tables: Tables, engine: EngineState, chain: int, input_tokens: int
) -> int:
    """Return how many prompt tokens are expected in an instance's cache.

    Counted are parts that are in its memory, and parts of calls bound to it. (Where it caches
    nothing although it is believed to, parts of any call that was ever bound to it.)
    """
    held = 0
    index = chain
    while index >= 0:
        node = tables.nodes[index]
        if node.bound > 0:
            held = node.end_blocks
            break
        if node.resident_blocks > 0:
            held = node.end_blocks - node.own_blocks + node.resident_blocks
            break
        index = node.parent
    most = (input_tokens - 1) // engine.block_tokens
    return min(held, most) * engine.block_tokens


def _settle_evictions(tables: Tables, run: RunState, engine: EngineState, instance: int) -> None:
    """Bring the cache up to the present where the segment in flight may have evicted from it."""
    if engine.iterations > 1:
        most = (engine.iterations // engine.block_tokens + 1) * engine.num_decode
        if most > engine.free_blocks:
            sync_segment(tables, engine, run.now_s)
            if engine.iterations == 0:
                touch_instance(tables, run, instance)


def touch_instance(tables: Tables, run: RunState, instance: int) -> None:
    """Have an instance looked at when everything of this instant has happened."""
    line = tables.lines[instance]
    if line.is_touched == 0:
        line.is_touched = 1
        tables.touched[run.num_touched] = instance
        run.num_touched += 1


def choose_instance(tables: Tables, run: RunState, index: int) -> int:
    """Return the instance for a call whose costs have been filled in."""
    dispatcher = tables.queries[tables.stages[tables.plans[index].stage].query].dispatcher
    if run.choose_rule == FLOW:
        return choose_by_flow(tables, run, index, dispatcher)
    if run.choose_rule == ROUND_ROBIN:
        return choose_in_turn(tables, run, dispatcher)
    if run.choose_rule == RATIO:
        return choose_by_ratio(tables, run, dispatcher)
    return choose_baseline(tables, run, index, dispatcher)


def choose_baseline(tables: Tables, run: RunState, index: int, dispatcher: int) -> int:
    """Return the instance of the highest score of a rule in `baseline_rules`."""
    if run.choose_rule == FEWEST:
        return choose_fewest(tables, run, index, dispatcher)
    if run.choose_rule == OF_TWO:
        return choose_of_two(tables, run, index, dispatcher)
    if run.choose_rule == PREFIX_AND_QUEUE:
        return choose_by_prefix_and_queue(tables, run, index, dispatcher)
    if run.choose_rule == EARLIEST_FINISH:
        return choose_earliest_finish(tables, run, index, dispatcher)
    return choose_shortest_wait(tables, run, index, dispatcher)


def choose_by_flow(tables: Tables, run: RunState, index: int, dispatcher: int) -> int:
    """Return the instance of the paper's highest score; ties by `tie_order`."""
    total_s = 0.0
    eligible = 0
    for instance in range(run.num_instances):
        if tables.costs_s[instance] >= 0.0:
            total_s += tables.costs_s[instance]
            eligible += 1
    beta = beta_s2(total_s / eligible)
    best = UNASSIGNED
    best_score = 0.0
    for instance in range(run.num_instances):
        cost_s = tables.costs_s[instance]
        if cost_s < 0.0:
            continue
        view = tables.views[dispatcher * run.num_instances + instance]
        score = flow_score(run.alpha, beta, floored_queue_s(view.backlog_s), cost_s)
        if best < 0 or score > best_score:
            best = instance
            best_score = score
        elif score == best_score and wins_tie(tables, index, instance, best):
            best = instance
    return best


def choose_in_turn(tables: Tables, run: RunState, dispatcher: int) -> int:
    """Return the next eligible instance in turn; each dispatcher counts for itself."""
    eligible = 0
    for instance in range(run.num_instances):
        if tables.costs_s[instance] >= 0.0:
            eligible += 1
    turn = tables.turns[dispatcher]
    tables.turns[dispatcher] = turn + 1
    return nth_eligible(tables, run, turn % eligible)


def line_score(tables: Tables, run: RunState, index: int, cost_s: float) -> float:
    """Return a call's constant place in the line of its instance, smallest first."""
    if run.order_rule == BY_ANSWER:
        return run.chosen_score
    stage = tables.stages[tables.plans[index].stage]
    if run.order_rule == BY_LATEST_START:
        return latest_start_s(stage.ready_s, stage.t_slo_s, cost_s)
    if run.order_rule == BY_GROUP:
        return group_deadline_s(stage.ready_s + stage.t_slo_s, GROUP_S)
    if run.order_rule == BY_READINESS:
        return stage.ready_s
    query = tables.queries[stage.query]
    deadline_s = query.arrival_s + query.slo_s
    if run.order_rule == BY_LAXITY:
        return laxity_s(deadline_s, 0.0, cost_s)
    return deadline_s
