"""Records of a run over a whole fleet: queries, stages, plans of calls, waiting lines, timers.

Like `kernel_state`, these are read and written by the same functions interpreted and compiled.
"""

from shared.simulation.kernel_state import Int, Real

UNASSIGNED = -1
REFUSED = -2


class RunState:
    """The run itself.

    Attributes:
        now_s: Present instant.
        alpha: α of the policy.
        hop_s: Time of one message between services.
        state_delay_s: Age of an instance's state when a dispatcher sees it.
        chosen_score: Queue score given with an external choice.
        look_past: How many calls that lack memory are looked past at a time.
        one_by_one: Whether engines begin, or go on, before they are given more (`Scenario`).
        num_queries: Queries of the run.
        num_instances: Instances of the fleet.
        num_nodes: Prefix parts per instance.
        num_dispatchers: Dispatchers; each query belongs to one.
        choose_rule: How an instance is chosen (`rules`).
        order_rule: How an instance's line is ordered (`rules`).
        next_arrival: Next entry of `arrivals`.
        num_timers: Entries of the timer heap.
        free_timer: First unused timer slot, linked by `next`.
        timers_set: Timers set so far.
        deliveries: Calls delivered to instances so far.
        pool_size: Calls that wait for an assignment.
        pool_read: Next of them to offer.
        pool_kept: How many of those offered stay.
        pending_call: Call that an external policy is asked about, or -1.
        chosen: Its answer: an instance, UNASSIGNED or REFUSED.
        is_offering: Whether the calls of this instant are being offered.
        has_news: Whether anything happened that a dispatcher can see.
        num_touched: Entries of `touched`.
        num_ended: Queries that ended.
        num_instants: Instants visited (a measure of work).
        pause_s: Instant at which the run stops once, so that something can be changed from outside.
        cuts_at_pause: Whether segments end there with the iteration in flight, because the speed of
            instances changes.
    """

    __slots__ = (
        "alpha",
        "choose_rule",
        "chosen",
        "chosen_score",
        "cuts_at_pause",
        "deliveries",
        "free_timer",
        "has_news",
        "hop_s",
        "is_offering",
        "look_past",
        "next_arrival",
        "now_s",
        "num_dispatchers",
        "num_ended",
        "num_instances",
        "num_instants",
        "num_nodes",
        "num_queries",
        "num_timers",
        "num_touched",
        "one_by_one",
        "order_rule",
        "pause_s",
        "pending_call",
        "pool_kept",
        "pool_read",
        "pool_size",
        "state_delay_s",
        "timers_set",
    )

    now_s: Real
    alpha: Real
    hop_s: Real
    state_delay_s: Real
    chosen_score: Real
    pause_s: Real
    look_past: Int
    one_by_one: Int
    num_queries: Int
    num_instances: Int
    num_nodes: Int
    num_dispatchers: Int
    choose_rule: Int
    order_rule: Int
    next_arrival: Int
    num_timers: Int
    free_timer: Int
    timers_set: Int
    deliveries: Int
    pool_size: Int
    pool_read: Int
    pool_kept: Int
    pending_call: Int
    chosen: Int
    is_offering: Int
    has_news: Int
    num_touched: Int
    num_ended: Int
    num_instants: Int
    cuts_at_pause: Int


class QueryState:
    """One query.

    Attributes:
        arrival_s: When it arrives.
        slo_s: Its SLO.
        end_s: When it ended; NaN until then.
        first_stage: Its stages follow each other from here.
        num_stages: How many.
        stages_left: How many have not ended.
        dispatcher: The dispatcher it belongs to.
        is_failed: Whether one of its calls was refused.
    """

    __slots__ = (
        "arrival_s",
        "dispatcher",
        "end_s",
        "first_stage",
        "is_failed",
        "num_stages",
        "slo_s",
        "stages_left",
    )

    arrival_s: Real
    slo_s: Real
    end_s: Real
    first_stage: Int
    num_stages: Int
    stages_left: Int
    dispatcher: Int
    is_failed: Int


class StageState:
    """One stage.

    Attributes:
        ready_s: When it became ready.
        t_slo_s: Its budget, fixed at that instant.
        expected_s: Expected duration.
        remaining_s: Expected duration of what follows.
        think_s: Time between its parents' end and its start.
        query: Its query.
        first_call: Its calls follow each other from here.
        num_calls: How many.
        calls_left: How many have not ended.
        parents_left: How many parents have not ended.
        first_child: Its children in `children` follow each other from here.
        num_children: How many.
    """

    __slots__ = (
        "calls_left",
        "expected_s",
        "first_call",
        "first_child",
        "num_calls",
        "num_children",
        "parents_left",
        "query",
        "ready_s",
        "remaining_s",
        "t_slo_s",
        "think_s",
    )

    ready_s: Real
    t_slo_s: Real
    expected_s: Real
    remaining_s: Real
    think_s: Real
    query: Int
    first_call: Int
    num_calls: Int
    calls_left: Int
    parents_left: Int
    first_child: Int
    num_children: Int


class PlanState:
    """What the mesh decides about one call.

    Attributes:
        assigned_s: When it was bound to an instance.
        t_comp_s: Its expected cost there.
        predicted_tokens: Predicted output length, tokens.
        cached_tokens: Prompt tokens expected in its instance's cache when it was bound, tokens.
        stage: Its stage.
        model: Number of the model it asks for.
        instance: Its instance, UNASSIGNED or REFUSED.
        chain: Its prefix chain, counted from the instance's first node; -1 for none.
        tie_key: Orders equal scores, see `tie_order`.
    """

    __slots__ = (
        "assigned_s",
        "cached_tokens",
        "chain",
        "instance",
        "model",
        "predicted_tokens",
        "stage",
        "t_comp_s",
        "tie_key",
    )

    assigned_s: Real
    t_comp_s: Real
    predicted_tokens: Real
    cached_tokens: Int
    stage: Int
    model: Int
    instance: Int
    chain: Int
    tie_key: Int


class LineState:
    """The waiting line in front of one instance, and what the mesh knows of the instance.

    Attributes:
        heap_base: Where its heap of waiting calls starts.
        size: Calls in the line.
        inside: Calls in the engine.
        admission: Most calls the engine is given at a time.
        limit_tokens: Longest call it can run, tokens.
        tie_key: Orders equal scores, see `tie_order`.
        num_calls: Calls delivered to it so far.
        present: Calls delivered and not ended.
        present_since_s: When that number last changed.
        present_s: Integral of that number over time.
        caches: Whether policies believe that it reuses prefixes.
        reuses: Whether it does.
        kv_tokens: Its KV memory as declared, tokens.
        work_weight: Weight of its cumulative work in the policy `ratio`.
        has_ended: Whether a call of its engine ended at this instant.
        has_news: Whether its line or its engine changed visibly at this instant.
        is_touched: Whether it is among `touched`.
    """

    __slots__ = (
        "admission",
        "caches",
        "has_ended",
        "has_news",
        "heap_base",
        "inside",
        "is_touched",
        "kv_tokens",
        "limit_tokens",
        "num_calls",
        "present",
        "present_s",
        "present_since_s",
        "reuses",
        "size",
        "tie_key",
        "work_weight",
    )

    present_since_s: Real
    present_s: Real
    work_weight: Real
    present: Int
    heap_base: Int
    size: Int
    inside: Int
    admission: Int
    limit_tokens: Int
    tie_key: Int
    num_calls: Int
    caches: Int
    reuses: Int
    kv_tokens: Int
    has_ended: Int
    has_news: Int
    is_touched: Int


class BeliefState:
    """What policies believe of one instance's speed, which need not be true.

    Attributes:
        overhead_s: See `LatencyModel`, learned correction included; likewise the next nine.
        hit_factor: Share of the prompt tokens expected in its cache that are found there.
    """

    __slots__ = (
        "attention_s_per_pair",
        "batched_s",
        "hit_factor",
        "joined_s",
        "kv_s_per_token",
        "overhead_s",
        "pair_s",
        "prefill_s_per_token",
        "seq_s",
        "trio_s",
        "weights_s",
    )

    overhead_s: Real
    weights_s: Real
    prefill_s_per_token: Real
    seq_s: Real
    kv_s_per_token: Real
    attention_s_per_pair: Real
    pair_s: Real
    trio_s: Real
    batched_s: Real
    joined_s: Real
    hit_factor: Real


class ViewState:
    """What one dispatcher believes of one instance.

    Attributes:
        backlog_s: Sum of t_comp of the calls bound to it and not ended.
        outstanding: Number of those calls.
    """

    __slots__ = ("backlog_s", "outstanding")

    backlog_s: Real
    outstanding: Int


class TimerState:
    """Something that happens later.

    Attributes:
        at_s: When.
        order: Orders timers of one instant: as they were set.
        kind: What (see `fleet_kernel`).
        index: The stage or call it is about.
        count: Change of a view's number of calls.
        except_dispatcher: Dispatcher that knows already, or -1.
        next: Next unused slot.
    """

    __slots__ = ("at_s", "count", "except_dispatcher", "index", "kind", "next", "order")

    at_s: Real
    order: Int
    kind: Int
    index: Int
    count: Int
    except_dispatcher: Int
    next: Int
