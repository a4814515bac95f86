"""The event loop of a run over a whole fleet.

Everything that happens at one instant happens in this order: iterations end (instances in order),
timers run (in the order they were set), queries arrive; then every call that waits for an
instance is offered to the policy, in the order they became ready; then instances take calls
from their lines and start iterations.

An instance takes the first call of its line while its engine has admission left and room for
it (`gate`); where the scenario says so, an idle engine begins with the first and the others follow
while it works. A call that only lacks KV memory is looked past where the scenario says so, at most
`MAX_PASSES` times. The line is looked at when a call is delivered, when a call of the instance
brings its first token or ends, and when an iteration has admitted a call: when room can appear.

Messages: a call reaches its dispatcher `hop_s` after it is ready, its instance `hop_s` after it is
assigned, its result the producer `hop_s` after it ends. A dispatcher sees its own assignments at
once, those of others and all ends `state_delay_s` after they happened.

The loop stops before the first instant at or after `pause_s`, so that what policies believe, or how
fast instances are, can be changed from outside.
"""

import math

from shared.scheduling.budget import stage_budget_s
from shared.simulation.fleet_state import REFUSED, UNASSIGNED, LineState, RunState
from shared.simulation.gate import has_turn, lacks_memory, reserved_tokens
from shared.simulation.heaps import pop_call, pop_timer, push_call, push_timer
from shared.simulation.iteration import (
    FINISHED,
    MAX_PASSES,
    complete_segment,
    enter_engine,
    start_segment,
)
from shared.simulation.kernel_state import EngineState
from shared.simulation.rules import (
    ASK_POLICY,
    choose_instance,
    line_score,
    price_call,
    touch_instance,
)
from shared.simulation.segments import end_with_present, sync_segment
from shared.simulation.tables import Tables

DONE = 0
ASKS = 1
PAUSES = 2

STAGE_READY = 0
AT_DISPATCHER = 1
AT_INSTANCE = 2
STAGE_ENDED = 3
VIEW_CHANGED = 4


def run_fleet(tables: Tables) -> int:
    """Run until everything has happened (DONE), a policy is asked (ASKS), or `pause_s` (PAUSES).

    When asked, the answer goes to `chosen` (and `chosen_score`) of the run; then call again. After
    a pause set the next one and call again.
    """
    run = tables.runs[0]
    while True:
        if run.is_offering == 0:
            run.now_s = _next_instant_s(tables, run)
            if run.now_s == math.inf:
                return DONE
            if run.now_s >= run.pause_s:
                _pause(tables, run)
                return PAUSES
            _let_happen(tables, run)
        if run.has_news != 0 and run.pool_size > 0 and _offer_pool(tables, run) == ASKS:
            return ASKS
        _start_touched(tables, run)


def _pause(tables: Tables, run: RunState) -> None:
    if run.cuts_at_pause == 0:
        return
    for instance in range(run.num_instances):
        engine = tables.engines[instance]
        end_with_present(tables, engine, run.pause_s)
        tables.wakes_s[instance] = engine.end_s


def _next_instant_s(tables: Tables, run: RunState) -> float:
    at_s = math.inf
    for instance in range(run.num_instances):
        at_s = min(at_s, tables.wakes_s[instance])
    if run.num_timers > 0:
        at_s = min(at_s, tables.timers[tables.timer_heap[0]].at_s)
    if run.next_arrival < run.num_queries:
        at_s = min(at_s, tables.queries[tables.arrivals[run.next_arrival]].arrival_s)
    return at_s


def _let_happen(tables: Tables, run: RunState) -> None:
    """Let everything of the present instant happen, up to the offering of calls."""
    run.num_instants += 1
    run.has_news = 0
    for instance in range(run.num_instances):
        if tables.wakes_s[instance] <= run.now_s:
            _end_segment(tables, run, instance)
    while run.num_timers > 0 and tables.timers[tables.timer_heap[0]].at_s <= run.now_s:
        _run_timer(tables, run)
    while run.next_arrival < run.num_queries:
        query = tables.arrivals[run.next_arrival]
        if tables.queries[query].arrival_s > run.now_s:
            break
        run.next_arrival += 1
        _start_query(tables, run, query)


def _end_segment(tables: Tables, run: RunState, instance: int) -> None:
    engine = tables.engines[instance]
    complete_segment(tables, engine)
    tables.wakes_s[instance] = math.inf
    touch_instance(tables, run, instance)
    if engine.num_events == 0:
        return
    run.has_news = 1
    tables.lines[instance].has_news = 1
    for position in range(engine.num_events):
        if tables.events[2 * position + 1] == FINISHED:
            _end_call(tables, run, instance, tables.events[2 * position])


def _end_call(tables: Tables, run: RunState, instance: int, index: int) -> None:
    tables.lines[instance].inside -= 1
    tables.lines[instance].has_ended = 1
    _count_present(run, tables.lines[instance], -1)
    _bind_chain(tables, tables.calls[index].chain, -1)
    if run.state_delay_s > 0.0:
        _set_timer(tables, run, run.state_delay_s, VIEW_CHANGED, index, -1, -1)
    else:
        _change_views(tables, run, index, -1, -1)
    stage = tables.plans[index].stage
    tables.stages[stage].calls_left -= 1
    if tables.stages[stage].calls_left == 0:
        if run.hop_s > 0.0:
            _set_timer(tables, run, run.hop_s, STAGE_ENDED, stage, 0, -1)
        else:
            _end_stage(tables, run, stage)


def _count_present(run: RunState, line: LineState, change: int) -> None:
    line.present_s += line.present * (run.now_s - line.present_since_s)
    line.present_since_s = run.now_s
    line.present += change


def _bind_chain(tables: Tables, chain: int, change: int) -> None:
    index = chain
    while index >= 0:
        node = tables.nodes[index]
        node.bound += change
        index = node.parent


def _set_timer(
    tables: Tables,
    run: RunState,
    delay_s: float,
    kind: int,
    index: int,
    count: int,
    except_dispatcher: int,
) -> None:
    slot = run.free_timer
    timer = tables.timers[slot]
    run.free_timer = timer.next
    timer.at_s = run.now_s + delay_s
    timer.order = run.timers_set
    timer.kind = kind
    timer.index = index
    timer.count = count
    timer.except_dispatcher = except_dispatcher
    run.timers_set += 1
    push_timer(tables, run.num_timers, slot)
    run.num_timers += 1


def _run_timer(tables: Tables, run: RunState) -> None:
    slot = pop_timer(tables, run.num_timers)
    run.num_timers -= 1
    timer = tables.timers[slot]
    timer.next = run.free_timer
    run.free_timer = slot
    kind = timer.kind
    index = timer.index
    if kind == STAGE_READY:
        _start_stage(tables, run, index)
    elif kind == AT_DISPATCHER:
        _pool_call(tables, run, index)
    elif kind == AT_INSTANCE:
        _deliver_call(tables, run, index)
    elif kind == STAGE_ENDED:
        _end_stage(tables, run, index)
    else:
        run.has_news = 1
        _change_views(tables, run, index, timer.count, timer.except_dispatcher)


def _change_views(
    tables: Tables, run: RunState, index: int, count: int, except_dispatcher: int
) -> None:
    """Let dispatchers know that a call was bound to its instance (1) or has ended there (-1)."""
    plan = tables.plans[index]
    for dispatcher in range(run.num_dispatchers):
        if dispatcher == except_dispatcher:
            continue
        view = tables.views[dispatcher * run.num_instances + plan.instance]
        view.outstanding += count
        view.backlog_s += count * plan.t_comp_s
        if view.outstanding == 0:
            view.backlog_s = 0.0


def _start_query(tables: Tables, run: RunState, index: int) -> None:
    query = tables.queries[index]
    for stage in range(query.first_stage, query.first_stage + query.num_stages):
        if tables.stages[stage].parents_left == 0:
            _think(tables, run, stage)


def _think(tables: Tables, run: RunState, stage: int) -> None:
    think_s = tables.stages[stage].think_s
    if think_s > 0.0:
        _set_timer(tables, run, think_s, STAGE_READY, stage, 0, -1)
    else:
        _start_stage(tables, run, stage)


def _start_stage(tables: Tables, run: RunState, index: int) -> None:
    """A stage becomes ready: its budget is fixed and its calls go to their dispatcher."""
    stage = tables.stages[index]
    query = tables.queries[stage.query]
    stage.ready_s = run.now_s
    stage.t_slo_s = stage_budget_s(
        query.slo_s, run.now_s - query.arrival_s, stage.expected_s, stage.remaining_s
    )
    for call in range(stage.first_call, stage.first_call + stage.num_calls):
        if run.hop_s > 0.0:
            _set_timer(tables, run, run.hop_s, AT_DISPATCHER, call, 0, -1)
        else:
            _pool_call(tables, run, call)


def _pool_call(tables: Tables, run: RunState, index: int) -> None:
    tables.pool[run.pool_size] = index
    run.pool_size += 1
    run.has_news = 1


def _end_stage(tables: Tables, run: RunState, index: int) -> None:
    stage = tables.stages[index]
    query = tables.queries[stage.query]
    query.stages_left -= 1
    if query.stages_left == 0:
        query.end_s = run.now_s
        run.num_ended += 1
    for place in range(stage.first_child, stage.first_child + stage.num_children):
        child = tables.children[place]
        tables.stages[child].parents_left -= 1
        if tables.stages[child].parents_left == 0:
            _think(tables, run, child)


def _offer_pool(tables: Tables, run: RunState) -> int:
    """Offer the calls that wait for an instance to the policy, in order."""
    if run.is_offering == 0:
        run.is_offering = 1
        run.pool_read = 0
        run.pool_kept = 0
    while run.pool_read < run.pool_size:
        index = tables.pool[run.pool_read]
        if run.choose_rule != ASK_POLICY:
            price_call(tables, run, index)
            _settle(tables, run, index, choose_instance(tables, run, index))
        elif run.pending_call == index:
            run.pending_call = -1
            _settle(tables, run, index, run.chosen)
        else:
            price_call(tables, run, index)
            run.pending_call = index
            return ASKS
        run.pool_read += 1
    run.pool_size = run.pool_kept
    run.is_offering = 0
    return DONE


def _settle(tables: Tables, run: RunState, index: int, chosen: int) -> None:
    if chosen >= 0:
        _assign_call(tables, run, index, chosen)
    elif chosen == UNASSIGNED:
        tables.pool[run.pool_kept] = index
        run.pool_kept += 1
    else:
        tables.plans[index].instance = REFUSED
        query = tables.queries[tables.stages[tables.plans[index].stage].query]
        if query.is_failed == 0:
            query.is_failed = 1
            query.end_s = run.now_s
            run.num_ended += 1


def _assign_call(tables: Tables, run: RunState, index: int, instance: int) -> None:
    call = tables.calls[index]
    plan = tables.plans[index]
    plan.instance = instance
    plan.assigned_s = run.now_s
    plan.t_comp_s = tables.costs_s[instance]
    plan.cached_tokens = tables.cached_tokens[instance]
    call.priority = line_score(tables, run, index, plan.t_comp_s)
    if plan.chain >= 0 and tables.lines[instance].caches != 0:
        chain = instance * run.num_nodes + plan.chain
        _bind_chain(tables, chain, 1)
        if tables.lines[instance].reuses != 0:
            call.chain = chain
    dispatcher = tables.queries[tables.stages[plan.stage].query].dispatcher
    view = tables.views[dispatcher * run.num_instances + instance]
    view.backlog_s += plan.t_comp_s
    view.outstanding += 1
    if run.hop_s > 0.0:
        _set_timer(tables, run, run.hop_s, AT_INSTANCE, index, 0, -1)
    else:
        _deliver_call(tables, run, index)


def _deliver_call(tables: Tables, run: RunState, index: int) -> None:
    plan = tables.plans[index]
    if run.num_dispatchers > 1:
        dispatcher = tables.queries[tables.stages[plan.stage].query].dispatcher
        if run.state_delay_s > 0.0:
            _set_timer(tables, run, run.state_delay_s, VIEW_CHANGED, index, 1, dispatcher)
        else:
            _change_views(tables, run, index, 1, dispatcher)
    line = tables.lines[plan.instance]
    tables.calls[index].order = run.deliveries
    run.deliveries += 1
    line.num_calls += 1
    _count_present(run, line, 1)
    push_call(tables, line.heap_base, line.size, index)
    line.size += 1
    line.has_news = 1
    touch_instance(tables, run, plan.instance)


def _start_touched(tables: Tables, run: RunState) -> None:
    """Let the instances whose state changed take calls and start iterations."""
    for position in range(run.num_touched):
        instance = tables.touched[position]
        line = tables.lines[instance]
        engine = tables.engines[instance]
        line.is_touched = 0
        admissions = engine.num_admissions
        if run.one_by_one != 0 and line.has_ended != 0 and line.inside > 0:
            start_segment(tables, engine)  # a busy engine goes on before it is given another
        line.has_ended = 0
        if line.has_news != 0:
            line.has_news = 0
            most = 1 if run.one_by_one != 0 and line.inside == 0 else line.admission
            _feed_engine(tables, run, line, engine, most)
        if engine.iterations == 0:
            start_segment(tables, engine)
        if engine.num_admissions > admissions:
            _feed_engine(tables, run, line, engine, line.admission)
        tables.wakes_s[instance] = engine.end_s
    run.num_touched = 0


def _feed_engine(
    tables: Tables, run: RunState, line: LineState, engine: EngineState, most: int
) -> None:
    """Move calls from the line into the engine while they fit and it holds fewer than `most`."""
    if line.size == 0 or line.inside >= most:
        return
    sync_segment(tables, engine, run.now_s)
    held = 0
    while line.size > 0 and line.inside < most and has_turn(engine):
        index = pop_call(tables, line.heap_base, line.size)
        line.size -= 1
        tokens = reserved_tokens(engine, tables.calls[index], tables.plans[index].predicted_tokens)
        if lacks_memory(tables, engine, tables.calls[index].chain, tokens):
            tables.held[held] = index
            held += 1
            if held > run.look_past or tables.calls[index].passes >= MAX_PASSES:
                break
        else:
            enter_engine(tables, engine, index, run.now_s)
            line.inside += 1
            for place in range(held):
                tables.calls[tables.held[place]].passes += 1
    for place in range(held):
        push_call(tables, line.heap_base, line.size, tables.held[place])
        line.size += 1
